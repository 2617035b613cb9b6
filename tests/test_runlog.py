"""run.jsonl survives crashes, resumes and non-finite numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptfit.errors import RunError
from gptfit.runlog import RunLogWriter, read_run


def write(path: Path, *events: dict[str, object]) -> None:
    with RunLogWriter(path) as log:
        for event in events:
            log.append(event)


def test_events_come_back_as_written(tmp_path: Path) -> None:
    header = {"event": "header", "name": "a", "config": {"n_embd": 384}}
    write(tmp_path / "run.jsonl", header, {"event": "step", "step": 1, "loss": 2.5}, {"event": "end", "reason": "done"})
    run = read_run(tmp_path)
    assert (run.name, run.config["n_embd"], run.steps[0]["loss"], run.notes) == ("a", 384, 2.5, ())
    assert run.end == {"event": "end", "reason": "done"}


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_torn_last_line_is_tolerated_reported_and_appendable(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "run.jsonl"
    write(file, {"event": "step", "step": 1, "loss": 2.5}, {"event": "step", "step": 2, "loss": 2.25, "ms": 12.5})
    file.write_bytes(file.read_bytes()[:-cut])
    write(file, {"event": "step", "step": 3, "loss": 2.0})
    steps = [step["step"] for step in read_run(file).steps]
    assert steps[0] == 1
    assert steps[-1] == 3


def test_a_torn_line_at_the_end_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text('{"event": "step", "step": 1}\n{"event": "st')
    assert "torn" in read_run(tmp_path).notes[0]


def test_after_a_resume_the_later_writing_of_a_step_counts(tmp_path: Path) -> None:
    first = [{"event": "step", "step": n, "loss": 1.0} for n in range(5)]
    again = [{"event": "step", "step": n, "loss": 2.0} for n in range(3, 7)]
    write(tmp_path / "run.jsonl", *first, *again)
    assert [s["loss"] for s in read_run(tmp_path).steps] == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]


def test_nan_is_written_as_null_so_that_every_json_reader_can_read_it(tmp_path: Path) -> None:
    write(tmp_path / "run.jsonl", {"event": "step", "step": 1, "loss": float("nan"), "more": [float("inf")]})
    assert read_run(tmp_path).steps[0] == {"event": "step", "step": 1, "loss": None, "more": [None]}


def test_a_file_without_events_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_bytes(b"\x00\xff binary\n")
    with pytest.raises(RunError, match="looked for"):
        read_run(tmp_path)
    with pytest.raises(RunError, match="no such run log"):
        read_run(tmp_path / "nope")
