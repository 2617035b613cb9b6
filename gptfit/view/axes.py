"""Validation loss of several runs at equal steps, tokens, training time and FLOPs; who is ahead, and since when."""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass
from typing import Literal

from gptfit.view.facts import RunFacts

Axis = Literal["step", "tokens", "seconds", "flops"]
AXES: tuple[Axis, ...] = ("step", "tokens", "seconds", "flops")
Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class Point:
    """Both losses at one place of an axis."""

    at: float
    losses: tuple[float, float]

    @property
    def difference(self) -> float:
        """Second minus first: negative when the second run is lower, so better."""
        return self.losses[1] - self.losses[0]


@dataclass(frozen=True)
class Duel:
    """Two runs along one axis. `ahead` is 0 or 1, or None inside the noise."""

    axis: Axis
    noise: float
    points: tuple[Point, ...]
    ahead: int | None
    ahead_from: float | None  # from here to the end the leader leads by more than the noise
    crossings: tuple[float, ...]  # where the curves meet

    @property
    def last(self) -> Point:
        return self.points[-1]


def curve(run: RunFacts, axis: Axis, bpb: bool = False) -> Curve:
    """(x, validation loss) in x order, finite points only. The untrained point at x = 0 is no basis for comparison."""
    points: Curve = []
    for point in run.evals:
        x, y = getattr(point, axis), point.val_bpb if bpb else point.val_loss
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


def duel(left: Curve, right: Curve, axis: Axis, noise: float) -> Duel | None:
    """None when the two never overlap on this axis."""
    points = _common_points(left, right)
    if not points:
        return None
    ahead = _leader(points[-1], noise)
    return Duel(axis, noise, points, ahead, _since(points, ahead, noise), _crossings(points))


def _common_points(left: Curve, right: Curve) -> tuple[Point, ...]:
    """At every eval of either run where the other has a value too."""
    places = sorted({x for x, _ in left} | {x for x, _ in right})
    points: list[Point] = []
    for x in places:
        a, b = value_at(left, x), value_at(right, x)
        if a is not None and b is not None and not (points and x <= points[-1].at * (1 + 1e-9)):
            points.append(Point(x, (a, b)))
    return tuple(points)


def _leader(point: Point, noise: float) -> int | None:
    if abs(point.difference) <= noise:
        return None
    return 0 if point.difference > 0 else 1


def _since(points: tuple[Point, ...], ahead: int | None, noise: float) -> float | None:
    if ahead is None:
        return None
    since = points[-1].at
    for point in reversed(points):
        if _leader(point, noise) != ahead:
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
