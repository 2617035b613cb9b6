"""What an evaluation looks at does not depend on how an update is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gptfit.config.keys import TrainConfig
from gptfit.logs.runlog import read_run
from gptfit.plan.evaluation import eval_windows
from gptfit.train.train import train

MakeConfig = Callable[..., TrainConfig]


def test_eight_by_one_and_two_by_four_have_the_same_val_losses(small_config: MakeConfig, tmp_path: Path) -> None:
    losses = {}
    for micro_batch, micro_steps in ((8, 1), (2, 4)):
        out = str(tmp_path / str(micro_batch))
        train(small_config(batch_size=micro_batch, gradient_accumulation_steps=micro_steps, out_dir=out, max_iters=4))
        losses[micro_batch] = [event.val_loss for event in read_run(out).evals]
    assert losses[8] == pytest.approx(losses[2], abs=1e-5)


def test_resuming_with_another_micro_batch_does_not_move_the_curve(small_config: MakeConfig, tmp_path: Path) -> None:
    train(small_config(batch_size=8, gradient_accumulation_steps=1, max_iters=4))
    before = read_run(tmp_path / "out").evals[-1]
    common = {"init_from": "resume", "max_iters": 4, "eval_only": True}
    train(small_config(batch_size=1, gradient_accumulation_steps=8, **common))
    after = read_run(tmp_path / "out").evals[-1]
    assert after.val_loss == pytest.approx(before.val_loss, abs=1e-5)
    assert after.eval_tokens == before.eval_tokens


def test_nanogpts_random_windows_stay_as_nanogpt_has_them() -> None:
    random = TrainConfig(sampling="random", batch_size=12, gradient_accumulation_steps=40, eval_iters=200)
    assert eval_windows(random) == 200 * 12


def test_an_evaluation_stays_about_as_long_as_nanogpts() -> None:
    gpt2 = TrainConfig(batch_size=12, block_size=1024, gradient_accumulation_steps=40, eval_iters=200)
    shakespeare = TrainConfig(batch_size=64, block_size=256, gradient_accumulation_steps=1, eval_iters=200)
    assert (eval_windows(gpt2), eval_windows(shakespeare)) == (200 * 16, 200 * 64)
