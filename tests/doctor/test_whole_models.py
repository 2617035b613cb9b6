"""What whole models say of the sum of their pieces: a device is made whose pieces are wrong in a known way."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from gptfit.config.keys import TrainConfig
from gptfit.doctor import whole_models
from gptfit.doctor.pieces import TOKENS, WIDTHS
from gptfit.doctor.whole_models import (
    WHOLE,
    Timings,
    micro_seconds,
    scales_of,
    setting_of,
    settled,
    time_whole_models,
)
from gptfit.plan.calibration import Calibration, step_parts
from gptfit.plan.grid import Grid
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape
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


def timed(truth: Truth, found: Calibration) -> Timings:
    return {"float32": [(n, truth(setting_of(n, "float32"), found)) for n in range(len(WHOLE))]}


def test_whole_models_correct_what_their_pieces_add_up_to_at_sizes_none_of_them_has() -> None:
    found = device()
    better = settled(found, [timed(narrow_blocks_are_quicker, found)] * 2)
    before = [micro_seconds(s, found) / narrow_blocks_are_quicker(s, found) for s in UNSEEN]
    assert max(abs(error - 1) for error in before) > 0.1
    for setting in UNSEEN:
        assert micro_seconds(setting, better) == pytest.approx(narrow_blocks_are_quicker(setting, found), rel=0.03)
    same = [name for name in found.grids if "bfloat16" in name]
    assert all(better.grids[name] == found.grids[name] for name in same), "the other format has models of its own"


def test_one_model_that_was_timed_beside_a_busy_neighbour_changes_little() -> None:
    found = device()
    good, disturbed = timed(narrow_blocks_are_quicker, found), timed(narrow_blocks_are_quicker, found)
    disturbed["float32"][3] = (3, 2 * disturbed["float32"][3][1])
    better = settled(found, [good, disturbed])
    for setting in UNSEEN:
        assert micro_seconds(setting, better) == pytest.approx(narrow_blocks_are_quicker(setting, found), rel=0.05)


def test_models_with_little_loss_say_of_it_what_they_say_of_blocks() -> None:
    """In an emulated format only these are quick enough: 8 % that the blocks took more were 40 % more of the loss."""
    found = device()
    small = Setting(ModelShape(6, 4, 256, 128, 16), 4, dtype="float32", compile=False)
    scales = scales_of([(small, 1.08 * micro_seconds(small, found))] * 5, found)
    assert scales.blocks == pytest.approx(1.08, abs=0.02)
    assert scales.head == pytest.approx(scales.blocks, abs=0.01)


@pytest.mark.parametrize(("seconds", "least", "most"), [(1e-9, 0.5, 1.0), (1e9, 1.0, 2.0)])
def test_whole_models_cannot_turn_a_cost_into_nothing(seconds: float, least: float, most: float) -> None:
    found = device()
    better = settled(found, [{"float32": [(0, seconds)]}])
    for name in ("blocks gpt2 float32 eager", "head float32 whole"):
        assert least <= better.grids[name].values[0] / found.grids[name].values[0] <= most


def test_models_are_timed_from_the_least_on_until_one_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_models, "LONGEST_S", 0.0)
    found = time_whole_models(TrainConfig(device="cpu", dtype="float32"), lambda stage: None)
    assert set(found) == {"float32", "bfloat16"}
    assert all(len(times) == 1 and times[0][1] > 0 for times in found.values())
