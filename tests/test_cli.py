"""The command line itself: misspelt words, and output that cannot be written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gptfit.cli import VERBS, main
from gptfit.config import read
from gptfit.config.read import ConfigFile, read_config_file

MISSPELT = {
    ("trian",): "did you mean train?",
    ("prepare", "x.parquet", "--text-colum=a"): "did you mean --text-column?",
    ("plan", "--gpuu=4070"): "did you mean --gpu?",
    ("tune", "--minuts", "3"): "did you mean --minutes?",
    ("train", "--learning_rat=1e-3"): "did you mean learning_rate?",
    ("train", "--resume"): "use --init_from=resume",
    ("train", "--resume=out"): "use --init_from=resume",
    ("train", "--lr", "1e-3"): "use --learning_rate=VALUE",
    ("train", "--batch_size"): "--batch_size=VALUE",
    ("train", "--recipe", "modrn"): "did you mean modern?",
    ("help", "plann"): "did you mean plan?",
}


@pytest.mark.parametrize("words", MISSPELT, ids=" ".join)
def test_a_misspelt_word_is_one_line_with_the_right_one(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 1
    said = capsys.readouterr().err
    assert MISSPELT[words] in said
    assert said.count("\n") == 1
    assert "?;" not in said, "what was meant is all the advice there is"


# Stopped runs are in tests/train/test_faults.py and tests/data/test_faults.py, with real signals.
EXIT_CODES = {
    ("gpus", "4070"): 0,
    ("plan", "--gpu=4070", "--batch_size=8"): 0,
    ("plan", "--gpu=4070", "--batch_size=64"): 1,
    ("plan", "--gpu=4070", "--n_head=7"): 1,
    ("inspect", "nosuch.parquet"): 1,
    ("gpus", "nosuchcard"): 1,
    ("nosuchverb",): 1,
    ("runs", "--nosuchoption"): 1,
    ("export", "out", "--to", "nosuchformat"): 1,
}


@pytest.mark.parametrize("words", EXIT_CODES, ids=" ".join)
def test_exit_codes_are_the_documented_ones(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == EXIT_CODES[words], capsys.readouterr().err
    page = (Path(__file__).parent.parent / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (\d+) \|", page.partition("## Exit codes")[2], flags=re.M) == [
        "0",
        "1",
        "129",
        "130",
        "143",
    ]


@pytest.mark.parametrize("verb", VERBS)
def test_an_option_no_verb_has_is_bad_input_like_any_other(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--no-such-option-at-all"]) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert not said.out


def test_a_choice_without_a_neighbour_names_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "somewhere", "--to", "onnx"]) == 1
    assert capsys.readouterr().err == "gptfit: --to onnx: no such choice; choose from hf, gguf, nanogpt\n"


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


def test_a_key_takes_its_value_after_a_space_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As `--gpu 4070` does; files may stand before, between and after."""
    file = tmp_path / "mine.py"
    file.write_text("n_layer = 6\n")
    words = ["plan", "--batch_size", "8", str(file), "--gpu", "4070", "--out_dir", "a b", "--seed=1", "--json"]
    assert main(words) == 0, capsys.readouterr().err
    planned = json.loads(capsys.readouterr().out)
    assert planned["micro_batch"] == 8
    assert planned["parameters"] < 90e6


@pytest.mark.parametrize("verb", ["plan", "train", "tune"])
def test_a_value_with_a_blank_is_no_file(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each fails for its n_head, not for a file called '--out_dir=a b'."""
    assert main([verb, "--out_dir=a b", "--n_head=7", *(["--gpu", "4070"] if verb == "plan" else [])]) == 1
    said = "".join(capsys.readouterr())
    assert "is not divisible by n_head 7" in said
    assert "no such config file" not in said


def test_help_before_a_verb_is_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for words in (["help", "plan"], ["plan", "--help"]):
        with pytest.raises(SystemExit):
            main(words)
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert "usage: gptfit plan" in said[0]


@pytest.mark.parametrize("words", [["plan", "--gpu=4070"], ["train"], ["tune", "--minutes", "1"], ["doctor"]])
def test_a_command_reads_its_config_once(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("n_embd = 512\ndtype = 'float32'\n")  # does not start, so that nothing else happens
    reads = []

    def counted(path: str | Path) -> ConfigFile:
        reads.append(path)
        return read_config_file(path)

    monkeypatch.setattr(read, "read_config_file", counted)
    assert main([words[0], str(file), *words[1:]]) == 1
    assert "not divisible" in "".join(capsys.readouterr())
    assert reads == [str(file)]
