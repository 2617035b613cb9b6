"""A portable modern model as llama.cpp's `arcee` architecture: its tensors under its names, and the numbers beside them.

Both compute RMS norm, rotary attention, squared ReLU and a head of its own. What is ours alone goes into the tensors: the
norm of the embedding into its table, the order of the rotary pairs into the rows of queries and keys, the rotary speeds into
llama.cpp's frequency factors, `qk_scale` into the queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gptfit.model.modern import rms_norm
from gptfit.model.rotary import rotary_speeds
from gptfit.shape import ModelShape

ARCEE = "arcee"
RMS_EPSILON = torch.finfo(torch.float32).eps  # what torch takes where none is given
ROTARY_BASE = 10_000.0  # llama.cpp's usual one; the factors turn its speeds into ours
# Divides the speed of a pair that does not turn: infinity would do, but checks of a file's numbers refuse it.
STANDS_STILL = 1e30


def arcee_tensors(state: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """In the order of llama.cpp's own converter."""
    ones = torch.ones(shape.n_embd)
    tensors = {
        "token_embd.weight": rms_norm(state["transformer.wte.weight"]),
        "rope_freqs.weight": rotary_factors(int(shape.head_size)),
    }
    for i in range(shape.n_layer):
        ours, theirs = f"transformer.h.{i}", f"blk.{i}"
        queries, keys, values = state[f"{ours}.attn.c_attn.weight"].chunk(3)
        tensors |= {
            f"{theirs}.attn_norm.weight": ones,
            f"{theirs}.attn_q.weight": _paired(queries, shape.n_head) * shape.qk_scale**2,
            f"{theirs}.attn_k.weight": _paired(keys, shape.n_head),
            f"{theirs}.attn_v.weight": values,
            f"{theirs}.attn_output.weight": state[f"{ours}.attn.c_proj.weight"],
            f"{theirs}.ffn_norm.weight": ones,
            f"{theirs}.ffn_up.weight": state[f"{ours}.mlp.c_fc.weight"],
            f"{theirs}.ffn_down.weight": state[f"{ours}.mlp.c_proj.weight"],
        }
    # A tied head is written too: the table above is normalised, the head is not.
    return tensors | {"output_norm.weight": ones, "output.weight": state["lm_head.weight"]}


def rotary_factors(head_size: int) -> Tensor:
    """(head_size / 2): llama.cpp's speed of each pair divided by this is ours."""
    pairs = torch.arange(head_size // 2, dtype=torch.float64)
    theirs = ROTARY_BASE ** (-2 * pairs / head_size)
    ours = rotary_speeds(head_size, torch.device("cpu")).double()
    return torch.where(ours > 0, theirs / ours, STANDS_STILL).float()


def _paired(weight: Tensor, n_head: int) -> Tensor:
    """We turn channels i and i + hs / 2 of a head together, llama.cpp turns neighbours: rows 0, hs / 2, 1, hs / 2 + 1, ..."""
    halves = weight.reshape(n_head, 2, -1, weight.shape[1])  # (nh, 2, hs / 2, C)
    return halves.transpose(1, 2).reshape(weight.shape)


def add_arcee_numbers(writer: Any, shape: ModelShape) -> None:
    writer.add_layer_norm_rms_eps(RMS_EPSILON)
    writer.add_rope_dimension_count(int(shape.head_size))
    writer.add_rope_freq_base(ROTARY_BASE)
