"""How pieces of a step are timed: in turns, by the median, and not at all where one run would take too long."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from gptfit.config.keys import TrainConfig
from gptfit.device.device import find_device
from gptfit.doctor.calibrate import TINY, TINY_BATCH, between, complete
from gptfit.doctor.rounds import Costs, CostsOfTwoWidths, Rounds, Watch, Yardstick
from gptfit.plan.calibration import micro_seconds, step_parts
from gptfit.plan.grid import grid_of
from gptfit.plan.setting import Setting
from gptfit.tune.trials import Timing
from tests.plan.test_calibration import made

CPU = find_device(TrainConfig(device="cpu", dtype="float32"))


class Clock:
    """Tells the time that actions have said they take."""

    def __init__(self) -> None:
        self.now, self.ran = 0.0, [""]

    def __call__(self) -> float:
        return self.now

    def action(self, seconds: Callable[[], float], name: str = "") -> Callable[[], None]:
        def run() -> None:
            self.ran.append(name)
            self.now += seconds()

        return run


def rounds(clock: Clock) -> Rounds:
    return Rounds(Watch(CPU, clock, clock))


@pytest.mark.parametrize(("own", "counted"), [(0.99, 2.0), (0.5, 1.0)])
def test_on_shared_cores_processor_time_counts_and_elsewhere_the_clock(own: float, counted: float) -> None:
    clock, cpu_clock = Clock(), Clock()

    def run() -> None:
        clock.now += 2.0
        cpu_clock.now += 2.0 * own

    assert Watch(CPU, clock, cpu_clock).seconds(run) == pytest.approx(counted)


def test_what_would_take_too_long_costs_what_it_costs_at_the_same_width() -> None:
    """As bfloat16 without units of its own: a wide product is slower per FLOP, a long one is not."""
    clock = Clock()
    made_for: list[tuple[float, ...]] = []

    def make(tokens: float, width: float) -> Callable[[], None]:
        made_for.append((tokens, width))
        return clock.action(lambda: 1e-4 * tokens * width * (width / 128))

    places = list(itertools.product((64.0, 256.0, 1024.0), (128.0, 512.0)))
    found = rounds(clock).costs(places, lambda n, c: n * c, make, longest_s=20.0).points()
    assert (1024.0, 512.0) not in made_for
    assert found[(1024.0, 512.0)] == pytest.approx(found[(64.0, 512.0)]) == pytest.approx(4e-4)
    assert found[(256.0, 128.0)] == pytest.approx(1e-4)


def test_a_wide_head_too_long_to_time_still_leaves_the_caches() -> None:
    """A logit beyond the caches costs five times as much at any width; a wide head of many was read off one of few."""
    clock = Clock()

    def seconds(n: float, c: float, v: float) -> float:
        return n * v * (1e-6 * c + (5e-4 if n * v > 1e6 else 1e-4))

    def make(*place: float) -> Callable[[], None]:
        return clock.action(lambda: seconds(*place))

    places = list(itertools.product((128.0, 4096.0), (128.0, 384.0), (250.0, 4000.0)))
    costs = rounds(clock).costs(places, lambda n, c, v: n * c * v, make, longest_s=7_000.0, kind=CostsOfTwoWidths)
    assert (4096.0, 384.0, 4000.0) not in costs.timed
    assert (4096.0, 128.0, 4000.0) in costs.timed
    found = costs.points()
    assert all(found[place] == pytest.approx(seconds(*place) / (place[0] * place[1] * place[2])) for place in places)


@pytest.mark.parametrize(("kind", "counted"), [(Costs, 0.8), (CostsOfTwoWidths, 0.5)])
def test_a_first_long_run_counts_but_that_of_a_loss_fetches_its_logits_memory(
    kind: type[Costs], counted: float
) -> None:
    clock = Clock()

    def make(*place: float) -> Callable[[], None]:
        times = itertools.chain([0.8], itertools.repeat(0.5))
        return clock.action(lambda: next(times))

    places = [(1.0, 1.0, 1.0), (1.0, 2.0, 1.0)]
    costs = rounds(clock).costs(places, lambda *_: 1.0, make, longest_s=9.0, kind=kind)
    assert costs.timed[1.0, 2.0, 1.0].seconds == pytest.approx(counted)


def test_a_slow_first_run_does_not_make_all_others_too_long() -> None:
    """It loads kernels: a first block took a second instead of 50 ms, and every other was read off it."""
    clock = Clock()
    runs = itertools.count()

    def make(size: float) -> Callable[[], None]:
        return clock.action(lambda: 1e-3 * size if next(runs) else 1.0)

    found = rounds(clock).costs([(1.0,), (100.0,), (200.0,)], lambda size: size, make).points()
    assert list(found.values()) == [pytest.approx(1e-3)] * 3


def test_a_slow_moment_of_the_machine_is_one_sample_of_each_piece_and_no_piece_is_slow_for_it() -> None:
    clock = Clock()
    slowness = 1.0
    each = rounds(clock)
    timed = [each.timed(clock.action(lambda: 0.1 * slowness, name)) for name in "ab"]
    slowness = 3.0
    each.go(1)
    slowness = 1.0
    each.go(1)
    assert [one.seconds for one in timed] == [pytest.approx(0.1)] * 2
    assert "".join(clock.ran).endswith("abab"), "in turns"


def test_a_slow_minute_makes_nothing_slow_that_was_timed_in_it() -> None:
    """One format was timed in a machine's fast minute, the other in a slow one: 10 % too fast, 10 % too slow."""
    clock = Clock()
    slowness = 1.0
    yardstick = Yardstick(lambda: 0.001 * slowness, clock)
    each = Rounds(Watch(CPU, clock, clock, yardstick))
    in_fast_minute = [each.timed(clock.action(lambda: 0.1 * slowness)) for _ in range(9)]
    slowness, clock.now = 1.25, clock.now + 60
    in_slow_minute = [each.timed(clock.action(lambda: 0.1 * slowness)) for _ in range(3)]
    assert {round(one.seconds, 3) for one in in_fast_minute} == {0.1}
    assert [one.seconds for one in in_slow_minute] == pytest.approx([0.1] * 3, rel=0.03)


