"""Grid: a cost measured at a few sizes, read at any other by interpolating in logarithms."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gptfit import sane


@dataclass(frozen=True)
class Grid:
    """Positive values at every crossing of `axes`, the last axis running fastest.

    >>> round(Grid(((1.0, 4.0),), (10.0, 40.0)).at(2.0), 6)
    20.0
    """

    axes: tuple[tuple[float, ...], ...]
    values: tuple[float, ...]

    def at(self, *place: float) -> float:
        """Between the crossings along straight lines in logarithms; outside the value at the edge."""
        neighbours = [_neighbours(axis, where) for axis, where in zip(self.axes, place, strict=True)]
        total = 0.0
        for corner in itertools.product(*neighbours):
            weight = math.prod(share for _, share in corner)
            if weight:
                total += weight * math.log(self.values[self._index([index for index, _ in corner])])
        return math.exp(total)

    def _index(self, corner: Sequence[int]) -> int:
        index = 0
        for axis, position in zip(self.axes, corner, strict=True):
            index = index * len(axis) + position
        return index

    def times(self, scale: Callable[..., float]) -> Grid:
        """Every value multiplied by what `scale` says of its place."""
        places = itertools.product(*self.axes)
        return Grid(self.axes, tuple(value * scale(*at) for value, at in zip(self.values, places, strict=True)))

    def as_json(self) -> dict[str, Any]:
        return {"axes": [list(axis) for axis in self.axes], "values": list(self.values)}


def grid_of(points: Mapping[tuple[float, ...], float]) -> Grid:
    """From measured places; every crossing of the coordinates that occur must be there."""
    axes = tuple(tuple(sorted(set(column))) for column in zip(*points, strict=True))
    return Grid(axes, tuple(points[place] for place in itertools.product(*axes)))


def grid_from_json(values: Mapping[str, Any]) -> Grid:
    """ValueError where it is none: another version wrote it, or a hand changed it."""
    axes = tuple(
        tuple(map(_size, sane.sequence(axis, "axis", 1000))) for axis in sane.sequence(values["axes"], "axes", 4)
    )
    numbers = tuple(map(_cost, sane.sequence(values["values"], "values", 10**6)))
    if len(numbers) != math.prod(map(len, axes)) or not all(axes):
        raise ValueError("not a grid: a value at every crossing")
    if any(list(axis) != sorted(set(axis)) for axis in axes):
        raise ValueError("the places along an axis must ascend")
    return Grid(axes, numbers)


def _size(value: Any) -> float:
    return sane.number(value, "a size", 1e-12, 1e18)


def _cost(value: Any) -> float:
    """Seconds or bytes per unit of work; within what sums and products of them can hold."""
    return sane.number(value, "a cost", 1e-30, 1e12)


def _neighbours(axis: tuple[float, ...], where: float) -> tuple[tuple[int, float], ...]:
    """The crossings on both sides and how much each counts."""
    if where <= axis[0]:
        return ((0, 1.0),)
    if where >= axis[-1]:
        return ((len(axis) - 1, 1.0),)
    above = bisect_right(axis, where)
    share = math.log(where / axis[above - 1]) / math.log(axis[above] / axis[above - 1])
    return ((above - 1, 1.0 - share), (above, share))
