"""Rounds: what is to be timed, timed in turns, so that a slow moment of the machine is one sample of each and not all of one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from gptfit.device.device import Device
from gptfit.device.settling import Action, run_settled
from gptfit.plan.grid import Grid, grid_of
from gptfit.tune.rank import FAIR_CPU_SHARE

VISIT_S = 0.03  # of one action in one round, at least one run
MOST_RUNS = 20
# What has taken so long is timed well enough: a number format without units of its own may be a hundred times slower.
ENOUGH_S = 0.7
LONG_S = 0.3  # a first run of so long is worth a visit
SETTLED_S = 2.0  # an action has its memory after so long, or never
LONGEST_S = 0.5  # what would take longer in one run is not run
YARDSTICK_RUNS, YARDSTICK_HOLDS_S = 3, 0.25
TOKENS_MATTER = 0.1  # a cost per unit of work depends on the number of tokens far less than on a width

Place = tuple[float, ...]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Prepared:
    """An action that finds things as `before` leaves them, which is not timed."""

    action: Action
    before: Action


class Yardstick:
    """How fast the machine is at the moment, told by an action that is always the same.

    A core that is shared with strangers runs for minutes a tenth slower, and what was timed then would be slow forever.
    """

    def __init__(self, seconds: Callable[[], float], clock: Clock = time.perf_counter) -> None:
        self._seconds, self._clock = seconds, clock  # timed as everything else is
        self._readings: list[float] = []
        self._until = -math.inf

    def now(self) -> float:
        """Seconds it takes, timed a moment ago at most."""
        if self._clock() > self._until:
            self._readings.append(min(self._seconds() for _ in range(YARDSTICK_RUNS)))
            self._until = self._clock() + YARDSTICK_HOLDS_S
        return self._readings[-1]

    @property
    def usual(self) -> float:
        return median(self._readings)


@dataclass(frozen=True)
class Watch:
    """What an action takes; on a CPU shared with other programs its processor time, as where `tune` ranks trials."""

    device: Device
    clock: Clock = time.perf_counter
    cpu_clock: Clock = time.thread_time
    yardstick: Yardstick | None = None  # none: every moment is like the others

    def seconds(self, action: Action) -> float:
        began, began_cpu = self.clock(), self.cpu_clock()
        action()
        self.device.synchronize()
        elapsed, own = self.clock() - began, self.cpu_clock() - began_cpu
        return own if self.device.kind == "cpu" and own < FAIR_CPU_SHARE * elapsed else elapsed

    def at_usual_pace(self, time_it: Callable[[], float]) -> float:
        """What was timed, in units of the yardstick before and after it; `usual` makes seconds of it again."""
        if self.yardstick is None:
            return time_it()
        before = self.yardstick.now()
        seconds = time_it()
        return 2 * seconds / (before + self.yardstick.now())

    @property
    def usual(self) -> float:
        return 1.0 if self.yardstick is None else self.yardstick.usual


class Timed:
    """An action and what its visits took, the median of each, at the pace the machine usually had."""

    def __init__(self, action: Action | Prepared, watch: Watch) -> None:
        self._prepared = action if isinstance(action, Prepared) else Prepared(action, lambda: None)
        self._watch = watch
        self._spent_s = 0.0
        first = watch.at_usual_pace(self._settled)
        self.visits: list[float] = []
        if first * watch.usual > LONG_S:
            self._keep(first)

    @property
    def seconds(self) -> float:
        return median(self.visits) * self._watch.usual

    @property
    def best(self) -> float:
        """The least: whether others would take too long must not be decided by a moment in which the machine was slow."""
        return min(self.visits) * self._watch.usual

    @property
    def is_enough(self) -> bool:
        return self._spent_s > ENOUGH_S

    def begin_again(self) -> None:
        self.visits.clear()
        for _ in range(2):
            self.visit()

    def visit(self) -> None:
        self._keep(self._watch.at_usual_pace(self._several))

    def _keep(self, taken: float) -> None:
        self.visits.append(taken)
        self._spent_s += taken * self._watch.usual

    def _several(self) -> float:
        times = [self._settled()]
        while sum(times) < VISIT_S and len(times) < MOST_RUNS:
            times.append(self._once())
        return median(times)

    def _settled(self) -> float:
        """Other actions have used the memory meanwhile."""
        return run_settled(self._once, SETTLED_S)

    def _once(self) -> float:
        self._prepared.before()
        return self._watch.seconds(self._prepared.action)


class Beside(Timed):
    """Another way to do what `usual` does, run between two runs of that: what the machine does meanwhile, it does to both."""

    def __init__(self, action: Action | Prepared, watch: Watch, usual: Timed) -> None:
        super().__init__(action, watch)
        self._usual, self.visits = usual, []

    @property
    def seconds(self) -> float:
        return median(self.visits) * self._usual.seconds

    def visit(self) -> None:
        before, own, after = self._usual._settled(), self._settled(), self._usual._settled()
        self._spent_s += before + own + after
        self.visits.append(2 * own / (before + after))


class Costs:
    """Seconds per unit of work by place, as far as the rounds have come."""

    def __init__(
        self, read_at: Mapping[Place, Place], timed: Mapping[Place, Timed], work: Callable[..., float]
    ) -> None:
        self._read_at, self.timed, self._work = read_at, timed, work

    def points(self) -> dict[Place, float]:
        each = {place: timed.seconds / self._work(*place) for place, timed in self.timed.items()}
        return {place: each[near] for place, near in self._read_at.items()}

    def grid(self) -> Grid:
        return grid_of(self.points())


class CostsOfTwoWidths(Costs):
    """Of tokens, one of two widths and a further size: what the wider one adds is told where both were timed.

    Too long to time is the wider first, where the caches are left too; next to it, where they are not, it costs less.
    """

    def points(self) -> dict[Place, float]:
        each = {place: timed.seconds / self._work(*place) for place, timed in self.timed.items()}
        narrow, wide = sorted({place[1] for place in self._read_at})
        added = {
            (n, v): max(0.0, wide * cost - narrow * each[n, narrow, v])
            for (n, width, v), cost in each.items()
            if width == wide and (n, narrow, v) in each
        }
        found = {place: cost * self._of_tokens(each, place) for place, cost in super().points().items()}
        for n, width, v in found:
            if width == wide and (n, width, v) not in each and (n, narrow, v) in each and added:
                near = min(added, key=lambda other: _distance(other, (n, v)))
                found[n, wide, v] = (narrow * found[n, narrow, v] + added[near]) / wide
        return found

    def _of_tokens(self, each: Mapping[Place, float], place: Place) -> float:
        """What a place costs that was read at another number of tokens, over what it costs there: as at the size most like
        its own where both were timed."""
        (tokens, width, size), (read_tokens, read_width, read_size) = place, self._read_at[place]
        if tokens == read_tokens or (width, size) != (read_width, read_size):
            return 1.0
        both = [v for n, w, v in each if (n, w) == (tokens, width) and (read_tokens, width, v) in each]
        if not both:
            return 1.0
        like = max(both)
        return each[tokens, width, like] / each[read_tokens, width, like]


Kind = TypeVar("Kind", bound=Costs)


class Rounds:
    """Every action once when it comes, then all of them in turns."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._all: list[Timed] = []

    def timed(self, action: Action | Prepared, usual: Timed | None = None) -> Timed:
        found = Timed(action, self._watch) if usual is None else Beside(action, self._watch, usual)
        if not found.visits:
            found.visit()
        self._all.append(found)
        return found

    def go(self, rounds: int) -> None:
        for _ in range(rounds):
            for one in self._all:
                if not one.is_enough:
                    one.visit()

    def costs(
        self,
        places: Iterable[Place],
        work: Callable[..., float],
        make: Callable[..., Action | Prepared],
        kind: type[Kind] = Costs,  # type: ignore[assignment]
        longest_s: float = LONGEST_S,
        is_possible: Callable[..., bool] = lambda *place: True,
    ) -> Kind:
        """The little work first; what would take too long or is not possible costs per unit what is next to it."""
        found: dict[Place, Place] = {}
        timed: dict[Place, Timed] = {}
        for place in sorted(places, key=lambda place: work(*place)):
            near = min(timed, key=lambda other: _distance(other, place), default=None)
            if near and not (is_possible(*place) and timed[near].best / work(*near) * work(*place) <= longest_s):
                found[place] = near
                continue
            timed[place] = self.timed(make(*place))
            if near is None:  # the first of a kind also loads and prepares its kernels, and all others are judged by it
                timed[place].begin_again()
            found[place] = place
        return kind(found, timed, work)


def _distance(one: Place, other: Place) -> float:
    """The first size of a place is its tokens."""
    tokens, *sizes = (abs(math.log(a / b)) for a, b in zip(one, other, strict=True))
    return TOKENS_MATTER * tokens + sum(sizes)
