"""bench/recipe.py's comparison: which of nanoGPT's rates is taken, its loss on our windows, what a failing run does."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gptfit.config.keys import TrainConfig
from gptfit.train.train import train

FINAL = {4e-3: 4.4, 2e-3: 4.0, 1e-3: 4.2, 5e-4: 4.3}


@pytest.fixture
def bench(repo: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repo / "bench"))
    module = importlib.import_module("recipe")
    monkeypatch.setattr(module, "step_times", lambda *_: ({"nanoGPT": 2.0, "modern": 1.0, "gpt2": 1.0}, {}))
    return module


class FakeRunner:
    """Curves without training."""

    def __init__(self, bench: ModuleType, failing_seed: int = 0) -> None:
        self.bench, self.failing_seed = bench, failing_seed
        self.ran: list[tuple[str, float, int]] = []

    def sharing_cores(self, jobs: int) -> FakeRunner:
        return self

    def nanogpt_losses(self, setup: Any, rate: float, seed: int, dtype: str, compile: bool) -> Any:
        self.ran.append(("nanoGPT", rate, seed))
        return self.curve(setup.tokens, FINAL[rate] + seed / 100)

    def gptfit_curve(self, setup: Any, seed: int, **keys: Any) -> Any:
        if seed == self.failing_seed:
            raise SystemExit("was stopped")
        self.ran.append(("modern", 0.0, seed))
        return self.curve(setup.tokens // 4, 3.5)

    def curve(self, tokens: int, loss: float) -> Any:
        runs = importlib.import_module("_recipe_runs")
        return runs.Curve((runs.Point(0, 9.0), runs.Point(tokens, loss)), 1.0, "float32")


def compare(bench: ModuleType, runner: FakeRunner, jobs: int, seeds: int = 3, kept: Path | None = None) -> Any:
    setup = bench.Setup("tiny", "bytes", 1, 1, 8, 8, 2, steps=8, rates=tuple(FINAL), eval_iters=1)
    return bench.compare(runner, setup, seeds, False, bench.Kept(kept), jobs)


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_best_of_all_rates_is_taken_for_every_seed(bench: ModuleType, jobs: int) -> None:
    runner = FakeRunner(bench)
    found = compare(bench, runner, jobs)
    assert found.rate == 2e-3
    assert [curve.final for curve in found.theirs] == pytest.approx([4.01, 4.02, 4.03])
    assert {run for run in runner.ran if run[0] == "nanoGPT"} == {
        *(("nanoGPT", rate, 1) for rate in FINAL),
        ("nanoGPT", 2e-3, 2),
        ("nanoGPT", 2e-3, 3),
    }


def test_one_seed_of_ours_is_compared_with_all_kept_ones_of_nanogpt(bench: ModuleType, tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    compare(bench, FakeRunner(bench), 1, kept=kept)
    runner = FakeRunner(bench)
    again = compare(bench, runner, 1, seeds=1, kept=kept)
    assert runner.ran == []
    assert (len(again.theirs), len(again.ours)) == (3, 1)


def test_losses_without_times_keep_the_times_of_the_run_before(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("_recipe_compare")
    monkeypatch.setattr(module, "FOUND", tmp_path / "found.json")
    timed = replace(compare(bench, FakeRunner(bench), 1), ms_per_step={"modern": 2.0}, other_seconds={"modern": 3.0})
    module.save_found(timed)
    module.save_found(replace(timed, rate=1e-3, ms_per_step={}, other_seconds={}))
    (found,) = module.read_found()
    assert (found.rate, found.ms_per_step, found.other_seconds) == (1e-3, {"modern": 2.0}, {"modern": 3.0})


def test_a_run_that_was_stopped_ends_the_bench(bench: ModuleType) -> None:
    with pytest.raises(SystemExit, match="was stopped"):
        compare(bench, FakeRunner(bench, failing_seed=2), jobs=2)


TRAIN_PY = """
import os, shutil, sys
assert "--always_save_checkpoint=True" in sys.argv and "--dtype=bfloat16" in sys.argv
torch_manual_seed = lambda seed: seed
assert torch_manual_seed(1337 + 0) == 7
device_type = 'cpu'
ctx = nullcontext() if device_type == 'cpu' else 'the number format of a card'
assert ctx == 'the number format of a card'
os.mkdir("out")
shutil.copy(CHECKPOINT, "out")
print("step 0: train loss 9.0, val loss 9.0\\niter 1: loss 9.0, time 1.0ms\\nstep 16: train loss 8.0, val loss 8.0")
"""


@pytest.mark.slow
def test_nanogpts_last_checkpoint_is_measured_as_our_runs_are(
    bench: ModuleType, small_config: Callable[..., TrainConfig], token_folder: Path, tmp_path: Path
) -> None:
    """A run of ours stands for nanoGPT's: its loss is known, and what is printed is another one."""
    config = small_config(gradient_accumulation_steps=1, dtype="auto")
    known = train(config).val_loss
    nanogpt = tmp_path / "nanogpt"
    nanogpt.mkdir()
    (nanogpt / "configurator.py").touch()
    (nanogpt / "train.py").write_text(TRAIN_PY.replace("CHECKPOINT", repr(str(Path(config.out_dir) / "ckpt.pt"))))
    runner = importlib.import_module("_recipe_runs").Runner(tmp_path, token_folder, nanogpt)
    setup = bench.Setup("tiny", "bytes", 2, 2, 32, 16, 4, steps=16, rates=(1e-2,), eval_iters=2)
    curve = runner.nanogpt_losses(setup, 1e-2, seed=7, dtype="bfloat16")
    assert curve.how == "bfloat16"
    assert curve.points[0].val_loss == 9
    assert curve.final == pytest.approx(known, abs=1e-5)