def test_another_way_is_held_against_the_usual_one_run_at_the_same_time() -> None:
    """The machine becomes three times slower while it is timed."""
    clock = Clock()
    each = rounds(clock)
    slowness = 1.0
    usual = each.timed(clock.action(lambda: 0.1 * slowness))
    slowness = 3.0
    other = each.timed(clock.action(lambda: 0.12 * slowness), usual)
    assert other.seconds == pytest.approx(0.12)


def test_what_has_taken_long_is_not_run_again() -> None:
    clock = Clock()
    each = rounds(clock)
    each.timed(clock.action(lambda: 1.5, "slow"))
    each.timed(clock.action(lambda: 0.1, "quick"))
    clock.ran.clear()
    each.go(2)
    assert clock.ran == ["quick"] * 2


def test_between_two_sizes_values_may_be_below_zero_and_outside_they_stay() -> None:
    points = [(10.0, -1.0), (1000.0, 1.0)]
    assert [between(points, where) for where in (1.0, 100.0, 5000.0)] == pytest.approx([-1.0, 0.0, 1.0])


def timing(micro_ms: float) -> Timing:
    return Timing("cpu", False, False, micro_ms, micro_ms, micro_ms, 9, ms_per_update=1.0, device_gib=0.5)


@pytest.mark.parametrize("saved_ms", [0.15, -0.15])
def test_a_tiny_model_compiled_and_not_tells_what_compiling_changes_of_a_block_however_small(saved_ms: float) -> None:
    blocks = grid_of({(n, c): 6e-11 for n in (128.0, 1024.0) for c in (128.0, 768.0)})
    grids = {name: blocks if name.startswith("blocks") else grid for name, grid in made().grids.items()}
    pieces = replace(made(), grids=grids, micro_step_s=0.0, update_s=0.0)
    found = complete(pieces, {False: timing(20.0), True: timing(20.0 - saved_ms)})
    tiny = Setting(TINY, TINY_BATCH, dtype="float32", compile=False)
    assert micro_seconds(tiny, found) == pytest.approx(0.020)
    assert micro_seconds(replace(tiny, compile=True), found) == pytest.approx(0.020 - saved_ms / 1e3)
    noise = complete(pieces, {False: timing(20.0), True: timing(60.0)})
    block_s = step_parts(tiny, found)["blocks"]
    assert step_parts(replace(tiny, compile=True), noise)["blocks"] == pytest.approx(1.25 * block_s), "not believed"
    assert found.context_bytes["compiled"] == 0.5 * 1024**3
