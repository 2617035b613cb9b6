"""The command a verb prints as the next one runs as it is printed, wherever the files are."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gptfit.cli import main
from gptfit.config.read import load_config
from gptfit.shell import command

TEXT = "The quick brown fox jumps over the lazy dog. " * 4


@pytest.fixture(autouse=True)
def no_local_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a card."""
    monkeypatch.setattr("gptfit.verbs.gpu_and_data.local_gpu", lambda: None)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a blank in its name, to type commands in."""
    folder = tmp_path / "my texts"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


Say = Callable[..., str]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """What a command prints; it must succeed."""

    def run(line: str, code: int = 0) -> str:
        program, *words = shlex.split(line)
        assert program == "gptfit"
        assert main(words) == code, capsys.readouterr().err
        return capsys.readouterr().out

    return run


def write_parquet(path: Path, documents: int = 600, column: str = "text") -> Path:
    pq.write_table(pa.table({column: [f"{number} {TEXT}" for number in range(documents)]}), path)
    return path


def commands(printed: str) -> list[str]:
    """The indented lines after `Next:`."""
    return [line.strip() for line in printed.split("Next:\n")[1].splitlines() if line.strip()]


@pytest.mark.parametrize("column", ["text", "body"])
def test_after_propose_for_a_parquet_file_comes_prepare_and_then_plan_without_a_card(
    here: Path, say: Say, column: str
) -> None:
    source = write_parquet(here / "a few pages.parquet", column=column)
    named = command(["gptfit", "propose", "--gpu", "4070", "--hours", "1", "--data", source, "--text-column", column])
    lines = commands(say(f"{named} --only nanogpt --write mine.py"))
    assert [line.split()[1] for line in lines] == ["prepare", "train"]
    prepared = say(lines[0])
    (after,) = [line.removeprefix("next: ") for line in prepared.splitlines() if line.startswith("next: ")]
    assert after.startswith("gptfit plan ")
    assert "this machine's CPU" in say(after)
    config = load_config([here / "mine.py"]).config
    assert (here / "data" / config.dataset / "train.bin").is_file(), "where `train mine.py` looks"


def test_a_vocabulary_of_its_own_is_trained_and_used_as_printed(here: Path, say: Say) -> None:
    pytest.importorskip("tokenizers")
    rows = [f"{number:x} {hash((number, k)) & 0xFFFF} {TEXT}" for number in range(400) for k in range(6)]
    pq.write_table(pa.table({"text": rows}), here / "pages.parquet")
    lines = commands(say("gptfit propose --gpu 4070 --hours 0.003 --data pages.parquet --only modern --write mine.py"))
    assert [line.split()[1] for line in lines] == ["tokenizer", "prepare", "train"]
    assert lines[0].endswith(".json")
    assert shlex.split(lines[0])[-1] in shlex.split(lines[1])


def test_without_the_extra_the_first_line_installs_it(here: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    from gptfit.verbs import next_commands

    monkeypatch.setattr(next_commands, "find_spec", lambda name: None)
    write_parquet(here / "pages.parquet", 2000)
    lines = commands(say("gptfit propose --gpu 4070 --hours 0.003 --data pages.parquet --only modern --write mine.py"))
    assert lines[0] == "pip install 'gptfit[hf]'"
    assert lines[1].startswith("gptfit tokenizer train pages.parquet")


def test_propose_knows_public_data_by_its_name_as_plan_does(here: Path, say: Say) -> None:
    printed = say("gptfit propose --data openwebtext --gpu 4070 --hours 24 --write mine.py")
    assert "openwebtext: 9.04B tokens" in printed
    assert commands(printed)[0].startswith("gptfit prepare SOURCE --out data/openwebtext")
    assert load_config([here / "mine.py"]).config.dataset == "openwebtext"
    assert "openwebtext: 9.04B tokens" in say("gptfit plan --data openwebtext --gpu 4070")


@pytest.mark.parametrize(
    ("name", "line"),
    [("posix", "gptfit prepare 'my text.txt' 8"), ("nt", 'gptfit prepare "my text.txt" 8')],
)
def test_words_are_quoted_as_the_system_wants(name: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "name", name)
    assert command(["gptfit", "prepare", "my text.txt", 8]) == line


def test_a_windows_path_is_left_as_it_is_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "name", "nt")
    assert command(["gptfit", "train", r"C:\Users\me\mine.py"]) == r"gptfit train C:\Users\me\mine.py"
