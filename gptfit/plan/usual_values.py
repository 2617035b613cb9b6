"""Usual learning rate, batch, warm-up and horizon for a model size, as pure functions with their sources."""

from __future__ import annotations

import itertools
import math

from gptfit.config import recipe
from gptfit.shape import ModelShape

# GPT-3 (Brown et al. 2020), table 2.1: non-embedding size in parameters -> peak learning rate, tokens per step.
GPT3_SIZES = (
    (125e6, 6.0e-4, 0.5e6),
    (350e6, 3.0e-4, 0.5e6),
    (760e6, 2.5e-4, 0.5e6),
    (1.3e9, 2.0e-4, 1.0e6),
    (2.7e9, 1.6e-4, 1.0e6),
    (6.7e9, 1.2e-4, 2.0e6),
    (13e9, 1.0e-4, 2.0e6),
)
# Below GPT-3's sizes: nanoGPT's 10.65M model trains at 1e-3; larger rates were not better in its own notes.
SMALLEST_MODEL_RATE = 1.0e-3
TOKENS_PER_PARAMETER = 20  # Chinchilla (Hoffmann et al. 2022): compute-optimal
# nanoGPT's Shakespeare on a card, and on a MacBook's CPU, where its README has 768 for 2,000 updates.
LEAST_TOKENS_PER_STEP, LEAST_ON_A_CPU = 16_384, 1_024
WEIGHT_DECAY = 0.1  # GPT-3, nanoGPT


def learning_rate(parameters: float) -> float:
    """Peak AdamW rate: GPT-3's table, interpolated in the logarithm, 1e-3 towards small models.

    >>> learning_rate(124e6), learning_rate(40e6)
    (0.0006, 0.00086)
    """
    if parameters <= GPT3_SIZES[0][0]:
        first_size, first_rate, _ = GPT3_SIZES[0]
        # From 6e-4 at 125M up to 1e-3 at 25M and below.
        share = min(1.0, math.log(first_size / parameters) / math.log(first_size / 25e6))
        return _nice(first_rate * (SMALLEST_MODEL_RATE / first_rate) ** share)
    for (size, rate, _), (next_size, next_rate, _) in itertools.pairwise(GPT3_SIZES):
        if parameters <= next_size:
            share = math.log(parameters / size) / math.log(next_size / size)
            return _nice(rate * (next_rate / rate) ** share)
    return GPT3_SIZES[-1][1]


def final_rate(rate: float) -> float:
    """A tenth of the peak: GPT-3, Chinchilla, nanoGPT."""
    return float(f"{rate / 10:.2g}")


def tokens_per_step(parameters: float, tokens: float, least: int = LEAST_TOKENS_PER_STEP) -> int:
    """About GPT-3's half a million, fewer when the run is short so that it still has 2,000 updates or more."""
    usual = next((batch for size, _, batch in reversed(GPT3_SIZES) if parameters >= size), GPT3_SIZES[0][2])
    wanted = min(usual, max(least, tokens / 2_000))
    return int(2 ** round(math.log2(wanted)))


def usual_tokens_per_step(parameters: float) -> tuple[float, float]:
    """The range nobody frowns at: from 1/16 (short runs) to 4 times GPT-3's."""
    usual = next((batch for size, _, batch in reversed(GPT3_SIZES) if parameters >= size), GPT3_SIZES[0][2])
    return usual / 16, usual * 4


def usual_learning_rate(parameters: float) -> tuple[float, float]:
    """A factor of three below to four above the default: tuned AdamW runs at 124M go up to 1.8e-3 (modded-nanogpt)."""
    rate = learning_rate(parameters)
    return rate / 3, rate * 4


def optimal_tokens(shape: ModelShape) -> float:
    """A horizon worth its time: twenty tokens per parameter, fewer with the modern recipe."""
    return recipe.optimal_tokens(shape) if shape.arch == "modern" else TOKENS_PER_PARAMETER * float(shape.parameters)


def dropout(epochs: float) -> float:
    """None while data is fresh; nanoGPT's 0.2 for many epochs over a small file."""
    if epochs <= 4:
        return 0.0
    return 0.1 if epochs <= 20 else 0.2


def _nice(rate: float) -> float:
    """Two digits: a rate is never known better."""
    return float(f"{rate:.1e}")
