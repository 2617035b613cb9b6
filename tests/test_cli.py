"""The command line itself: misspelt words, and output that cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gptfit.cli import main

MISSPELT = {
    ("trian",): "did you mean train?",
    ("prepare", "x.parquet", "--text-colum=a"): "did you mean --text-column?",
    ("plan", "--gpuu=4070"): "did you mean --gpu?",
    ("tune", "--minuts", "3"): "did you mean --minutes?",
    ("train", "--learning_rat=1e-3"): "did you mean learning_rate?",
}


@pytest.mark.parametrize("words", MISSPELT, ids=" ".join)
def test_a_misspelt_word_is_one_line_with_the_right_one(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) in (1, 2)
    said = capsys.readouterr().err
    assert MISSPELT[words] in said
    assert said.count("\n") == 1


def test_a_key_that_looks_like_an_option_stays_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpu=4070", "--device=cuda", "--json"]) == 0, capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_the_output_is_one_line() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gptfit", "gpus"], stdout=full, stderr=subprocess.PIPE, text=True, env=os.environ
        )
    assert done.returncode == 1
    assert "no space left" in done.stderr
    assert done.stderr.count("\n") == 1
