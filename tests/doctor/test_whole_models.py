"""Which models calibration times, for how long, and how compiled ones are held against eager ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from gptfit.config.keys import TrainConfig
from gptfit.device.device import Device, find_device
from gptfit.doctor import whole_models
from gptfit.doctor.calibrate import complete, costs_of_updates
from gptfit.doctor.whole_models import Drawn, Timed, plain_engine, saved_by_compiling, time_models
from gptfit.plan.calibration import micro_seconds, step_parts
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape
from gptfit.train.engine import Engine
from gptfit.tune.trials import Timing
from tests.plan.test_calibration import made

CPU = find_device(TrainConfig(device="cpu", dtype="float32"))


@pytest.fixture(autouse=True)
def much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has left."""
    monkeypatch.setattr(Device, "free_memory_bytes", lambda self: 2**36)


class Clock:
    """Models take a second each and what `seconds` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Device, Drawn], float]) -> None:
        self.now = 0.0

        def time_model(device: Device, model: Drawn) -> Timed:
            self.now += 1.0
            return Timed(model, seconds(device, model), 0.001)

        monkeypatch.setattr(whole_models, "_time_model", time_model)

    def __call__(self) -> float:
        return self.now


def test_models_are_small_first_and_then_as_large_as_the_device_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for flops_per_s, wanted in ((1e10, 1e9), (1e12, 1e11)):
        clock = Clock(monkeypatch, lambda device, model, rate=flops_per_s: model.flops / rate)  # type: ignore[misc]
        found = time_models(CPU, 120.0, lambda stage: None, 1, clock)
        for timed in found.values():
            flops = [each.model.flops for each in timed]
            assert max(flops[: whole_models.FIRST]) <= whole_models.FIRST_FLOPS
            seconds = sorted(each.micro_s for each in timed if not each.model.is_chunked)
            assert seconds[int(0.9 * len(seconds))] <= whole_models.LONGEST_S  # the least of a hundred may take longer
            assert max(flops) > wanted


def test_a_slow_format_has_as_much_time_and_fewer_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 without units of its own; and whatever the time, there is a model of each."""
    clock = Clock(monkeypatch, lambda device, model: 0.01)
    timer = whole_models._time_model

    def slower(device: Device, model: Drawn) -> Timed:
        clock.now += 4.0 * (device.dtype == "bfloat16")
        return timer(device, model)

    monkeypatch.setattr(whole_models, "_time_model", slower)
    counts = {dtype: len(timed) for dtype, timed in time_models(CPU, 100.0, lambda stage: None, 1, clock).items()}
    assert counts["float32"] == pytest.approx(5 * counts["bfloat16"], abs=5)
    assert set(time_models(CPU, 0.0, lambda stage: None, 1, clock)) == {"float32", "bfloat16"}


def test_every_kind_of_model_is_among_the_first_sixty(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda device, model: model.flops / 2e11)
    models = [timed.model for timed in time_models(CPU, 120.0, lambda stage: None, 1, clock)["float32"]]
    assert {model.shape.arch for model in models} == {"gpt2", "modern"}
    assert {model.shape.value_embeddings for model in models} == {"none", "tables"}
    assert {model.optimizer for model in models} == {"adamw", "muon"}
    assert sum(model.is_chunked for model in models) == len(models) // whole_models.CHUNKED_EVERY
    assert len({model.shape.n_embd for model in models}) > 8
    assert len({model.shape.block_size for model in models}) > 5


def test_there_are_enough_models_of_each_format_whatever_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda device, model: 0.01)
    found = time_models(CPU, 0.0, lambda stage: None, 7, clock)
    assert {dtype: len(timed) for dtype, timed in found.items()} == {"float32": 7, "bfloat16": 7}


