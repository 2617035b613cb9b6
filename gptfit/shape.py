"""ModelShape: one inventory of every weight; parameters, FLOPs, bytes and decay groups are sums over it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Literal

# 2 for the forward multiply-add, 4 for the two products of the backward pass. PaLM (2022), appendix B.
FLOPS_PER_WEIGHT = 6

Kind = Literal["embedding", "position", "matrix", "head", "vector", "scalar"]


@dataclass(frozen=True)
class Weight:
    """One tensor of the model under its state_dict name."""

    name: str
    shape: tuple[int, ...]
    kind: Kind

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def decays(self) -> bool:
        """nanoGPT's rule: weight decay on tensors of two or more dimensions."""
        return len(self.shape) >= 2


@dataclass(frozen=True)
class ModelShape:
    """What the model is, before any tensor exists.

    >>> shape = ModelShape(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304, bias=False)
    >>> shape.n_weights, shape.parameters
    (124373760, 123587328)
    """

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int
    bias: bool = False
    arch: str = "gpt2"
    # The ingredients of arch='modern', config keys of the same names; what each is worth: docs/recipe.md
    positions: str = "rotary"
    norm: str = "rms"
    qk_norm: bool = True
    activation: str = "relu2"
    zero_init: bool = False
    tied_head: bool = False
    smear: bool = True
    value_residual: bool = False
    layer_scalars: bool = False
    logit_softcap: float = 0.0

    @property
    def head_size(self) -> float:
        return self.n_embd / self.n_head

    def weights(self) -> tuple[Weight, ...]:
        # An unknown arch is refused by the config check; `plan` still says what can be said about the rest.
        return INVENTORIES.get(self.arch, _gpt2_weights)(self)

    @property
    def n_weights(self) -> int:
        """Every trainable number, tied tensors once."""
        return sum(w.size for w in self.weights())

    @property
    def parameters(self) -> int:
        """nanoGPT's N: position embeddings not counted, the tied token embedding is (it is also the head)."""
        return sum(w.size for w in self.weights() if w.kind != "position")

    @property
    def matmul_weights(self) -> int:
        """Weights that every token is multiplied with; a tied embedding counts, as the head."""
        return sum(w.size for w in self.weights() if w.kind in ("matrix", "head")) + self._tied_head

    @property
    def is_tied(self) -> bool:
        """Whether the token embedding is also the head."""
        return not any(w.kind == "head" for w in self.weights())

    @property
    def _tied_head(self) -> int:
        return self.vocab_size * self.n_embd if self.is_tied else 0

    @property
    def tied_parameters(self) -> int:
        """N as if the head were tied: what scaling laws were fitted on, and what a token is multiplied with.

        An untied embedding is a table look-up; it costs nothing and is not counted.
        """
        looked_up = 0 if self.is_tied else sum(w.size for w in self.weights() if w.kind == "embedding")
        return self.parameters - looked_up

    @property
    def flops_per_token(self) -> int:
        """Training FLOPs per token as nanoGPT counts them: 6N + 12*L*C*T. PaLM (2022), appendix B."""
        attention = 12 * self.n_layer * self.n_embd * self.block_size
        return FLOPS_PER_WEIGHT * self.tied_parameters + attention

    @property
    def decay_weights(self) -> int:
        return sum(w.size for w in self.weights() if w.decays)

    @property
    def no_decay_weights(self) -> int:
        return sum(w.size for w in self.weights() if not w.decays)


@cache
def _gpt2_weights(shape: ModelShape) -> tuple[Weight, ...]:
    """In the order nanoGPT's model creates them; the head shares `transformer.wte.weight`."""
    c = shape.n_embd
    weights = [
        Weight("transformer.wte.weight", (shape.vocab_size, c), "embedding"),
        Weight("transformer.wpe.weight", (shape.block_size, c), "position"),
    ]
    for i in range(shape.n_layer):
        block = f"transformer.h.{i}"
        weights += _with_bias(shape.bias, f"{block}.ln_1", (c,))
        weights += _with_bias(shape.bias, f"{block}.attn.c_attn", (3 * c, c))
        weights += _with_bias(shape.bias, f"{block}.attn.c_proj", (c, c))
        weights += _with_bias(shape.bias, f"{block}.ln_2", (c,))
        weights += _with_bias(shape.bias, f"{block}.mlp.c_fc", (4 * c, c))
        weights += _with_bias(shape.bias, f"{block}.mlp.c_proj", (c, 4 * c))
    weights += _with_bias(shape.bias, "transformer.ln_f", (c,))
    return tuple(weights)


@cache
def _modern_weights(shape: ModelShape) -> tuple[Weight, ...]:
    """Norms have no weights unless they are GPT-2's; the head has its own unless it is tied."""
    c = shape.n_embd
    weights = [Weight("transformer.wte.weight", (shape.vocab_size, c), "embedding")]
    if shape.positions == "learned":
        weights.append(Weight("transformer.wpe.weight", (shape.block_size, c), "position"))
    for i in range(shape.n_layer):
        block = f"transformer.h.{i}"
        weights += _norm(shape, f"{block}.ln_1")
        weights.append(Weight(f"{block}.attn.c_attn.weight", (3 * c, c), "matrix"))
        weights.append(Weight(f"{block}.attn.c_proj.weight", (c, c), "matrix"))
        weights += _norm(shape, f"{block}.ln_2")
        weights.append(Weight(f"{block}.mlp.c_fc.weight", (4 * c, c), "matrix"))
        weights.append(Weight(f"{block}.mlp.c_proj.weight", (c, 4 * c), "matrix"))
    weights += _norm(shape, "transformer.ln_f")
    if shape.smear:
        weights.append(Weight("smear", (c,), "vector"))
    if shape.layer_scalars:
        weights += [Weight(name, (shape.n_layer,), "scalar") for name in ("residual_scales", "embedding_scales")]
    if shape.value_residual:
        weights.append(Weight("value_scales", (shape.n_layer,), "scalar"))
    if not shape.tied_head:
        weights.append(Weight("lm_head.weight", (shape.vocab_size, c), "head"))
    return tuple(weights)


def _norm(shape: ModelShape, name: str) -> list[Weight]:
    return [Weight(f"{name}.weight", (shape.n_embd,), "vector")] if shape.norm == "layer" else []


def _with_bias(bias: bool, name: str, size: tuple[int, ...]) -> list[Weight]:
    weight = Weight(f"{name}.weight", size, "matrix" if len(size) == 2 else "vector")
    return [weight, Weight(f"{name}.bias", size[:1], "vector")] if bias else [weight]


# From an architecture's name to its inventory.
INVENTORIES: dict[str, Callable[[ModelShape], tuple[Weight, ...]]] = {"gpt2": _gpt2_weights, "modern": _modern_weights}
_FIELDS = tuple(field.name for field in fields(ModelShape))
INGREDIENTS = _FIELDS[_FIELDS.index("arch") + 1 :]
