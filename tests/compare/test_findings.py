"""What a comparison says: one answer per question, no figure that was not measured, the weightiest first."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from gptfit.cli import main
from gptfit.compare.comparison import Comparison, compare_runs
from gptfit.compare.facts import run_facts, run_letter
from gptfit.compare.noise import PUBLISHED_CHANCE, noise_between
from gptfit.compare.projection import project_loss, project_runs
from gptfit.compare.sentences import explain
from gptfit.compare.table import equal_table, fact_rows
from gptfit.logs.open_run import open_run
from gptfit.logs.runlog import RunLog
from gptfit.pages.html import body
from tests.made_logs import LARGE_LOG, MakeRun

BYTES = {"folder": "data/x", "tokenizer": "bytes", "bytes_per_token": 1.0}
PIECES = {"folder": "data/x", "tokenizer": "gpt2", "bytes_per_token": 4.5}


def row(comparison: Comparison, label: str) -> list[str]:
    return next(cells[1:] for cells in fact_rows(comparison) if cells[0].startswith(label))


def test_at_equal_time_the_table_alone_answers(make_run: MakeRun) -> None:
    """A ends between two evals of B, which has passed that minute: there is nothing to project."""
    comparison = compare_runs([open_run(make_run("a")), open_run(make_run("b", steps=200, ms=73.0))])
    (at_time,) = [cells for cells in equal_table(comparison).rows if cells[0] == "time"]
    assert at_time[1] == "5.0 s"
    assert not [found for found in comparison.projections if found.target == "A's end"]
    assert not [sentence for sentence in explain(comparison).sentences if "A's end" in sentence]


def test_a_measured_value_has_no_range_and_is_the_tables(make_run: MakeRun) -> None:
    comparison = compare_runs([open_run(make_run("a"))])
    (said,) = [sentence for sentence in explain(comparison).sentences if "its own end" in sentence]
    assert said == "It reached 2.400 at its own end (step 100, 5.0 s of training)."
    assert row(comparison, "last validation") == ["2.4000 at 100"]


def test_step_times_that_vary_are_no_measured_speed(make_run: MakeRun) -> None:
    steady, busy = open_run(make_run("a")), open_run(make_run("b", ms=200.0, jitter=0.6))
    comparison = compare_runs([steady, busy])
    text = " ".join(explain(comparison).sentences)
    assert "A looks 4.0x faster per token than B" in text
    assert "B's step times vary by 30 %" in text
    assert "(measured" not in text
    assert "4.00x" not in text
    assert "+-30 %" in row(comparison, "ms per step")[1]
    assert "A is 4.00x faster" in explain(compare_runs([steady, open_run(make_run("c", ms=200.0))])).sentences[0]


def test_a_handful_of_step_times_is_no_measured_speed(make_run: MakeRun) -> None:
    """Three steps on a busy machine were 1.17x faster (measured)."""
    long, short = open_run(make_run("a")), open_run(make_run("b", steps=4, ms=200.0))
    text = " ".join(explain(compare_runs([long, short])).sentences)
    assert "A looks 4.0x faster per token than B" in text
    assert "but B timed too few steps to tell" in text
    assert "(measured" not in text


def test_with_two_tokenizers_everything_is_in_bits_per_byte(make_run: MakeRun) -> None:
    runs = [open_run(make_run(name, dataset=data)) for name, data in (("a", BYTES), ("b", PIECES))]
    comparison = compare_runs(runs)
    explanation = explain(comparison)
    bits = [f"{2.4 * 1.442695 / length:.4f} at 100" for length in (1.0, 4.5)]
    assert row(comparison, "last validation, bits/byte") == bits
    assert [round(found.loss.value, 3) for found in comparison.projections] == [3.462, 0.769]
    assert "perplexity" not in " ".join(explanation.sentences)
    assert "2.4000" not in body(comparison, explanation, [])


def test_a_run_that_went_further_than_its_last_config_asked_for_is_at_its_end(make_run: MakeRun) -> None:
    comparison = compare_runs([open_run(make_run("a", steps=600, config={"max_iters": 400}))])
    assert row(comparison, "steps") == ["600 of 600"]
    assert comparison.runs[0].total_seconds == pytest.approx(30.0)


def test_the_three_that_matter_come_first(real_runs: list[RunLog]) -> None:
    explanation = explain(compare_runs(real_runs, "4070"))
    starts = ["A is 2.39x faster per token than B", "At equal training time B is ahead", "Confounded: n_embd"]
    assert len(explanation.first) == 3
    assert all(said.startswith(start) for said, start in zip(explanation.first, starts, strict=True))
    assert explanation.sentences[-1].startswith("B is "), "what the table says too comes last"


def test_the_terminal_says_the_three_before_the_table(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(make_run("a")), str(make_run("b", ms=100.0))]) == 0
    text = capsys.readouterr().out
    assert text.index("2.00x faster") < text.index("tokens per step")


def test_at_124m_chance_is_the_published_sigma_and_grows_with_the_slope(real_configs) -> None:  # type: ignore[no-untyped-def]
    large = run_facts(open_run(LARGE_LOG, real_configs[1]))
    noise = noise_between(large, large)
    assert noise.chance == PUBLISHED_CHANCE == 0.0013
    assert noise.band(0.1) == noise.band(0.0)
    # The same config twice on that card, 0.7 nats lost between evals: 0.010 apart, one in twenty beyond 0.02.
    assert noise.band(1.1) ** 2 - noise.band(0.0) ** 2 == pytest.approx(0.019**2, rel=0.05)


def test_early_where_the_loss_falls_fast_the_noise_is_larger(real_runs: list[RunLog]) -> None:
    points = compare_runs(real_runs).duels[0]["step"].points
    assert points[0].noise > 1.1 * points[-1].noise


def test_runs_beyond_the_26th_have_letters_too(make_run: MakeRun) -> None:
    assert [run_letter(i) for i in (0, 25, 26, 27, 52)] == ["A", "Z", "AA", "AB", "BA"]
    runs = tuple(run_facts(open_run(make_run(f"run{i}", steps=60 + i, ms=50 + 5 * i))) for i in range(28))
    targets = {found.target for found in project_runs(runs)}
    assert "AB's end" in targets
    assert all(re.fullmatch(r"its own end|[A-Z]{1,2}'s end", target) for target in targets)


def test_no_run_is_heading_for_less_than_nothing(tmp_path: Path) -> None:
    """A curve that fell fast and flattened, as on text that repeats: the law would take it below zero."""
    lines = ["tokens per iteration will be: 16,384", "number of parameters: 10.65M"]
    for step in range(0, 2001, 250):
        lines += [f"step {step}: train loss 1.0, val loss {1.0 + 3.2 * math.exp(-step / 300):.4f}"]
        lines += [f"iter {step}: loss 1.5000, time 100.00ms, mfu 10.00%"]
    log = tmp_path / "a.log"
    log.write_text("\n".join(lines) + "\n", encoding="utf-8")
    run = run_facts(open_run(log))
    for factor in (2, 30, 300):
        found = project_loss(run, factor * 2000.0)
        assert found is None or 0 <= found.low <= found.value


def test_a_finished_run_is_heading_nowhere(make_run: MakeRun) -> None:
    """Where it would be after the time of a longer run is said as what it is."""
    short, long = make_run("short", steps=100), make_run("long", steps=60, config={"max_iters": 300})
    said = " ".join(explain(compare_runs([open_run(short), open_run(long)])).sentences)
    assert "A would be at, made longer, " in said
    assert "B is heading for" in said
    assert "A is heading for" not in said
