"""Whole runs of the modern recipe on a CPU: it learns, resumes exactly, and can be made longer from before its decay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptfit.checkpoint.format import BEFORE_DECAY, BEST, LAST, load_checkpoint
from gptfit.config.keys import TrainConfig
from gptfit.errors import ConfigError
from gptfit.schedule import decay_start, learning_rate
from gptfit.train.train import train
from tests.models import load_model

MakeConfig = Callable[..., TrainConfig]
RECIPE: dict[str, Any] = {
    "arch": "modern",
    "optimizer": "muon",
    "schedule": "wsd",
    "decay_fraction": 0.5,
    "learning_rate": 0.02,
    "min_lr": 0.0,
    "warmup_iters": 0,
}


def assert_same_weights(one: Path, other: Path) -> None:
    mine, theirs = load_checkpoint(one).model, load_checkpoint(other).model
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("seed", range(2))
def test_the_recipe_learns_with_every_seed(small_config: MakeConfig, seed: int) -> None:
    result = train(small_config(**RECIPE, max_iters=40, lr_decay_iters=40, eval_interval=40, seed=seed))
    assert result.val_loss is not None
    assert result.val_loss < 2.5  # from ln 65 = 4.17


def test_a_run_in_two_halves_ends_with_the_weights_of_one(small_config: MakeConfig, tmp_path: Path) -> None:
    whole, halves = str(tmp_path / "whole"), str(tmp_path / "halves")
    train(small_config(**RECIPE, out_dir=whole))
    train(small_config(**RECIPE, out_dir=halves, max_iters=5))
    train(small_config(**RECIPE, out_dir=halves, init_from="resume"))
    assert_same_weights(Path(whole) / LAST, Path(halves) / LAST)


def test_a_finished_run_made_longer_ends_with_the_weights_of_the_long_one(
    small_config: MakeConfig, tmp_path: Path
) -> None:
    long, extended = tmp_path / "long", tmp_path / "extended"
    horizon = {"max_iters": 16, "lr_decay_iters": 16}
    train(small_config(**RECIPE, **horizon, out_dir=str(long)))
    train(small_config(**RECIPE, out_dir=str(extended)))
    assert load_checkpoint(extended / BEFORE_DECAY).iter_num == 4
    train(small_config(**RECIPE, **horizon, out_dir=str(extended), init_from="resume"))
    assert_same_weights(long / LAST, extended / LAST)
    assert load_checkpoint(extended / "finished-00000008.pt").iter_num == 8


def test_a_run_made_longer_knows_the_best_model_that_its_last_evaluation_found(
    small_config: MakeConfig, tmp_path: Path
) -> None:
    """The checkpoint of the last step is written before that evaluation, so only best.pt has it."""
    folder = tmp_path / "out"
    result = train(small_config(**RECIPE, out_dir=str(folder)))
    best = load_checkpoint(folder / BEST)
    assert best.iter_num == 8
    assert load_checkpoint(folder / LAST).best_val_loss > best.best_val_loss == result.best_val_loss
    again = train(small_config(**RECIPE, out_dir=str(folder), init_from="resume", lr_decay_iters=16, max_iters=5))
    assert again.best_val_loss == result.best_val_loss
    assert load_checkpoint(folder / BEST).iter_num == 8


def test_a_run_stopped_in_its_decay_goes_on_decaying(small_config: MakeConfig, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    train(small_config(**RECIPE, max_iters=6, out_dir=str(folder)))
    result = train(small_config(**RECIPE, out_dir=str(folder), init_from="resume"))
    assert result.step == 8
    assert not list(folder.glob("finished-*.pt"))


def test_every_update_before_the_decay_has_the_full_rate(small_config: MakeConfig) -> None:
    for iters in (8, 9, 10, 37):
        config = small_config(**{**RECIPE, "decay_fraction": 0.3}, max_iters=iters, lr_decay_iters=iters)
        start = decay_start(config)
        assert start is not None
        assert {learning_rate(config, step) for step in range(start)} == {0.02}
        assert learning_rate(config, start + 1) < 0.02


def test_other_schedules_have_no_decay_start(small_config: MakeConfig) -> None:
    assert decay_start(small_config(schedule="cosine")) is None


def test_ingredients_come_back_with_the_checkpoint(small_config: MakeConfig, tmp_path: Path) -> None:
    train(small_config(**RECIPE, tied_head=True, activation="gelu", logit_softcap=9.0, max_iters=2))
    model, _ = load_model(tmp_path / "out")
    shape = model.shape
    assert (shape.arch, shape.tied_head, shape.activation, shape.logit_softcap) == ("modern", True, "gelu", 9.0)


def test_an_ingredient_cannot_change_on_resume(small_config: MakeConfig) -> None:
    train(small_config(**RECIPE, max_iters=2))
    with pytest.raises(ConfigError, match="activation is 'gelu' but the checkpoint"):
        train(small_config(**RECIPE, activation="gelu", init_from="resume"))
