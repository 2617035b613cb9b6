"""Many worker processes deliver what threads deliver, in the same order; faults among them are one line."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gptfit.data import work, worker_processes
from gptfit.data.documents import Reading
from gptfit.data.options import PrepareOptions
from gptfit.data.prepare import prepare
from gptfit.data.tokenizer import Tokenizer, load_tokenizer
from gptfit.errors import DataError

from .conftest import Kept, WriteParquet, digest, stories


@pytest.fixture
def many_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "BATCH_BYTES", 2000)


def sources(parquet: WriteParquet) -> tuple[str, ...]:
    return tuple(str(parquet(f"{i}.parquet", [*stories(80, i), None, ""], rows=10)) for i in range(4))


def test_processes_write_the_bytes_and_the_counts_of_threads(
    parquet: WriteParquet, tmp_path: Path, many_units: None, kept: Kept
) -> None:
    made, files = {}, sources(parquet)
    for name, workers in (("threads", 2), ("processes", 3)):
        prepare(PrepareOptions(files, tmp_path / name, val_fraction=0.1, workers=workers), kept)
        made[name] = (digest(tmp_path / name), (tmp_path / name / "manifest.json").read_text())
    assert made["threads"] == made["processes"]


def test_processes_are_used_only_where_there_is_work_for_them() -> None:
    units = [work.Unit(i, ()) for i in range(64)]
    assert worker_processes.is_worth_processes(units, 8)
    assert not worker_processes.is_worth_processes(units, 2)
    assert not worker_processes.is_worth_processes(units[:20], 8)


def die() -> Tokenizer:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def refuse() -> Tokenizer:
    raise DataError("no such vocabulary; choose another")


@pytest.mark.parametrize(
    ("make_tokenizer", "line"), [(die, "a worker process was killed"), (refuse, "no such vocabulary")]
)
def test_a_worker_that_dies_or_fails_is_one_line(make_tokenizer: worker_processes.MakeTokenizer, line: str) -> None:
    from gptfit.data.split import SplitRule

    reading = Reading((), "text", SplitRule("hash", 0, 0), False, None, 2000)
    with pytest.raises(DataError, match=line):
        list(worker_processes.pieces_by_processes(reading, make_tokenizer, None, [work.Unit(0, ())], 0, 3))


def test_a_prepare_by_processes_goes_on_where_it_was_stopped(
    parquet: WriteParquet, tmp_path: Path, many_units: None
) -> None:
    class Stop(Kept):
        def progress(self, progress: object) -> None:
            raise KeyboardInterrupt

    files = sources(parquet)
    options = PrepareOptions(files, tmp_path / "stopped", val_fraction=0.1, workers=3)
    with pytest.raises(KeyboardInterrupt):
        prepare(options, Stop())
    prepare(options)
    prepare(PrepareOptions(files, tmp_path / "whole", val_fraction=0.1, workers=1))
    assert digest(tmp_path / "stopped") == digest(tmp_path / "whole")


def test_the_default_tokenizer_travels_to_another_process() -> None:
    import pickle

    from gptfit.data.engines import TokenizerSpec

    made = pickle.loads(pickle.dumps(TokenizerSpec("gpt2").load))()
    assert made.sha256 == load_tokenizer("gpt2").sha256
