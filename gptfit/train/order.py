"""The order of training windows: a permutation of each epoch computed on the spot, nothing stored."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gptfit.data.split import scramble

Ints = npt.NDArray[np.int64]

ROUNDS = 6  # four rounds already make a Feistel network a strong permutation (Luby and Rackoff 1988); two to spare


@dataclass(frozen=True)
class EpochOrder:
    """Windows of block_size tokens, each exactly once per epoch, in an order that is a function of (seed, epoch).

    Every epoch cuts the file at another offset, so the same tokens meet different neighbours.
    """

    n_tokens: int
    block_size: int
    seed: int
    is_reshuffled: bool = False  # epochs follow each other as positions, for `ShuffledDocuments` to find theirs

    @property
    def windows(self) -> int:
        """Per epoch: as many as fit at every offset, so that all epochs have equally many."""
        return max(1, (self.n_tokens - self.block_size) // self.block_size)

    def starts(self, first: int, count: int) -> Ints:
        """Where the windows number first .. first+count-1 of the whole run begin."""
        epochs, places = np.divmod(np.arange(first, first + count, dtype=np.int64), self.windows)
        starts = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            window = permute(places[here], self.windows, mix(self.seed, int(epoch)))
            before = int(epoch) * self.n_tokens if self.is_reshuffled else 0
            starts[here] = before + window * self.block_size + self.offset(int(epoch))
        return starts

    def offset(self, epoch: int) -> int:
        """Where epoch's first window begins; the first epoch begins at the file's beginning."""
        # A window needs one more token than its length: the target of its last position.
        spare = self.n_tokens - 1 - self.windows * self.block_size
        choices = min(self.block_size, spare + 1)
        return mix(self.seed ^ 0x0FF5E7, epoch) % choices if epoch else 0

    def epoch(self, first: int) -> float:
        """How many times the data has been seen when window number `first` is next."""
        return first / self.windows


def permute(places: Ints, size: int, key: int) -> Ints:
    """A permutation of range(size) at the given places: a Feistel network over the next power of four,
    walked until it lands inside (at most a few rounds, as the domain is under four times the size).
    """
    half_bits = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    keys = [np.uint64(mix(key, r)) for r in range(ROUNDS)]
    out = places.astype(np.uint64)
    outside = np.ones(len(out), dtype=bool)
    while outside.any():
        out[outside] = _feistel(out[outside], half_bits, keys)
        outside = out >= size
    return out.astype(np.int64)


def _feistel(values: npt.NDArray[np.uint64], half_bits: int, keys: list[np.uint64]) -> npt.NDArray[np.uint64]:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (scramble(right ^ key) & mask)
    return (left << bits) | right


def mix(a: int, b: int) -> int:
    """One well-scattered 64-bit number from two integers."""
    golden = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, splitmix64's increment
    value = ((a & 0xFFFFFFFFFFFFFFFF) * golden + (b + 1) * 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    return int(scramble(np.array([value], dtype=np.uint64))[0])
