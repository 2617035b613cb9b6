"""A log of a program nobody has heard of: its reader and its name in the table are all it takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gptfit.compare.comparison import compare_runs
from gptfit.compare.sentences import explain
from gptfit.errors import RunError
from gptfit.logs import open_run as opening
from gptfit.logs.parsed_log import LogFormat, ParsedEval, ParsedLog, ParsedStep

LINE = re.compile(r"^epoch-free (\d+) nats=([\d.]+) in ([\d.]+)s$")
TEXT = """\
a model of 12,000,000 parameters
epoch-free 0 nats=5.5 in 2.0s
epoch-free 1 nats=5.0 in 0.5s
judged 2: 4.75
epoch-free 2 nats=4.5 in 0.5s
"""


def read(lines: list[str]) -> ParsedLog:
    parsed = ParsedLog("newcomer")
    for line in lines:
        if found := LINE.match(line):
            parsed.add_step(ParsedStep(int(found[1]), float(found[2]), 1e3 * float(found[3]), clean=True))
        elif found := re.match(r"judged (\d+): ([\d.]+)", line):
            parsed.add_eval(ParsedEval(int(found[1]), None, float(found[2])))
        elif found := re.match(r"a model of ([\d,]+) parameters", line):
            parsed.learn(parameters=int(found[1].replace(",", "")), tokens_per_step=4096)
            parsed.learn_config({"n_layer": 3})
    return parsed


NEWCOMER = LogFormat("newcomer", "epoch-free 1 nats=5.0", lambda line: bool(LINE.match(line)), read, (b"judged",))


def test_its_reader_and_its_name_in_the_table_are_all_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new.log"
    path.write_text(TEXT)
    with pytest.raises(RunError, match="no training line in 6 lines; looked for nanoGPT's `iter 10"):
        opening.open_run(path)
    monkeypatch.setattr(opening, "FORMATS", (*opening.FORMATS, NEWCOMER))
    run = opening.open_run(path)
    assert run.header.kind == "newcomer"
    assert (run.header.parameters, run.header.tokens_per_step, run.config) == (12_000_000, 4096, {"n_layer": 3})
    assert [step.ms for step in run.steps] == [None, 500.0, None], "the first compiles, the last holds the evaluation"
    assert [(found.step, found.val_loss, found.tokens) for found in run.evals] == [(2, 4.75, 8192)]
    assert "4.75" in explain(compare_runs([run])).verdict
