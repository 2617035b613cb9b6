"""Expected loss where data, time or model are too small for the published law: nats per byte, with a wide range.

The published law was fitted from 20M tokens on and goes astray below (it expects 11 nats per GPT-2 token of
Shakespeare, where 5 are reached). This one was fitted on runs of minutes (bench/propose_runs.jsonl) and published small
runs; docs/formulas.md has the points and the errors. It counts the blocks' parameters: on little data a large
vocabulary is a table that is hardly ever read. What it costs where data repeats is in `plan/repeat_penalty.py`.
"""

from __future__ import annotations

import math

# nats per byte = text * (E + A / N'^ALPHA + B / (D' + B0)^BETA), for the modern recipe; docs/formulas.md has the points.
E = 0.534
A, ALPHA = 8.86, 0.26  # N': the blocks' parameters, as far as the unique bytes can use them
B, B0, BETA = 100.4, 241e3, 0.3055  # D': the bytes seen, repeats at what they are worth
# Parameters per unique byte that still help: with strong regularisation a larger model is never worse (Kim et al. 2025,
# slowrun), but seven times as many as unique tokens are within 0.04 nats of infinitely many.
USABLE = 0.95
# All repeats together are worth this many epochs of fresh bytes: Muennighoff et al. (2023) have 15.4 for a recipe of
# which six to ten tokens are worth one of these; nothing is gained after six or so.
REPEATS = 1.6
# One token of nanoGPT's recipe teaches a sixth of one of the modern recipe's: docs/recipe.md, 1/8.7 at 5M, 1/4.9 at 30M.
PLAIN_TOKENS = 1 / 6
WEB_PAGES, ANY_TEXT = 1.0, 0.75  # FineWeb is the hardest: Shakespeare came out at 0.75 of it, MDN's pages at 0.68
WIDTH = 0.25  # of the value: nine of ten points lie within, whatever the text


def nats_per_byte(
    block_parameters: float, bytes_seen: float, unique_bytes: float, is_plain: bool = False, text: float = ANY_TEXT
) -> float:
    """Of a run with the dropout and weight decay of `plan/many_epochs.py`; `is_plain`: nanoGPT's recipe."""
    seen = bytes_seen * (PLAIN_TOKENS if is_plain else 1.0)
    unique = min(unique_bytes, bytes_seen)
    usable = USABLE * unique
    parameters = -usable * math.expm1(-block_parameters / usable)
    data = effective_bytes(seen, unique)
    return float(text * (E + A / parameters**ALPHA + B / (data + B0) ** BETA))


def effective_bytes(seen: float, unique: float) -> float:
    """What the bytes seen are worth in fresh ones."""
    if seen <= unique:
        return seen
    return unique * (1 - REPEATS * math.expm1(-(seen / unique - 1) / REPEATS))
