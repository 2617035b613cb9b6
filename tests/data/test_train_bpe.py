"""A vocabulary is learned from any text in a time that its bytes explain, and Ctrl-C ends it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gptfit.data import train_bpe
from gptfit.data.train_bpe import LEAST_VOCABULARY, measure_vocabularies, train_tokenizer

from .conftest import WriteParquet, stories

pytest.importorskip("tokenizers")

# What stood still for longer than anyone waited: blanks of a broken page, and one letter.
EDGES = ["a cat", "", "x" * 2500, " " * 1_200_000 + "x", "a" * 100_000]


@pytest.mark.parametrize("texts", [EDGES, ["a" * 1_000_000]], ids=["edges", "one letter"])
def test_a_run_without_a_boundary_is_learned_from_in_pieces(
    parquet: WriteParquet, tmp_path: Path, texts: list[str]
) -> None:
    source = str(parquet("edges.parquet", texts))
    found = train_tokenizer([source], tmp_path / "own.json", LEAST_VOCABULARY + 5)
    assert found.trained_on_bytes == sum(map(len, texts))
    assert found.tokenizer.decode(found.tokenizer.encode("aaaa cat")) == "aaaa cat"
    assert measure_vocabularies([source], (300, 2048)) == {}, "no text is left to measure on"


def test_the_merges_of_usual_text_are_what_they_were(
    parquet: WriteParquet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut at a thousand bytes, or hardly ever, and in the file nothing of it."""
    texts = [*stories(300), "-" * 80, "漢字" * 100, "\n" * 400 + "def f():\n        return 1"]
    source = str(parquet("texts.parquet", texts))
    learned = []
    for number, longest in enumerate((train_bpe.LONGEST_WORD, 100_000)):
        monkeypatch.setattr(train_bpe, "LONGEST_WORD", longest)
        path = train_tokenizer([source], tmp_path / f"{number}.json", 400).path
        learned.append(json.loads(path.read_text(encoding="utf-8")))
    assert learned[0] == learned[1]
    assert learned[0]["pre_tokenizer"]["type"] == "ByteLevel"


# Words that are not cut, so that merging takes minutes; it says when all of them are read.
SLOW = """
import signal
import sys
from gptfit import cli
from gptfit.data import train_bpe
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background of a shell
train_bpe.LONGEST_WORD = 100_000
texts = train_bpe._Sampler.training_texts
def told(self):
    yield from texts(self)
    print("read", flush=True)
train_bpe._Sampler.training_texts = told
sys.exit(cli.main(["tokenizer", "train", *sys.argv[1:]]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT to send")
def test_ctrl_c_ends_it_while_it_merges(parquet: WriteParquet, tmp_path: Path) -> None:
    source = parquet("letters.parquet", [letter * 100_000 for letter in "abcdefghijklmnopqrstuvwxyz"])
    words = [sys.executable, "-c", SLOW, str(source), "--vocab-size", "400", "--out", str(tmp_path / "own.json")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "read\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "gptfit: stopped\n")
    assert not (tmp_path / "own.json").exists()
