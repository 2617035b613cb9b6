"""bench/recipe.py's runs: what is read from nanoGPT's lines, and what is kept of finished runs."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TRAIN_PY = """
# torch.manual_seed(1337 + seed_offset)
for step, loss in ((0, 9.0), (2, 5.0), (4, 4.0)):
    print(f"step {step}: train loss {loss:.4f}, val loss {loss:.4f}")
    print(f"iter {step}: loss {loss:.4f}, time 900.00ms, mfu 1.00%")
    print(f"iter {step + 1}: loss {loss:.4f}, time 100.00ms, mfu 1.00%")
"""


@pytest.fixture
def runs(repo: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repo / "bench"))
    return importlib.import_module("_recipe_runs")


@pytest.fixture
def setup(runs: ModuleType) -> Any:
    return runs.Setup("tiny", "bytes", 1, 1, 8, 8, 2, steps=4, rates=(1e-3,), eval_iters=1)


@pytest.fixture
def nanogpt(tmp_path: Path) -> Path:
    """Something that prints what nanoGPT's train.py prints."""
    folder = tmp_path / "nanogpt"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN_PY)
    (folder / "configurator.py").touch()
    return folder


def test_evaluations_are_kept_out_of_the_time_of_a_step(
    runs: ModuleType, setup: Any, nanogpt: Path, tmp_path: Path
) -> None:
    curve = runs.Runner(tmp_path, tmp_path, nanogpt).nanogpt_curve(setup, 1e-3, 1, eval_interval=2)
    assert curve.ms_per_step == 100
    assert [point.val_loss for point in curve.points] == [9, 5, 4]
    assert [point.tokens for point in curve.points] == [2 * i * setup.tokens_per_step for i in range(3)]


def test_a_program_that_fails_ends_the_bench_with_its_words(
    runs: ModuleType, setup: Any, nanogpt: Path, tmp_path: Path
) -> None:
    (nanogpt / "train.py").write_text(f"{TRAIN_PY}raise ValueError('no data')")
    with pytest.raises(SystemExit, match="no data"):
        runs.Runner(tmp_path, tmp_path, nanogpt).nanogpt_curve(setup, 1e-3, 1)


def test_a_train_py_whose_seed_cannot_be_replaced_is_not_run(
    runs: ModuleType, setup: Any, nanogpt: Path, tmp_path: Path
) -> None:
    """Three seeds would be one."""
    (nanogpt / "train.py").write_text("print('step 0: train loss 9.0, val loss 9.0')")
    with pytest.raises(SystemExit, match="manual_seed"):
        runs.Runner(tmp_path, tmp_path, nanogpt).nanogpt_curve(setup, 1e-3, 1)


def test_two_ways_to_train_take_turns_and_leave_nothing_behind(
    runs: ModuleType, setup: Any, token_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[int] = []
    waited = runs.Runner._ms_of

    def watched(self: Any, run: Any) -> float:
        turns.append(run.pid)
        return float(waited(self, run))

    monkeypatch.setattr(runs.Runner, "_ms_of", watched)
    (tmp_path / "bench").mkdir()
    keys = {"max_iters": 3, "eval_interval": 3, "compile": False}
    both = {"modern": keys, "gpt2": keys | {"recipe": "gpt2"}}
    found = runs.Runner(tmp_path / "bench", token_folder).ms_in_turns(setup, both, 3)
    first, second = turns[:2]
    assert turns == [first, second] * 3
    assert first != second
    assert all(ms > 0 for ms in found.values())
    assert [place.name[:8] for place in (tmp_path / "bench").iterdir()] == ["inductor"]


def test_a_run_that_ends_before_its_turn_ends_the_bench(
    runs: ModuleType, setup: Any, token_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="was stopped"):
        runs.Runner(tmp_path, token_folder).ms_in_turns(setup, {"modern": {"max_iters": 1, "compile": False}}, 2)


def test_a_batch_of_our_own_sees_the_same_tokens_and_is_measured_on_the_same_windows(runs: ModuleType) -> None:
    both = runs.Setup("tiny", "bytes", 1, 1, 8, 8, 16, steps=80, rates=(), eval_iters=5, share=10, our_batch=4)
    assert both.ours.tokens == both.tokens
    assert both.our_steps * both.ours.tokens_per_step == both.tokens / 10
    assert both.ours.eval_iters * both.ours.batch_size == both.eval_iters * both.batch_size
    assert both.ours.ours == both.ours


def test_a_setup_with_the_recipes_batch_has_more_updates_of_fewer_tokens(runs: ModuleType) -> None:
    both = runs.Setup("tiny", "bytes", 1, 1, 128, 64, 16, steps=80, rates=(), eval_iters=5, share=10).with_recipes_batch
    assert both.ours.tokens_per_step == 512 < both.tokens_per_step
    assert both.our_steps == 16


def test_a_loss_with_three_quarters_of_the_tokens_is_said_to_be_reached_or_by_how_much_not(
    runs: ModuleType, tmp_path: Path
) -> None:
    groups = importlib.import_module("_recipe_groups")
    kept = runs.Kept(tmp_path / "kept.jsonl")
    assert groups.shorter_line(kept, 192, 4.0) == ""
    curve = runs.Curve((runs.Point(0, 8.0), runs.Point(10, 4.02)), 12.0, "float32")
    kept.get(groups.shorter_name(192, 1), lambda: curve)
    assert "missed by 0.020 nats" in groups.shorter_line(kept, 192, 4.0)
    assert groups.shorter_line(kept, 192, 4.05).endswith("1 seed: reached")


def test_a_kept_run_is_not_run_again_and_a_torn_line_is(runs: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    curve = runs.Curve((runs.Point(0, 5.0), runs.Point(10, 4.0)), 12.0, "float32", 3.0)
    assert runs.Kept(path).get("a", lambda: curve) == curve
    with path.open("a") as file:
        file.write(json.dumps({"run": "b", "curve": {}})[:-4])
    kept = runs.Kept(path)
    assert kept.get("a", lambda: pytest.fail("it was kept")) == curve
    assert kept.get("b", lambda: curve) == curve


def test_every_kept_curve_can_be_read(runs: ModuleType, repo: Path) -> None:
    lines = (repo / "bench" / "recipe_runs.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    assert len({entry["run"] for entry in entries}) == len(entries)
    assert all(runs.curve_of(entry["curve"]).final > 1 for entry in entries)


def test_seconds_with_an_own_vocabulary_are_compared_at_equal_bits_per_byte(
    runs: ModuleType, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 nats per token of 4 bytes are 3 per token of 3: reached half-way through the second half of the steps."""
    own = importlib.import_module("_recipe_own")
    facts = own.OwnFacts(
        own.SETUP, bytes_per_token=3.0, gpt2_bytes_per_token=4.0, nanogpt_loss=4.0, nanogpt_ms=6000.0, our_ms=2000.0
    )
    assert facts.target_loss == pytest.approx(3.0)
    tokens = own.SETUP.ours.tokens_per_step
    points = tuple(runs.Point(step * tokens, loss) for step, loss in ((0, 9.0), (50, 4.0), (100, 2.0)))
    curve = runs.Curve(points, ms_per_step=9000.0, how="float32")  # on a busy machine
    assert facts.seconds_ratio(curve) == pytest.approx(736 * 6.0 / (75 * 2.0))
    assert facts.seconds_ratio(runs.Curve(points[:2], 2000.0, "float32")) is None
