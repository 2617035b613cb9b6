"""How pieces of a step are timed: in turns, by the median, and not at all where one run would take too long."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from gptfit.config.keys import TrainConfig
from gptfit.device import settling
from gptfit.device.device import find_device
from gptfit.doctor.calibrate import TINY, TINY_BATCH, between, complete, with_compiled
from gptfit.doctor.rounds import CostsOfTwoWidths, Prepared, Rounds, Watch, Yardstick
from gptfit.plan.calibration import Calibration, micro_seconds, step_parts
from gptfit.plan.grid import grid_of
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape
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


def test_a_large_vocabulary_of_many_tokens_costs_less_per_logit_as_a_small_one_does() -> None:
    """The head's own gradient is shared by all tokens of a micro-step."""
    clock = Clock()

    def seconds(n: float, c: float, v: float) -> float:
        return 1e-6 * c * v * (n + 256)

    def make(*place: float) -> Callable[[], None]:
        return clock.action(lambda: seconds(*place))

    places = list(itertools.product((128.0, 2048.0), (128.0, 384.0), (250.0, 4000.0)))
    costs = rounds(clock).costs(
        places, lambda n, c, v: n * c * v, make, CostsOfTwoWidths, 1e9, lambda n, c, v: n * v <= 10**6
    )
    assert (2048.0, 128.0, 4000.0) not in costs.timed
    found = costs.points()
    assert all(found[place] == pytest.approx(seconds(*place) / (place[0] * place[1] * place[2])) for place in places)


def test_runs_that_fetch_memory_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss whose logits found no hole in the heap took five times as long as in training."""
    clock, fetched = Clock(), [0]

    def make(size: float) -> Callable[[], None]:
        times = itertools.chain([0.8, 0.6, 0.5], itertools.repeat(0.4))

        def seconds() -> float:
            taken = next(times)
            fetched[0] += 10**5 * (taken > 0.4)
            return taken

        return clock.action(seconds)

    monkeypatch.setattr(settling, "fetched_pages", lambda: fetched[0])
    found = rounds(clock).costs([(1.0,)], lambda size: size, make)
    assert found.timed[1.0,].seconds == pytest.approx(0.4)


def test_what_comes_before_an_action_is_not_timed() -> None:
    """An update finds gradients and cold caches, and is not told by what makes them."""
    clock = Clock()
    each = rounds(clock)
    timed = each.timed(Prepared(clock.action(lambda: 0.1, "update"), clock.action(lambda: 5.0, "gradients")))
    each.go(1)
    assert timed.seconds == pytest.approx(0.1)
    assert clock.ran[1:] == ["gradients", "update"] * (len(clock.ran) // 2)


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


def never_compiled() -> Calibration:
    """Blocks timed where the models below are."""
    blocks = grid_of({(n, c): 6e-11 for n in (128.0, 1024.0) for c in (256.0, 768.0)})
    names = (name for name in made().grids if not name.endswith("compiled"))
    return replace(made(), grids={n: blocks if n.startswith("blocks") else made().grids[n] for n in names})


@pytest.mark.parametrize("saved_s", [2e-9, -2e-9])
def test_what_compiling_saves_goes_with_tokens_and_width_in_every_format(saved_s: float) -> None:
    found = with_compiled(never_compiled(), {"gpt2": [(262_144, saved_s)], "modern": [(262_144, saved_s + 1e-9)]})
    for arch, saved in (("gpt2", saved_s), ("modern", saved_s + 1e-9)):
        for dtype in ("float32", "bfloat16"):
            setting = Setting(ModelShape(5, 4, 256, 128, 300, arch=arch), 8, dtype=dtype, compile=False)
            before, after = (micro_seconds(way, found) for way in (setting, replace(setting, compile=True)))
            assert before - after == pytest.approx(saved * 5 * 1024 * 256, rel=1e-6)


def test_an_architecture_that_was_not_compiled_saves_what_the_other_saved() -> None:
    found = with_compiled(never_compiled(), {"gpt2": [(262_144, 2e-9)]})
    setting = Setting(ModelShape(5, 4, 256, 128, 300, arch="modern"), 8, dtype="float32", compile=False)
    saved = micro_seconds(setting, found) - micro_seconds(replace(setting, compile=True), found)
    assert saved == pytest.approx(2e-9 * 5 * 1024 * 256, rel=1e-6)


def test_compiling_cannot_make_a_block_cost_nothing() -> None:
    found = with_compiled(made(), {"gpt2": [(262_144, 1.0)]})
    eager, compiled = (found.grids[f"blocks gpt2 float32 {how}"].values for how in ("eager", "compiled"))
    assert [b / a for a, b in zip(eager, compiled, strict=True)] == pytest.approx([0.2] * len(eager))


def test_tiny_trials_tell_the_memory_of_a_process_and_what_an_update_takes_besides() -> None:
    found = complete(made(), {False: timing(20.0), True: timing(19.0)}, {})
    assert found.context_bytes == {"eager": 0.5 * 1024**3, "compiled": 0.5 * 1024**3}
    tiny = Setting(TINY, TINY_BATCH, dtype="float32", compile=False)
    parts = step_parts(tiny, found)
    assert parts["update"] + parts["host"] == pytest.approx(max(1e-3, parts["update"]))
