"""ModelShape: one inventory of every weight; parameters, FLOPs, bytes and decay groups are sums over it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

# 2 for the forward multiply-add, 4 for the two products of the backward pass. PaLM (2022), appendix B.
FLOPS_PER_WEIGHT = 6

Kind = Literal["embedding", "table", "position", "matrix", "head", "gate", "vector", "scalar"]

GATE_CHANNELS = 12  # of a token's state that open or close a gate (nanochat)
BIGRAM_ROWS = 5  # per entry of the vocabulary (modded-nanogpt)
BIGRAM_LEAST_ROWS = 2**14  # bytes and characters have few entries but as many pairs
BIGRAM_SHARE = 4  # the bigram's embedding is this part of the width


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
    value_embeddings: str = "none"
    bigram: bool = False
    qk_scale: float = 1.0
    mlp_init: float = 1.0
    backout: bool = False
    smear_gate: bool = False

    @property
    def value_layers(self) -> tuple[int, ...]:
        """Every second layer, the last among them, sees the token's own value embedding."""
        last = self.n_layer - 1
        return () if self.value_embeddings == "none" else tuple(i for i in range(self.n_layer) if i % 2 == last % 2)

    @property
    def value_tables(self) -> int:
        """Weights in the tables of the value embeddings, which are looked up and not multiplied with."""
        return self.vocab_size * self.n_embd * len(self.value_layers) if self.value_embeddings == "tables" else 0

    @property
    def gate_channels(self) -> int:
        return min(GATE_CHANNELS, self.n_embd)

    @property
    def bigram_size(self) -> tuple[int, int]:
        """Rows and channels of the table of hashed token pairs."""
        rows = max(BIGRAM_ROWS * self.vocab_size, min(self.vocab_size**2, BIGRAM_LEAST_ROWS))
        return rows, max(1, self.n_embd // BIGRAM_SHARE)

    @property
    def head_size(self) -> float:
        return self.n_embd / self.n_head

    def weights(self) -> tuple[Weight, ...]:
        # An unknown arch is refused by the config check; `plan` still says what can be said about the rest.
        return INVENTORIES.get(self.arch, _gpt2_weights)(self)

    @property
    def n_weights(self) -> int:
        """Every trainable number, tied tensors once."""
        return sum(self.sizes.values())

    @property
    def sizes(self) -> Counter[Kind]:
        """Trainable numbers of each kind."""
        return _sizes(self)

    @property
    def parameters(self) -> int:
        """nanoGPT's N: position embeddings not counted, the tied token embedding is (it is also the head)."""
        return self.n_weights - self.sizes["position"]

    @property
    def matmul_weights(self) -> int:
        """Weights that every token is multiplied with; a tied embedding counts, as the head."""
        tied_head = self.vocab_size * self.n_embd if self.is_tied else 0
        return self.sizes["matrix"] + self.sizes["head"] + tied_head

    @property
    def is_tied(self) -> bool:
        """Whether the token embedding is also the head."""
        return not self.sizes["head"]

    @property
    def tied_parameters(self) -> int:
        """N as if the head were tied: what scaling laws were fitted on, and what a token is multiplied with.

        An untied embedding, and any further table, is a look-up; it costs nothing and is not counted.
        """
        looked_up = self.sizes["table"] + (0 if self.is_tied else self.sizes["embedding"])
        return self.parameters - looked_up

    @property
    def flops_per_token(self) -> int:
        """Training FLOPs per token as nanoGPT counts them: 6N + 12*L*C*T. PaLM (2022), appendix B."""
        attention = 12 * self.n_layer * self.n_embd * self.block_size
        return FLOPS_PER_WEIGHT * self.tied_parameters + attention


@cache
def _sizes(shape: ModelShape) -> Counter[Kind]:
    sizes: Counter[Kind] = Counter()
    for weight in shape.weights():
        sizes[weight.kind] += weight.size
    return sizes


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
    if shape.smear_gate:
        weights.append(Weight("smear_gate.weight", (1, shape.gate_channels), "gate"))
    if shape.bigram:
        weights.append(Weight("bigram.weight", shape.bigram_size, "table"))
    if shape.backout:
        weights.append(Weight("backout", (1,), "scalar"))
    if shape.layer_scalars:
        weights += [Weight(name, (shape.n_layer,), "scalar") for name in ("residual_scales", "embedding_scales")]
    if shape.value_residual:
        weights.append(Weight("value_scales", (shape.n_layer,), "scalar"))
    weights += _value_weights(shape)
    if not shape.tied_head:
        weights.append(Weight("lm_head.weight", (shape.vocab_size, c), "head"))
    return tuple(weights)


def _value_weights(shape: ModelShape) -> list[Weight]:
    """A table of the vocabulary per layer that has one, or a projection of the embedding, and its gate per head."""
    is_table = shape.value_embeddings == "tables"
    size = (shape.vocab_size if is_table else shape.n_embd, shape.n_embd)
    weights = []
    for i in shape.value_layers:
        weights.append(Weight(f"values.{i}.source.weight", size, "table" if is_table else "matrix"))
        weights.append(Weight(f"values.{i}.gate.weight", (shape.n_head, shape.gate_channels), "gate"))
    return weights


def _norm(shape: ModelShape, name: str) -> list[Weight]:
    return [Weight(f"{name}.weight", (shape.n_embd,), "vector")] if shape.norm == "layer" else []


def _with_bias(bias: bool, name: str, size: tuple[int, ...]) -> list[Weight]:
    weight = Weight(f"{name}.weight", size, "matrix" if len(size) == 2 else "vector")
    return [weight, Weight(f"{name}.bias", size[:1], "vector")] if bias else [weight]


# From an architecture's name to its inventory.
INVENTORIES: dict[str, Callable[[ModelShape], tuple[Weight, ...]]] = {"gpt2": _gpt2_weights, "modern": _modern_weights}
