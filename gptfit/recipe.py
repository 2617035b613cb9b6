"""The modern recipe's numbers as pure functions of the size, each with its source."""

from __future__ import annotations

import math

from gptfit.shape import ModelShape

# AdamW's rates beside Muon, for the width at which modded-nanogpt tuned them.
REFERENCE_WIDTH = 768
EMBEDDING_RATE = 0.3
HEAD_RATE = 0.004
SCALAR_RATE = 0.03


def adamw_rate(kind: str, shape: ModelShape) -> float:
    """The rate of a tensor that is no matrix of a block, when Muon trains those."""
    if kind in ("vector", "scalar"):
        return SCALAR_RATE
    # A tied embedding is small as the head must be, and so is what is added to it.
    if kind == "head" or shape.is_tied:
        return HEAD_RATE * math.sqrt(REFERENCE_WIDTH / shape.n_embd)
    return EMBEDDING_RATE
