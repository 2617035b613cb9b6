"""Estimate: a number with its range and how it is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Basis = Literal["exact", "spec", "fit", "published", "timed", "calibrated", "measured"]


@dataclass(frozen=True)
class Estimate:
    """A value, the range it should fall in nine times out of ten, and its basis.

    >>> Estimate.exact(3.0)
    Estimate(value=3.0, low=3.0, high=3.0, basis='exact')
    """

    value: float
    low: float
    high: float
    basis: Basis

    @classmethod
    def exact(cls, value: float) -> Estimate:
        return cls(value, value, value, "exact")

    @classmethod
    def within(cls, value: float, relative: float, basis: Basis) -> Estimate:
        """A symmetric relative range: within(100, 0.1, 'fit') is 90 to 110."""
        return cls(value, value * (1 - relative), value * (1 + relative), basis)

    def map(self, scale: float) -> Estimate:
        """The same knowledge in another unit."""
        ends = sorted((self.low * scale, self.high * scale))
        return Estimate(self.value * scale, ends[0], ends[1], self.basis)

    def as_json(self) -> dict[str, float | str]:
        return {"value": self.value, "low": self.low, "high": self.high, "basis": self.basis}
