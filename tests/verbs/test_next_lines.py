"""The command a verb prints as the next one runs as it is printed, wherever the files are."""

from __future__ import annotations

import os
import random
import shlex
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gptfit.cli import main
from gptfit.config.read import load_config
from gptfit.config.write import render
from gptfit.estimate import Estimate
from gptfit.gpus import find
from gptfit.plan.candidates import Wish
from gptfit.plan.propose import Proposal, propose
from gptfit.plan.result import DataFacts
from gptfit.shell import command
from gptfit.units import si
from gptfit.verbs.next_commands import next_commands


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


def write_parquet(path: Path, column: str) -> Path:
    """Half a megabyte of made-up words, enough for a vocabulary of thousands."""
    rng = random.Random(1)
    syllables = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u", "ar", "en", "is")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(9000)]
    pq.write_table(pa.table({column: [" ".join(rng.choices(words, k=70)) for _ in range(1200)]}), path)
    return path


def commands(printed: str) -> list[str]:
    """The indented lines after `Next:`."""
    return [line.strip() for line in printed.split("Next:\n")[1].splitlines() if line.strip()]


def test_after_propose_for_a_parquet_file_comes_prepare_and_then_plan_without_a_card(here: Path, say: Say) -> None:
    source = write_parquet(here / "a few pages.parquet", "body")
    named = command(["gptfit", "propose", "--gpu", "4070", "--data", source, "--text-column", "body"])
    *lines, last = commands(say(f"{named} --hours 1 --write mine.py"))
    assert last == "gptfit train mine.py"
    assert lines[-1].startswith("gptfit prepare ")
    for line in lines:
        printed = say(line)
    (after,) = [line.removeprefix("next: ") for line in printed.splitlines() if line.startswith("next: ")]
    assert after.startswith("gptfit plan ")
    assert "this machine's CPU" in say(after)
    config = load_config([here / "mine.py"]).config
    assert (here / "data" / config.dataset / "train.bin").is_file(), "where `train mine.py` looks"


@pytest.fixture(scope="module")
def own_vocabulary() -> tuple[Proposal, Wish]:
    """A choice whose text is to be prepared in a vocabulary of its own."""
    data = DataFacts("web_mdn", Estimate.exact(14.7e6), tokenizer="gpt2", bytes_per_token=3.34)
    wish = Wish(find("4070"), 0.02, data, 50304, recipes=("modern",), source="my pages.parquet", column="body")
    choice = propose(wish).choice
    assert choice.vocabulary
    return choice, wish


def test_a_vocabulary_of_its_own_is_trained_before_it_is_used(own_vocabulary: tuple[Proposal, Wish]) -> None:
    pytest.importorskip("tokenizers")
    choice, _ = own_vocabulary
    train, prepare, last = (shlex.split(line) for line in next_commands(*own_vocabulary, Path("mine.py")))
    tokenizer = f"data/web_mdn-{choice.vocabulary}.json"
    source = ["my pages.parquet", "--text-column", "body"]
    assert train == [
        "gptfit",
        "tokenizer",
        "train",
        *source,
        "--vocab-size",
        str(choice.vocabulary),
        "--out",
        tokenizer,
    ]
    assert prepare == ["gptfit", "prepare", *source, "--tokenizer", tokenizer, "--out", tokenizer.removesuffix(".json")]
    assert last == ["gptfit", "train", "mine.py"]


def test_without_the_extra_the_first_line_installs_it(
    own_vocabulary: tuple[Proposal, Wish], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptfit.verbs.next_commands.find_spec", lambda name: None)
    lines = next_commands(*own_vocabulary, Path("mine.py"))
    assert lines[0] == "pip install 'gptfit[hf]'"
    assert lines[1].startswith("gptfit tokenizer train ")


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


def test_a_stopped_run_prints_a_command_with_nothing_behind_it() -> None:
    """`(goes on at step 60)` behind it was a syntax error when pasted."""
    from gptfit.config.keys import TrainConfig
    from gptfit.train.train import TrainResult
    from gptfit.verbs.train_view import summary_lines

    config = TrainConfig(out_dir="my runs/a", max_hours=2.0)
    result = TrainResult("max_hours", 60, Path("my runs/a"), None, 3.0, None, 1000, 7200.0, None, None, 0, 8)
    last = summary_lines(config, result)[-1]
    said, _, line = last.partition(": ")
    assert said == "to go on at step 60"
    assert shlex.split(line) == [
        "gptfit", "train", "--init_from=resume", "--out_dir=my runs/a", "--max_hours=4",
    ]  # fmt: skip


def test_a_written_proposal_counts_its_own_vocabulary(own_vocabulary: tuple[Proposal, Wish]) -> None:
    """It said 86.1M of a model of 43.0M, with a vocabulary that it would not have."""
    plan = own_vocabulary[0].plan
    text = render(plan.config, vocab_size=plan.shape.vocab_size)
    counted = f"{si(plan.shape.parameters)} parameters as nanoGPT counts them (vocabulary {plan.shape.vocab_size:,})"
    assert counted in text
    assert "max_hours = 0.02  # stop after 1 min 12 s; gptfit only; stock nanoGPT ignores it" in text
