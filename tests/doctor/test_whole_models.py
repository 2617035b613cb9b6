"""What whole models say of the sum of their pieces: a device is made whose pieces are wrong in a known way."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

import pytest

from gptfit.config.keys import TrainConfig
from gptfit.device.device import Device
from gptfit.doctor import whole_models
from gptfit.doctor.calibrate import OTHER_ARCH
from gptfit.doctor.pieces import TOKENS, WIDTHS, few
from gptfit.doctor.whole_models import (
    COMPILED,
    WHOLE,
    Pass,
    Scales,
    plain_engine,
    scales_of,
    settled,
    time_whole_models,
    whole_setting,
)
from gptfit.plan.calibration import Calibration, micro_seconds, step_parts
from gptfit.plan.grid import Grid
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape
from gptfit.train.engine import Engine
from tests.plan.test_calibration import made

# In sizes that no whole model has.
UNSEEN = [
    Setting(ModelShape(7, 2, 128, 256, 1000), 3, dtype="float32", compile=False),
    Setting(ModelShape(3, 9, 576, 128, 8000), 2, dtype="float32", compile=False),
    Setting(ModelShape(4, 4, 256, 192, 16000, arch="modern"), 4, dtype="float32", compile=False),
]
Truth = Callable[[Setting, Calibration], float]


def device() -> Calibration:
    """One whose blocks cost the same at every size, read where calibration times them."""
    blocks = Grid((TOKENS, WIDTHS), (6e-11,) * (len(TOKENS) * len(WIDTHS)))
    grids = {name: blocks if name.startswith("blocks") else grid for name, grid in made().grids.items()}
    return replace(made(), grids=grids)


def narrow_blocks_are_quicker(setting: Setting, found: Calibration) -> float:
    """In a model than as pieces, by a sixth at 128 channels; the loss takes a fifth less at any width."""
    parts = step_parts(setting, found)
    more = 0.08 * math.log2(setting.shape.n_embd / 512)
    return micro_seconds(setting, found) + more * parts["blocks"] - 0.2 * parts["head and loss"]


def timed(truth: Truth, found: Calibration) -> Pass:
    return Pass({"float32": [(n, truth(whole_setting(n, "float32"), found)) for n in range(len(WHOLE))]})


def test_whole_models_correct_what_their_pieces_add_up_to_at_sizes_none_of_them_has() -> None:
    found = device()
    better = settled(found, [timed(narrow_blocks_are_quicker, found)] * 2)
    before = [micro_seconds(s, found) / narrow_blocks_are_quicker(s, found) for s in UNSEEN]
    assert max(abs(error - 1) for error in before) > 0.1
    for setting in UNSEEN:
        assert micro_seconds(setting, better) == pytest.approx(narrow_blocks_are_quicker(setting, found), rel=0.03)
    same = [name for name in found.grids if "bfloat16" in name]
    assert all(better.grids[name] == found.grids[name] for name in same), "the other format has models of its own"


def test_one_model_that_was_timed_beside_a_busy_neighbour_changes_little(monkeypatch: pytest.MonkeyPatch) -> None:
    found = device()
    good, disturbed = timed(narrow_blocks_are_quicker, found), timed(narrow_blocks_are_quicker, found)
    disturbed.times["float32"][4] = (4, 2 * disturbed.times["float32"][4][1])

    def moved(passes: list[Pass]) -> float:
        fits = settled(found, [good, good]), settled(found, passes)
        return max(abs(micro_seconds(s, fits[1]) / micro_seconds(s, fits[0]) - 1) for s in UNSEEN)

    robust = moved([good, disturbed])
    monkeypatch.setattr(whole_models, "STRANGE", 1e9)
    assert robust < 0.02 < moved([good, disturbed]), "all counting alike"


def test_models_with_little_loss_say_of_it_what_they_say_of_blocks() -> None:
    """In an emulated format only these are quick enough: 8 % that the blocks took more were 40 % more of the loss."""
    found = device()
    small = Setting(ModelShape(6, 4, 256, 128, 16), 4, dtype="float32", compile=False)
    scales = scales_of([(small, 1.08 * micro_seconds(small, found))] * 5, found)
    assert scales.blocks == pytest.approx(1.08, abs=0.02)
    assert scales.head == pytest.approx(scales.blocks, abs=0.01)


@pytest.mark.parametrize(("times", "bound"), [(1e-3, 0.5), (50.0, 2.0)])
def test_whole_models_cannot_turn_a_cost_into_nothing_or_more_than_twice_of_it(times: float, bound: float) -> None:
    found = device()
    whole = [(n, times * micro_seconds(whole_setting(n, "float32"), found)) for n in range(len(WHOLE))]
    better = settled(found, [Pass({"float32": whole})] * 9)
    for name in ("blocks gpt2 float32 eager", "head float32 whole"):
        assert better.grids[name].values[0] / found.grids[name].values[0] == pytest.approx(bound, rel=0.2)


def test_beyond_the_models_tokens_blocks_are_corrected_as_at_their_edge() -> None:
    scales = Scales(per_doubled_tokens=0.1, tokens=(64.0, 2048.0))
    assert scales.of_blocks(16384, 256) == scales.of_blocks(2048, 256) == pytest.approx(1.2)


def flops(number: int) -> float:
    shape, rows = WHOLE[number]
    return rows * shape.block_size * shape.flops_per_token


def test_models_tell_what_every_micro_step_takes_whatever_its_size() -> None:
    """A tenth of a small one and little of a large one."""
    found = replace(device(), micro_step_s=0.0)

    def truth(setting: Setting, found: Calibration) -> float:
        return micro_seconds(setting, found) + 5e-3

    better = settled(found, [timed(truth, found)] * 2)
    assert 2e-4 < better.micro_step_s < 6e-3
    for setting in UNSEEN:
        assert micro_seconds(setting, better) == pytest.approx(truth(setting, found), rel=0.03)
    assert settled(found, [timed(micro_seconds, found)]).micro_step_s == pytest.approx(0, abs=1e-5)


def test_models_are_timed_from_the_least_on_until_one_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_models, "LONGEST_S", 0.0)
    config = TrainConfig(device="cpu", dtype="float32")
    told = asdict(time_whole_models(config, True, False, lambda stage: None))
    found = Pass(**json.loads(json.dumps(told)))  # as it comes from a process
    least = min(range(len(WHOLE)), key=flops)
    assert {dtype: [number for number, _ in times] for dtype, times in found.times.items()} == {
        dtype: [least] for dtype in ("float32", "bfloat16")
    }
    assert all(seconds > 0 for times in found.times.values() for _, seconds in times)
    assert found.saved == {}
    assert settled(device(), [found, found]).grids.keys() == device().grids.keys()


def test_compiled_models_are_held_against_the_same_ones_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """In turns: the machine is slower with every turn, which must not become what compiling saves."""
    monkeypatch.setattr(whole_models, "WHOLE", ())
    monkeypatch.setattr(whole_models, "find_compile_problem", lambda device: None)

    def engine(device: Device, shape: ModelShape, optimizer: str, rows: int, compiled: bool) -> Engine:
        made = plain_engine(device, replace(shape, n_layer=1), optimizer, rows)
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
    saved = time_whole_models(TrainConfig(device="cpu", dtype="float32"), True, True, lambda stage: None).saved
    assert {arch: [at for at, _ in each] for arch, each in saved.items()} == {"gpt2": [2**18], "modern": [2**18]}
    assert len(COMPILED) == 2
    turns_of_each = whole_models.TURNS + 1
    middle_ms = 10.0 + turns_of_each / 2
    assert saved["gpt2"][0][1] == pytest.approx(0.1 * middle_ms / 1e3 / (2**18 * COMPILED[0][0].n_layer))


def test_the_places_where_other_ways_are_timed_are_timed() -> None:
    """What another architecture adds was read off one tiny block where the middle width was not."""
    assert set(OTHER_ARCH) <= set(itertools.product(TOKENS, WIDTHS))
    assert len(set(OTHER_ARCH) & set(itertools.product(few(TOKENS), few(WIDTHS)))) >= 3
