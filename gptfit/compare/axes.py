"""Validation loss of several runs at equal steps, tokens, training time and FLOPs; who is ahead, and since when."""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass
from typing import Literal

from gptfit.compare.facts import RunFacts
from gptfit.compare.noise import Noise

Axis = Literal["step", "tokens", "seconds", "flops"]
AXES: tuple[Axis, ...] = ("step", "tokens", "seconds", "flops")
Curve = list[tuple[float, float]]


# How far back the slope of a curve is taken; evals scatter, so not from one to the next.
SLOPE_EFOLDS = 0.25


@dataclass(frozen=True)
class Point:
    """Both losses at one place of an axis, and how much they may differ there by chance."""

    at: float
    losses: tuple[float, float]
    noise: float

    @property
    def difference(self) -> float:
        """Second minus first: negative when the second run is lower, so better."""
        return self.losses[1] - self.losses[0]


@dataclass(frozen=True)
class Duel:
    """Two runs along one axis. `ahead` is 0 or 1, or None inside the noise."""

    axis: Axis
    points: tuple[Point, ...]
    ahead: int | None
    ahead_from: float | None  # from here to the end the leader leads by more than the noise
    crossings: tuple[float, ...]  # where the curves meet

    @property
    def last(self) -> Point:
        return self.points[-1]

    @property
    def noise(self) -> float:
        """At the last common point."""
        return self.last.noise


def curve(run: RunFacts, axis: Axis, bpb: bool = False) -> Curve:
    """(x, validation loss) in x order, finite points only. The untrained point at x = 0 is no basis for comparison."""
    points: Curve = []
    for point in run.evals:
        x, y = getattr(point, axis), run.validation(point, bpb)
        if x is not None and y is not None and x > 0 and (not points or x > points[-1][0]):
            points.append((float(x), y))
    return points


def value_at(points: Curve, x: float) -> float | None:
    """Between two evals a loss is nearly straight in log x; outside the evals nothing is known."""
    if not points or x < points[0][0] * (1 - 1e-9) or x > points[-1][0] * (1 + 1e-9):
        return None
    i = min(bisect.bisect_left(points, (x, -math.inf)), len(points) - 1)
    if i == 0 or points[i][0] <= x:
        return points[i][1]
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    share = (math.log(x) - math.log(x0)) / (math.log(x1) - math.log(x0))
    return y0 + share * (y1 - y0)


def duel(left: Curve, right: Curve, axis: Axis, noise: Noise) -> Duel | None:
    """None when the two never overlap on this axis."""
    points = _common_points(left, right, noise)
    if not points:
        return None
    ahead = _leader(points[-1])
    return Duel(axis, points, ahead, _since(points, ahead), _crossings(points))


def _common_points(left: Curve, right: Curve, noise: Noise) -> tuple[Point, ...]:
    """At every eval of either run where the other has a value too."""
    places = sorted({x for x, _ in left} | {x for x, _ in right})
    points: list[Point] = []
    for x in places:
        a, b = value_at(left, x), value_at(right, x)
        if a is not None and b is not None and not (points and x <= points[-1].at * (1 + 1e-9)):
            points.append(Point(x, (a, b), noise.band(max(_slope(left, x), _slope(right, x)))))
    return tuple(points)


def _slope(points: Curve, x: float) -> float:
    """How fast the loss falls per e-fold at x: the same on every axis, as all of them grow with the steps."""
    first = max(points[0][0], x * math.exp(-SLOPE_EFOLDS))
    if first >= x:
        first, x = points[0][0], points[min(1, len(points) - 1)][0]
    before, after = value_at(points, first), value_at(points, x)
    if before is None or after is None or first >= x:
        return 0.0
    return max(0.0, (before - after) / math.log(x / first))


def _leader(point: Point) -> int | None:
    if abs(point.difference) <= point.noise:
        return None
    return 0 if point.difference > 0 else 1


def _since(points: tuple[Point, ...], ahead: int | None) -> float | None:
    if ahead is None:
        return None
    since = points[-1].at
    for point in reversed(points):
        if _leader(point) != ahead:
            break
        since = point.at
    return since


def _crossings(points: tuple[Point, ...]) -> tuple[float, ...]:
    """Where the sign of the difference changes, on the straight line between two common points."""
    found: list[float] = []
    for a, b in itertools.pairwise(points):
        if a.difference * b.difference < 0:
            share = a.difference / (a.difference - b.difference)
            found.append(a.at + share * (b.at - a.at))
    return tuple(found)
