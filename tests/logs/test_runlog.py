"""run.jsonl survives crashes, resumes and non-finite numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gptfit.errors import RunError
from gptfit.logs.events import DataSaid, DeviceSaid, End, Eval, Event, Header, Message, Step
from gptfit.logs.runlog import RunLogWriter, read_run
from gptfit.shape import ModelShape


def write(path: Path, *events: Event) -> None:
    with RunLogWriter(path) as log:
        for event in events:
            log.append(event)


def test_events_come_back_as_written(tmp_path: Path) -> None:
    header = Header(
        name="a",
        config={"n_embd": 384, "compile": False, "dataset": "x"},
        shape=ModelShape(2, 2, 64, 64, 256, arch="modern"),
        device=DeviceSaid(name="cpu", peak_tflops=0.1),
        dataset=DataSaid(folder="data/x", train_tokens=1000),
        versions={"torch": "2.13"},
        time=3.0,
    )
    step = Step(1, loss=2.5, ms=12.5, tokens=4096, mfu=0.3, clock_mhz=2475.0)
    said = [Eval(1, 2.5, 2.6, eval_tokens=100), Message("note", "Once upon a time", 1), End("done", 2)]
    write(tmp_path / "run.jsonl", header, step, *said)
    run = read_run(tmp_path)
    assert (run.header, *run.steps, *run.evals, *run.messages, run.end) == (header, step, *said)
    assert (run.name, run.notes) == ("a", ())


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_torn_last_line_is_tolerated_reported_and_appendable(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "run.jsonl"
    write(file, Step(1, 2.5), Step(2, 2.25, ms=12.5))
    file.write_bytes(file.read_bytes()[:-cut])
    write(file, Step(3, 2.0))
    steps = [step.step for step in read_run(file).steps]
    assert steps[0] == 1
    assert steps[-1] == 3


def test_a_torn_line_at_the_end_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text('{"event": "step", "step": 1}\n{"event": "st')
    assert "torn" in read_run(tmp_path).notes[0]


def test_after_a_resume_the_later_writing_of_a_step_counts(tmp_path: Path) -> None:
    first = [Step(n, 1.0) for n in range(5)]
    again = [Step(n, 2.0) for n in range(3, 7)]
    write(tmp_path / "run.jsonl", *first, *again)
    assert [s.loss for s in read_run(tmp_path).steps] == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]


def test_nan_is_written_as_null_so_that_every_json_reader_can_read_it(tmp_path: Path) -> None:
    write(tmp_path / "run.jsonl", Step(1, float("nan"), grad_norm=float("inf")))
    assert json.loads((tmp_path / "run.jsonl").read_text()) == {
        "event": "step",
        "step": 1,
        "loss": None,
        "grad_norm": None,
    }
    assert read_run(tmp_path).steps[0] == Step(1)


def test_values_of_the_wrong_type_or_size_are_as_if_not_said(tmp_path: Path) -> None:
    odd: dict[str, object] = {
        "event": "header",
        "name": 7,
        "config": {"n_embd": "wide", "compile": True, "weather": 1},
        "processes": 10**30,
        "shape": {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64, "vocab_size": 9, "positions": 3},
    }
    lines = [odd, {"event": "step", "step": 1, "loss": "low", "ms": -3, "tokens_per_s": True, "lr": [1]}]
    lines += [{"event": "step", "step": 1.5}, {"event": ["step"], "step": 2}, {"event": "event", "message": "\ud800!"}]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(tmp_path)
    assert run.header == Header(config={"compile": True})
    assert run.steps == [Step(1)]
    assert run.messages == [Message("note", "?!")]


def test_a_run_that_goes_on_after_its_end_has_not_ended_whatever_the_clock_says(tmp_path: Path) -> None:
    before = [Step(0, 2.0, time=1000.0), End("SIGTERM", 1, time=1001.0)]
    write(tmp_path / "run.jsonl", *before, Header(time=500.0), Step(1, 1.9, time=501.0))
    assert read_run(tmp_path).end is None


def test_a_file_without_events_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_bytes(b"\x00\xff binary\n")
    with pytest.raises(RunError, match="looked for"):
        read_run(tmp_path)
    with pytest.raises(RunError, match="no such run log"):
        read_run(tmp_path / "nope")
