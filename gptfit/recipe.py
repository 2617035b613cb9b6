"""The modern recipe's numbers for a size: which keys it sets, each a pure function with its source."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from gptfit.config import TrainConfig
from gptfit.shape import ModelShape

RECIPES = ("gpt2", "modern")

# Muon's rate for matrices and AdamW's for the rest, from modded-nanogpt's short script (track 3, 12 x 768), checked
# at 3 x 128, where 0.02 was best for the head. Muon's scaling carries the first over width and depth; embeddings are
# normalised before the first block, so theirs needs none; the head's falls with the width (Yang et al. 2022, muP).
MATRIX_RATE = 0.02
EMBEDDING_RATE = 0.3
HEAD_RATE = 0.004
SCALAR_RATE = 0.03
REFERENCE_WIDTH = 768

HEAD_SIZE = 64  # 128 from this width on: fewer, longer heads are faster on tensor cores (nanochat)
WIDE = 1536
# Enough for the loss of GPT-2 124M (3.28 on FineWeb) in track 3: 1.70e9 tokens, 13.7 for each of 123.6M parameters.
TOKENS_PER_PARAMETER = 13.7
STEPS = 3_250  # of that run
MOST_TOKENS_PER_STEP = 524_288  # of that run
LEAST_TOKENS_PER_STEP = (
    4_096  # where Muon's 22 C^3 FLOPs per C x C matrix reach the model's 6 C^2 per token at C = 1,100
)
WARMUP_FRACTION = 0.0  # Muon's updates have one size from the first on; docs/recipe.md has what a warm-up is worth
# Track 3 decays over 0.7 of the run and has no floor.
DECAY_FRACTION = 0.6
WEIGHT_DECAY = 0.05  # track 3, on the matrices only
BETAS = (0.8, 0.95)  # track 3, for AdamW's part


def adamw_rate(kind: str, shape: ModelShape) -> float:
    """The rate of a tensor that is no matrix of a block, when Muon trains those."""
    if kind in ("vector", "scalar"):
        return SCALAR_RATE
    # A tied embedding is small as the head must be, and so is what is added to it.
    if kind == "head" or shape.is_tied:
        return HEAD_RATE * REFERENCE_WIDTH / shape.n_embd
    return EMBEDDING_RATE


def optimal_tokens(shape: ModelShape) -> float:
    """A horizon worth its time, in tokens. Parameters count as if the head were tied."""
    return TOKENS_PER_PARAMETER * shape.tied_parameters


def tokens_per_step(tokens: float) -> int:
    """A power of two that gives the run about as many updates as the tuned one had."""
    wanted: int = 2 ** round(math.log2(max(1.0, tokens / STEPS)))
    return max(LEAST_TOKENS_PER_STEP, min(MOST_TOKENS_PER_STEP, wanted))


def head_count(n_embd: int) -> int:
    """Heads of 64 channels, of 128 in wide models; one head where neither divides."""
    sizes = (128, HEAD_SIZE) if n_embd >= WIDE else (HEAD_SIZE, 32)
    return next((n_embd // size for size in sizes if n_embd % size == 0), 1)


def training_keys(max_iters: int) -> dict[str, Any]:
    """How the recipe trains a model of any size for `max_iters` updates."""
    return {
        "arch": "modern",
        "optimizer": "muon",
        "schedule": "wsd",
        "learning_rate": MATRIX_RATE,
        "min_lr": 0.0,
        "warmup_iters": round(WARMUP_FRACTION * max_iters),
        "lr_decay_iters": max_iters,
        "decay_fraction": DECAY_FRACTION,
        "weight_decay": WEIGHT_DECAY,
        "beta1": BETAS[0],
        "beta2": BETAS[1],
        "bias": False,
    }


def modern_keys(
    config: TrainConfig, in_files: Collection[str], on_command_line: Collection[str], vocab_size: int | None = None
) -> dict[str, Any]:
    """What the recipe changes in a config.

    A file's model, batch and horizon stay; its rates were tuned for another recipe and do not. The command line wins.
    """
    given = {*in_files, *on_command_line}
    keys = {} if "n_head" in given else {"n_head": head_count(config.n_embd)}
    sized = config.unchecked(**{**config.as_dict(), **keys, "arch": "modern"})
    keys |= {key: value for key, value in _size_keys(sized, given, vocab_size).items() if key not in given}
    max_iters = int(keys.get("max_iters", config.max_iters))
    return keys | {key: value for key, value in training_keys(max_iters).items() if key not in on_command_line}


def _size_keys(config: TrainConfig, given: Collection[str], vocab_size: int | None) -> dict[str, Any]:
    """Batch and horizon, where the config leaves them to nanoGPT's defaults, which are a 4-day run on eight A100s."""
    tokens = optimal_tokens(config.shape(vocab_size))
    step_is_given = {"tokens_per_step", "gradient_accumulation_steps"} & set(given)
    if step_is_given:
        return {"max_iters": math.ceil(tokens / config.tokens_per_iter())}
    micro = config.batch_size * config.block_size
    step = max(micro, tokens_per_step(tokens) // micro * micro)
    return {"tokens_per_step": step, "max_iters": math.ceil(tokens / step)}