def test_a_model_for_which_memory_ran_out_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda device, model: 0.01)
    timer, calls = whole_models._time_model, itertools.count()

    def sometimes(device: Device, model: Drawn) -> Timed:
        if next(calls) % 2:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory")
        return timer(device, model)

    monkeypatch.setattr(whole_models, "_time_model", sometimes)
    assert all(len(timed) == 5 for timed in time_models(CPU, 0.0, lambda stage: None, 5, clock).values())

    def broken(device: Device, model: Drawn) -> Timed:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(whole_models, "_time_model", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        time_models(CPU, 0.0, lambda stage: None, 5, clock)


def test_what_would_fill_the_memory_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card is quick enough for more than it holds."""
    clock = Clock(monkeypatch, lambda device, model: model.flops / 1e14)
    most = {}
    for free in (2**29, 2**36):
        monkeypatch.setattr(Device, "free_memory_bytes", lambda self, free=free: free)
        models = [timed.model for timed in time_models(CPU, 60.0, lambda stage: None, 1, clock)["float32"]]
        most[free] = max(model.flops for model in models)
    assert most[2**29] < most[2**36] / 3


def test_a_model_is_timed_with_an_update_after_a_micro_step_of_its_own() -> None:
    model = Drawn(ModelShape(1, 2, 128, 64, 257, arch="modern"), 1, "muon", False)
    timed = whole_models._time_model(CPU, model)
    assert 0 < timed.micro_s < 5
    assert timed.update_s is not None
    assert 0 < timed.update_s < 5


def test_a_format_whose_updates_were_all_skipped_is_not_known() -> None:
    model = Drawn(ModelShape(1, 2, 128, 64, 257), 1, "adamw", False)
    assert costs_of_updates("float32", [Timed(model, 0.1, None)] * 3) == {}
    assert costs_of_updates("float32", [Timed(model, 0.1, None), Timed(model, 0.1, 0.01)])
    assert not replace(made(), update_costs={}).knows(model.setting("float32"))


def test_compiled_models_are_held_against_the_same_ones_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """In turns: the machine is slower with every turn, which must not become what compiling saves."""

    def engine(device: Device, shape: ModelShape, optimizer: str, rows: int, compiled: bool) -> Engine:
        made = plain_engine(device, replace(shape, n_layer=1), optimizer, 1)
        made.compiled = compiled
        return made

    monkeypatch.setattr(whole_models, "plain_engine", engine)
    monkeypatch.setattr(Engine, "compile_now", lambda *_, **__: None)
    turns = itertools.count()

    def run(micro_step: partial[None], device: object, timed_s: float) -> tuple[list[float], list[float]]:
        (engine, *_), turn = micro_step.args, next(turns) // 2
        ms = (10.0 + turn) * (0.9 if engine.compiled else 1.0)
        return [ms], [ms]

    monkeypatch.setattr(whole_models, "time_micro_steps", run)
    saved = saved_by_compiling(CPU, lambda stage: None)
    assert {arch: [width for width, _ in points] for arch, points in saved.items()} == {
        "gpt2": [128.0, 256.0],
        "modern": [128.0, 256.0],
    }
    channels = whole_models.COMPILED_ROWS * 128 * 256 * whole_models.COMPILED_LAYERS
    middle_ms = 10.0 + (whole_models.TURNS + 1) / 2
    assert saved["gpt2"][1][1] == pytest.approx(0.1 * middle_ms / 1e3 / channels)


def test_an_architecture_that_the_compiler_cannot_do_saves_nothing_that_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def engine(device: Device, shape: ModelShape, optimizer: str, rows: int, compiled: bool) -> Engine:
        made = plain_engine(device, replace(shape, n_layer=1), optimizer, 1)
        made.compiled_rows = None if shape.arch == "gpt2" else 0
        return made

    monkeypatch.setattr(whole_models, "plain_engine", engine)
    problem = {None: "no", 0: None}
    monkeypatch.setattr(Engine, "compile_now", lambda self, *_, **__: problem[self.compiled_rows])
    monkeypatch.setattr(whole_models, "time_micro_steps", lambda *_: ([1.0], [1.0]))
    saved = saved_by_compiling(CPU, lambda stage: None)
    assert set(saved) == {"modern"}
    setting = Setting(ModelShape(2, 2, 128, 64, 256), 1, dtype="float32", compile=True)
    assert not replace(made(), saved_by_compiling=saved).knows(setting)


@pytest.mark.parametrize("saved_s", [2e-9, -2e-9])
def test_what_compiling_saves_goes_with_tokens_and_width_in_every_format(saved_s: float) -> None:
    found = replace(made(), saved_by_compiling={"gpt2": [(256.0, saved_s)], "modern": [(128.0, 0.0), (512.0, 2e-9)]})
    for dtype in ("float32", "bfloat16"):
        for arch, saved in (("gpt2", saved_s), ("modern", 1e-9)):
            setting = Setting(ModelShape(5, 4, 256, 128, 300, arch=arch), 8, dtype=dtype, compile=False)
            before, after = (micro_seconds(way, found) for way in (setting, replace(setting, compile=True)))
            assert before - after == pytest.approx(saved * 5 * 1024 * 256, rel=1e-6)


def test_compiling_cannot_make_a_block_cost_nothing() -> None:
    found = replace(made(), saved_by_compiling={"gpt2": [(256.0, 1.0)]})
    setting = Setting(ModelShape(5, 4, 256, 128, 300), 8, dtype="float32", compile=False)
    eager, compiled = (step_parts(replace(setting, compile=way), found)["blocks"] for way in (False, True))
    assert compiled == pytest.approx(0.2 * eager)


def test_tiny_trials_tell_the_memory_of_a_process() -> None:
    timing = Timing("cpu", False, False, 1.0, 1.0, 1.0, 9, ms_per_update=1.0, device_gib=0.5)
    found = complete(made(), {False: timing, True: timing})
    assert found.context_bytes == {"eager": 0.5 * 1024**3, "compiled": 0.5 * 1024**3}
