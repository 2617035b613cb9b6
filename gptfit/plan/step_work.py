"""How much of each kind of work a micro-step and an update have. What a unit of each costs on one device, calibration tells.

All of them add up: a cost per unit that depends on sizes is several kinds of work. A product of few tokens is slower per token
because it also reads its weights, a narrow one per weight because it also writes its channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from gptfit.plan.memory import FITTED
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape

# An attention kernel that works on so many positions at a time skips what comes after a token only beyond them, where half
# is left: torch's for a CPU has blocks of 512 in backward.
ATTENTION_BLOCK = 512
PASSES = 3  # one forward, two backward

Work = dict[str, float]


def micro_work(setting: Setting) -> Mapping[str, Work]:
    """Of one micro-step, by the cause it is shown under."""
    shape, tokens = setting.shape, setting.micro_tokens
    again = 1 + 1 / PASSES if setting.checkpoint_activations else 1.0  # blocks run forward twice
    layers, heads = shape.n_layer * again, shape.n_layer * shape.n_head * again
    is_modern = float(shape.arch == "modern")
    near = min(shape.block_size, ATTENTION_BLOCK)
    matrices, head = block_weights(shape), shape.vocab_size * shape.n_embd
    logits = tokens * shape.vocab_size
    # The head's gradient is added up once per chunk.
    chunks = math.ceil(tokens / FITTED.chunk_tokens) if setting.chunked_loss else 0
    channels = tokens * shape.n_embd
    looked_up = shape.sizes["embedding"] + shape.sizes["table"]
    is_dense = shape.is_tied or setting.processes > 1  # the gradient, whatever the device
    return {
        "blocks": {
            "blocks: token x weight": tokens * matrices * again,
            "blocks: weight": matrices * again,
            "blocks: token x channel": channels * layers,
            "blocks: token x channel, modern": channels * layers * is_modern,
            "blocks: layer": layers,
            "blocks: layer, modern": layers * is_modern,
        },
        "attention": {
            "attention: token x channel x position": channels * layers * (near + shape.block_size) / 2,
            "attention: token x channel x near position": channels * layers * near,
            "attention: token x head x position": tokens * heads * shape.block_size,
            "attention: token x head": tokens * heads,
        },
        "head and loss": {
            "loss: token x weight": logits * shape.n_embd,
            "loss: weight": head,
            "loss: token x entry": 0 if setting.chunked_loss else logits,
            "loss: token x entry, in chunks": logits if setting.chunked_loss else 0,
            "loss: chunk x weight": chunks * head,
        },
        # Others cost a CPU nothing per weight: only rows that were looked up have a gradient there.
        "outside": {
            "tables: weight": 0 if is_dense else looked_up,
            "tables: weight, dense": looked_up if is_dense else 0,
            "stream: token x channel, modern": channels * is_modern,
        },
        "launches": {"micro-step": 1},
    }


def update_work(setting: Setting) -> Work:
    """AdamW walks over every weight; Muon makes each matrix of the blocks orthogonal instead."""
    shape = setting.shape
    matrices = block_weights(shape) if setting.optimizer == "muon" else 0
    is_muon = float(setting.optimizer == "muon")
    return {
        "update": 1,
        "update: layer": shape.n_layer,
        "adamw: weight": shape.n_weights - matrices,
        "muon: layer": shape.n_layer * is_muon,
        "muon: weight": matrices,
        "muon: weight x channel": matrices * shape.n_embd,
    }


def block_weights(shape: ModelShape) -> int:
    return shape.sizes["matrix"]


def joined(work: Mapping[str, Work]) -> Work:
    """Of all causes."""
    return {kind: amount for each in work.values() for kind, amount in each.items()}


def kinds_of_work() -> tuple[frozenset[str], frozenset[str]]:
    """Every kind that a micro-step and that an update of any setting can have."""
    setting = Setting(ModelShape(n_layer=1, n_head=1, n_embd=64, block_size=64, vocab_size=64), 1)
    return frozenset(joined(micro_work(setting))), frozenset(update_work(setting))
