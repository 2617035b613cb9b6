"""What commands say where there is little room, or where a file cannot be read."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gptfit.checkpoint.format import load_checkpoint
from gptfit.cli import main
from gptfit.errors import RunError
from tests.made_logs import MakeRun

WRITING = "choose a place"
READING = "make it readable for you"


def _denied(path: object, *_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied", os.fspath(path))  # type: ignore[call-overload]


def test_a_folder_of_runs_that_cannot_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "listdir", _denied)
    assert main(["runs", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "cannot be read (Permission denied)" in said
    assert READING in said


def test_a_folder_without_runs_says_what_makes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path)]) == 0
    assert " ".join(capsys.readouterr().out.split()).endswith("; `gptfit train` makes one")


def test_a_log_that_cannot_be_read_has_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gptfit.logs.open_run import open_run

    log = tmp_path / "nr.jsonl"
    log.write_text("{}")
    monkeypatch.setattr("builtins.open", _denied)
    with pytest.raises(RunError, match="cannot be read") as found:
        open_run(log)
    assert READING in str(found.value)
    assert WRITING not in str(found.value)


@pytest.mark.parametrize(
    ("name", "words"), [("letter.txt", "not a checkpoint"), ("ckpt.pt", "not a readable checkpoint")]
)
def test_bytes_that_torch_never_wrote_are_no_checkpoint(name: str, words: str, tmp_path: Path) -> None:
    """What a run calls its own is damaged; anything else is another kind of file."""
    file = tmp_path / name
    file.write_bytes(bytes(range(100, 200)) * 100)
    with pytest.raises(RunError) as found:
        load_checkpoint(file)
    assert str(found.value).startswith(f"{file}: {words}")


@pytest.mark.parametrize("columns", [60, 80])
def test_the_table_of_cards_fits_the_screen(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["gpus"]) == 0
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines()) <= columns
    assert "…" not in shown, "no cell is cut"


def test_names_of_runs_are_never_broken(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = ["fineweb-124m-baseline-adamw-seed1", "fineweb-124m-modern-muon-seed1", "fineweb-124m-again"]
    assert main(["compare", *(str(make_run(name)) for name in names)]) == 0
    shown = capsys.readouterr().out
    assert all(f"{letter}: {name}" in shown for letter, name in zip("ABC", names, strict=True))


def test_nothing_listed_names_a_file_that_a_wheel_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs"]) == 0
    assert "tools/" not in capsys.readouterr().out


def test_the_readme_has_a_row_for_every_verb(repo: Path) -> None:
    rows = re.findall(r"^\| `(\w+)", (repo / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"configs", "keys", "completion"} <= set(rows)


def test_a_proposal_says_where_no_vocabulary_could_be_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pages.parquet"
    pq.write_table(pa.table({"text": [f"page {i} of a book about {i} things " * 20 for i in range(2000)]}), file)
    for module in ("propose", "propose_view"):
        monkeypatch.setattr(f"gptfit.verbs.{module}.find_spec", lambda name: None)
    assert main(["propose", "--gpu", "4070", "--hours", "1", "--data", str(file)]) == 0
    assert "no vocabulary was learned from the file" in " ".join(capsys.readouterr().out.split())
