"""The split: which documents are validation, by a hash of (seed, file, row) that no restart can change."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEFAULT_FRACTION = 0.0005  # nanoGPT's openwebtext
# Enough windows that the default evaluation does not see the same few again and again: 512 windows of 1024 tokens.
FLOOR_TOKENS = 512 * 1024
MOST_FRACTION = 0.1  # a floor never takes more than nanoGPT's shakespeare split does
MOST_RANKED_ROWS = 50_000_000  # above this the law of large numbers holds and ranking costs seconds


@dataclass(frozen=True)
class SplitRule:
    """hash: a document is validation when its hash is below `threshold` / 2**64. tail: the last `fraction` of one text."""

    kind: str  # hash | tail
    fraction: float
    seed: int
    threshold: int = 0

    def is_val(self, key: str, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = row_hashes(self.seed, key, rows) < np.uint64(self.threshold)
        return found

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "fraction": self.fraction, "seed": self.seed, "threshold": self.threshold}


def row_hashes(seed: int, key: str, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """splitmix64 (Steele, Lea, Flood 2014) of the row number, started from a digest of seed and file name."""
    digest = hashlib.blake2b(f"{seed}\0{key}".encode(), digest_size=8).digest()
    x = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(int.from_bytes(digest, "little"))
    return scramble(x)


def scramble(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64; array arithmetic wraps at 64 bits as it should."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash_rule(
    asked_fraction: float | None, seed: int, rows_by_file: list[tuple[str, int]] | None, expected_tokens: float
) -> SplitRule:
    """The rule for these files: the fraction asked for, or the default raised to the floor.

    A plain fraction is a plain threshold, so adding files moves no document. The floor of a small data set is
    a rank among its rows instead, which gives it what it was promised and not what the hash happened to give.
    """
    fraction = asked_fraction
    if fraction is None:
        floor = FLOOR_TOKENS / max(1.0, expected_tokens)
        fraction = max(DEFAULT_FRACTION, min(floor, MOST_FRACTION))
    plain = SplitRule("hash", fraction, seed, math.floor(fraction * 2**64))
    total = sum(rows for _, rows in rows_by_file or [])
    if fraction <= 0 or not rows_by_file or not 2 <= total <= MOST_RANKED_ROWS:
        return plain
    hashes = np.concatenate([row_hashes(seed, key, np.arange(rows)) for key, rows in rows_by_file])
    given = int(np.count_nonzero(hashes < np.uint64(plain.threshold)))
    if (asked_fraction is not None or fraction == DEFAULT_FRACTION) and 0 < given < total:
        return plain
    wanted = min(total - 1, math.ceil(fraction * total))
    # The threshold is the smallest hash that stays in train, so exactly `wanted` are below it.
    return replace(plain, threshold=int(np.partition(hashes, wanted)[wanted]))
