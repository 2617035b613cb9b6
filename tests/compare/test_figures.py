"""The four figures of a run's page, plan's loss in the list, and a disk that fills."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from gptfit.compare import attention
from gptfit.compare.attention import needs_attention
from gptfit.compare.comparison import compare_runs
from gptfit.compare.facts import run_facts
from gptfit.compare.figures import four_figures
from gptfit.compare.planned_loss import planned_loss
from gptfit.compare.verdict import verdict
from gptfit.logs.open_run import open_run
from gptfit.logs.runlog import RunLog
from gptfit.pages.report import write_report
from gptfit.pages.run_list import Listing
from gptfit.plan.plan import plan
from tests.made_logs import MakeRun, append_events


def test_a_real_run_opens_with_four_figures(real_runs: list[RunLog]) -> None:
    found = {figure.name: figure for figure in four_figures(run_facts(real_runs[1], "RTX 4070"))}
    assert list(found) == ["validation loss", "progress", "tokens per second", "heading for"]
    assert "MFU 82 %" in found["tokens per second"].words
    assert "plan said" in found["heading for"].words


def test_a_finished_run_says_what_plan_said(make_run: MakeRun) -> None:
    config = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304, "batch_size": 8}
    folder = make_run("done", steps=40, config=config, dataset={"folder": "data/fineweb", "tokenizer": "gpt2"})
    append_events(folder, [{"event": "end", "reason": "max_iters", "step": 40}])
    figures = {figure.name: figure for figure in four_figures(run_facts(open_run(folder)))}
    assert figures["progress"].value == "100 %"
    assert "plan said" in figures


def test_a_run_in_a_vocabulary_of_its_own_opens_with_bits_per_byte(make_run: MakeRun, tmp_path: Path) -> None:
    config = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "batch_size": 8, "max_iters": 100}
    own = {"folder": "data/fineweb", "tokenizer": "tokenizer.json", "bytes_per_token": 2 / math.log(2)}
    facts = run_facts(open_run(make_run("own", steps=50, config=config | {"vocab_size": 4096}, dataset=own)))
    nats, plan = facts.evals[-1].val_loss, planned_loss(facts)
    assert nats is not None
    assert plan is not None
    first, *_, ending = four_figures(facts)
    assert (first.name, first.value) == ("validation, bits per byte", f"{nats / 2:.4f}")
    assert f"{nats:.4f} nats per token" in first.words
    assert f"plan said {plan.value / 2:.2f}" in ending.words, "in the same unit"
    alone = compare_runs([open_run(tmp_path / "own")])
    assert f"best validation {nats / 2:.4f} bits per byte" in verdict(alone)
    assert alone.unit == "bits per byte"


def test_the_loss_beside_the_projection_is_the_one_plan_prints(real_runs: list[RunLog]) -> None:
    facts = run_facts(real_runs[1], "RTX 4070")
    ours, config = planned_loss(facts), facts.as_config()
    assert ours is not None
    assert config is not None
    assert facts.shape is not None
    found = plan(config, facts.shape, facts.gpu)
    assert found.loss is not None
    assert ours.value == pytest.approx(found.loss.loss.value)


def test_a_run_from_other_weights_or_on_conversations_has_no_planned_loss(make_run: MakeRun) -> None:
    data = {"folder": "data/x", "tokenizer": "gpt2"}
    assert planned_loss(run_facts(open_run(make_run("a", dataset=data)))) is not None
    assert planned_loss(run_facts(open_run(make_run("b", dataset={**data, "chat": "gptfit-1"})))) is None
    assert planned_loss(run_facts(open_run(make_run("c", dataset=data, config={"init_from": "gpt2"})))) is None


def test_the_list_has_both(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", steps=50, config={"max_iters": 100}, dataset={"folder": "data/x", "tokenizer": "gpt2"})
    (row,) = Listing(tmp_path).runs()
    assert 0 < row["projected"]["value"] < row["val_loss"]
    assert row["planned"]["value"] > 0


def test_a_disk_that_fills_is_said_while_the_run_goes_on(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run("a", steps=20)
    (folder / "ckpt.pt").write_bytes(bytes(1000))
    run = open_run(folder / "run.jsonl")

    def usage(_: Any) -> Any:
        return type("Usage", (), {"free": 2500})

    assert needs_attention(run_facts(run), run.steps, "running") == []
    monkeypatch.setattr(attention.shutil, "disk_usage", usage)
    (words,) = needs_attention(run_facts(run), run.steps, "running")
    assert words.startswith("disk filling")
    assert needs_attention(run_facts(run), run.steps, "finished") == []


def test_the_page_has_figures_then_the_curve_then_the_table_and_samples_by_step(
    make_run: MakeRun, tmp_path: Path
) -> None:
    folder = make_run("a")
    made = [("", "first"), ("Once", " upon <b>a time</b>")]
    append_events(
        folder,
        [{"event": "sample", "step": step, "prompt": p, "text": t} for step in (10, 20) for p, t in made],
    )
    write_report([folder], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    places = [page.index(f'id="{name}"') for name in ("figures", "smoothing", "loss", "facts", "samples")]
    assert places == sorted(places)
    assert page.count('<p class="sample-step">') == 2
    assert page.index('<p class="sample-step">step 20') < page.index('<p class="sample-step">step 10')
    assert "<strong>Once</strong> upon &lt;b&gt;a time&lt;/b&gt;" in page
