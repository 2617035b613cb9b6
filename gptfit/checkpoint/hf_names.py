"""GPT-2 weights under Hugging Face's names and under nanoGPT's: the same tensors, the linear layers transposed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gptfit import sane
from gptfit.errors import RunError
from gptfit.shape import ModelShape

# OpenAI's code keeps a linear layer as (in, out), torch as (out, in).
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
PREFIX = "transformer."
MASKS = (".attn.bias", ".attn.masked_bias")  # buffers of old files, no weights
HEAD = "lm_head.weight"
# Hugging Face's names of the two GELUs -> torch's `approximate`.
GELUS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


def to_hf(model: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """nanoGPT's tensors as a GPT2LMHeadModel file has them; the tied head is left out."""
    tensors = with_biases(model, shape).items()
    return {name: _turned(name, tensor).contiguous() for name, tensor in tensors if name != HEAD}


def with_biases(model: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Other programs know GPT-2 with biases only; zeros change nothing."""
    like = model["transformer.wte.weight"]
    named = {weight.name: weight.shape for weight in replace(shape, bias=True).weights()}
    zeros = {name: torch.zeros(size, dtype=like.dtype) for name, size in named.items() if name not in model}
    return {**model, **zeros}


def from_hf(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The other way round; files with and without the `transformer.` prefix are in use."""
    state = {}
    for name, tensor in tensors.items():
        if name.endswith(MASKS):
            continue
        name = name if name.startswith((PREFIX, HEAD)) else PREFIX + name
        state[name] = _turned(name, tensor)
    state.setdefault(HEAD, state["transformer.wte.weight"])
    return state


def shape_of_hf(config: Mapping[str, Any], where: str) -> ModelShape:
    """From a config.json; whatever our GPT-2 does not compute is refused by name."""
    if config.get("model_type") != "gpt2":
        raise RunError(f"{where}: model_type is {config.get('model_type')!r}", fix="only gpt2 folders can be opened")
    n_embd = _size(config, "n_embd")
    plain = {
        "n_inner": (None, 4 * n_embd),
        "tie_word_embeddings": (None, True),
        "scale_attn_weights": (None, True),
        "scale_attn_by_inverse_layer_idx": (None, False),
        "add_cross_attention": (None, False),
        "layer_norm_epsilon": (None, 1e-5),
        "activation_function": (None, *GELUS),
    }
    for key, allowed in plain.items():
        if config.get(key) not in allowed:
            raise RunError(f"{where}: {key} = {config[key]!r} is not GPT-2's", fix="this model cannot be opened")
    return ModelShape(
        n_layer=_size(config, "n_layer"),
        n_head=_size(config, "n_head"),
        n_embd=n_embd,
        block_size=_size(config, "n_positions"),
        vocab_size=_size(config, "vocab_size"),
        bias=True,
    )


def _size(config: Mapping[str, Any], key: str) -> int:
    """A whole number: 2.5 heads read as 2 would be another model without a word."""
    return sane.integer(config[key], key, 1, 2**40)


def gelu_of_hf(config: Mapping[str, Any]) -> str:
    return GELUS[config.get("activation_function") or "gelu_new"]


def hf_name_of_gelu(gelu: str) -> str:
    return {"none": "gelu", "tanh": "gelu_new"}[gelu]


def _turned(name: str, tensor: Tensor) -> Tensor:
    return tensor.t() if name.endswith(TRANSPOSED) else tensor
