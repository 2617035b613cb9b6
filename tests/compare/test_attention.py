"""What needs attention is said of runs that have it, and of no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptfit.compare.attention import needs_attention
from gptfit.compare.facts import run_facts
from gptfit.logs.events import Step
from gptfit.logs.open_run import open_run
from gptfit.logs.runlog import RunLog
from gptfit.pages.run_list import Listing
from gptfit.verbs.runs import sorted_runs
from tests.made_logs import MakeRun, append_events


def test_two_real_runs_need_none(real_runs: list[RunLog]) -> None:
    for run in real_runs:
        assert needs_attention(run_facts(run), run.steps, "running") == []


def test_a_real_run_on_a_card_that_should_be_faster_is_slower_than_planned(real_runs: list[RunLog]) -> None:
    (words,) = needs_attention(run_facts(real_runs[1], "RTX 4090"), real_runs[1].steps, "running")
    assert words.startswith("slower than planned")
    assert needs_attention(run_facts(real_runs[1], "RTX 4090"), real_runs[1].steps, "finished") == []


def test_a_loss_that_comes_back_up_is_diverging(real_runs: list[RunLog]) -> None:
    run = real_runs[0]
    after = [Step(30_000 + i, loss=6.0) for i in range(20)]
    (words,) = needs_attention(run_facts(run), [*run.steps, *after], "finished")
    assert words.startswith("diverging: loss 6.00")


def test_validation_that_rises_while_training_falls_is_overfitting(make_run: MakeRun) -> None:
    folder = make_run("a", steps=100)
    evals = [(200, 2.0, 2.2), (300, 1.5, 2.6), (400, 1.0, 3.4)]
    append_events(folder, [{"event": "eval", "step": s, "train_loss": t, "val_loss": v} for s, t, v in evals])
    run = open_run(folder)
    assert any(words.startswith("overfitting") for words in needs_attention(run_facts(run), run.steps, "finished"))


def test_a_silent_and_a_crashed_run_are_said(make_run: MakeRun) -> None:
    run = open_run(make_run("a", steps=20))
    assert needs_attention(run_facts(run), run.steps, "silent")[0].startswith("stalled")
    assert needs_attention(run_facts(run), run.steps, "crashed")[0].startswith("crashed")


@pytest.mark.parametrize(("by", "first"), [("name", "a"), ("loss", "b"), ("written", "b")])
def test_runs_are_sorted_as_asked(make_run: MakeRun, tmp_path: Path, by: str, first: str) -> None:
    make_run("a", level=0.5, steps=20)
    make_run("b", level=0.1, steps=20)
    rows = sorted_runs(Listing(tmp_path).runs(), by)
    assert rows[0]["name"] == first
    rows[0][by] = None
    assert sorted_runs(rows, by)[-1] is rows[0]
