"""`gptfit sample`: what it prints, where it stops, and what it says about bad input."""

from __future__ import annotations

import io
import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gptfit.checkpoint.loaded_model import open_model
from gptfit.cli import main
from gptfit.data.tokenizer import load_tokenizer
from gptfit.generate.pick import Picking
from gptfit.generate.sample import encode_prompt, sample
from gptfit.logs.events import Header
from gptfit.logs.runlog import RunLogWriter, read_run
from tests.models import ARCHES, save_checkpoint, tiny_model

ALPHABET = "\n !abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456"[:64]


def make_chars_data(folder: Path) -> Path:
    """A nanoGPT character data set: meta.pkl and two .bin files."""
    folder.mkdir(parents=True)
    meta = {
        "vocab_size": len(ALPHABET),
        "itos": dict(enumerate(ALPHABET)),
        "stoi": {character: token for token, character in enumerate(ALPHABET)},
    }
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    tokens = np.random.default_rng(0).integers(0, len(ALPHABET), 500).astype(np.uint16)
    tokens.tofile(folder / "train.bin")
    tokens[:101].tofile(folder / "val.bin")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with a tiny model of characters."""
    data = make_chars_data(tmp_path / "data" / "chars")
    save_checkpoint(tiny_model(vocab_size=len(ALPHABET)), tmp_path / "out" / "ckpt.pt", dataset=str(data))
    return tmp_path / "out"


def said(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("arch", ARCHES)
def test_samples_of_either_architecture_start_with_the_prompt(
    arch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_chars_data(tmp_path / "chars")
    path = save_checkpoint(tiny_model(arch, vocab_size=len(ALPHABET)), tmp_path / "ckpt.pt", dataset=str(data))
    code, out, err = said(capsys, "sample", path, "--prompt", "abc", "--n", 3, "--tokens", 40)
    texts = out.split("\n---------------\n")
    assert code == 0
    assert len(texts) == 4
    assert texts[3] == ""
    assert all(text.startswith("abc") and len(text) == 43 for text in texts[:3])
    assert len(set(texts)) == 4
    assert "120 tokens in" in err
    assert "beyond the window of 16 tokens" in err


def test_one_sample_is_the_first_of_three(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, three, _ = said(capsys, "sample", run, "--n", 3, "--tokens", 20)
    _, one, _ = said(capsys, "sample", run, "--n", 1, "--tokens", 20)
    assert three.startswith(one)


def test_nanogpts_own_words_give_the_same_samples(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, ours, _ = said(capsys, "sample", run, "--prompt", "abc", "--n", 2, "--tokens", 9, "--top-k", 5)
    words = [f"--out_dir={run}", "--start=abc", "--num_samples=2", "--max_new_tokens=9", "--top_k=5"]
    code, theirs, _ = said(capsys, "sample", *words)
    assert (code, theirs) == (0, ours)
    assert said(capsys, "sample", "--start=abc")[0] == 1
    assert said(capsys, "sample", run, f"--out_dir={run}")[0] == 1


def test_a_runs_samples_are_kept_in_its_log_for_the_report(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLogWriter(run / "run.jsonl") as log:
        log.append(Header(name="a"))
    assert said(capsys, "sample", run, "--prompt", "abc", "--n", "2", "--tokens", "5")[0] == 0
    assert [sample.text[:3] for sample in read_run(run).samples] == ["abc", "abc"]


def test_the_best_checkpoint_of_a_run_is_the_one_used(run: Path) -> None:
    other = tiny_model(seed=9, vocab_size=len(ALPHABET))
    config = torch.load(run / "ckpt.pt", weights_only=True)["config"]
    save_checkpoint(other, run / "best.pt", **config)
    assert torch.equal(open_model(str(run)).model.lm_head.weight, other.lm_head.weight)
    assert not torch.equal(open_model(str(run / "ckpt.pt")).model.lm_head.weight, other.lm_head.weight)


def test_a_stop_ends_the_text_before_it_even_across_tokens(run: Path) -> None:
    opened, how = open_model(str(run)), Picking(1.0, None, None, 3)
    prompt = opened.tokenizer.encode("a")
    whole = "".join(piece.text for piece in sample(opened, prompt, 1, 60, how))
    stop = whole[20:23]
    pieces = list(sample(opened, prompt, 1, 60, how, [stop, "never here"]))
    assert "".join(piece.text for piece in pieces) == whole[: whole.index(stop)]
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_end_of_text_ends_a_sample_and_is_not_shown(tmp_path: Path) -> None:
    path = save_checkpoint(tiny_model(vocab_size=257), tmp_path / "ckpt.pt")
    (tmp_path / "run.jsonl").write_text(json.dumps({"event": "header", "dataset": {"tokenizer": "bytes"}}) + "\n")
    opened = open_model(str(path))
    rows = ["", "", "", ""]
    count = 0
    for piece in sample(opened, [65], 4, 400, Picking(3.0, None, None, 1)):
        rows[piece.row] += piece.text
        count += 1
    assert count < 1600
    assert not any("endoftext" in row for row in rows)


def test_a_prompt_may_name_the_end_of_text_token() -> None:
    gpt2 = load_tokenizer("gpt2")
    assert encode_prompt(gpt2, None) == [50256]
    assert encode_prompt(gpt2, "a<|endoftext|>b") == [64, 50256, 65]


def test_a_prompt_comes_from_stdin_or_a_file(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text("abc")
    _, given, _ = said(capsys, "sample", run, "--prompt", "abc", "--tokens", 9)
    _, from_file, _ = said(capsys, "sample", run, "--prompt", f"FILE:{tmp_path / 'prompt.txt'}", "--tokens", 9)
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc"))
    _, from_stdin, _ = said(capsys, "sample", run, "--prompt", "-", "--tokens", 9)
    assert given == from_file == from_stdin


def test_interactive_answers_each_line_until_end_of_input(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc\n\né\nxyz\n"))
    code, out, err = said(capsys, "sample", run, "--interactive", "--n", 1, "--tokens", 5)
    assert code == 0
    first, second, rest = out.split("\n---------------\n")
    assert (first[:3], second[:3], len(first), len(second), rest) == ("abc", "xyz", 8, 8, "")
    assert "not in this data set's alphabet" in err


def test_a_nanogpt_checkpoint_without_manifest_is_gpt2s_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model(vocab_size=50304)
    saved = torch.load(save_checkpoint(model, tmp_path / "ckpt.pt", dataset="openwebtext"), weights_only=True)
    del saved["gptfit"]
    saved["model"] = {f"_orig_mod.{name}": tensor for name, tensor in saved["model"].items()}
    torch.save(saved, tmp_path / "ckpt.pt")
    code, out, err = said(capsys, "sample", tmp_path, "--prompt", "Hello", "--tokens", 30, "--temperature", 5)
    assert code == 0
    assert out.startswith("Hello")
    assert "assuming GPT-2's tokenizer" in err


BAD = [
    (["--temperature", "-1"], "temperature"),
    (["--top-k", "-3"], "top-k"),
    (["--top-p", "0"], "top-p"),
    (["--n", "0"], "--n 0"),
    (["--tokens", "0"], "--tokens 0"),
    (["--prompt", ""], "prompt is empty"),
    (["--prompt", "é"], "not in this data set's alphabet"),
    (["--stop", ""], "--stop"),
    (["--device", "tpu"], "device"),
    (["--data", "nowhere"], "nowhere"),
    (["--prompt", "FILE:nowhere.txt"], "nowhere.txt"),
    (["--prompt", "a", "--interactive"], "--interactive"),
]


@pytest.mark.parametrize(("words", "named"), BAD)
def test_bad_options_are_one_line(run: Path, words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, "sample", run, *words)
    assert code == 1
    assert out == ""
    assert err.splitlines()[-1].startswith("gptfit: ")
    assert named in err.splitlines()[-1]


def test_greedy_is_the_same_for_every_seed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {said(capsys, "sample", run, "--temperature", "0", "--seed", seed)[1] for seed in (1, 2)}
    assert len(texts) == 1


def test_no_checkpoint_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys, "sample", tmp_path)
    assert code == 1
    assert err.count("\n") == 1
    assert "no such checkpoint" in err


def test_a_misspelt_run_gets_the_one_beside_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys, "sample", f"{run}s")
    assert code == 1
    assert err == f"gptfit: {run}s: no such checkpoint; did you mean {run}?\n"


@pytest.mark.parametrize("tenths", range(10))
def test_a_truncated_checkpoint_is_one_line(run: Path, tenths: int, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (run / "ckpt.pt").read_bytes()
    (run / "ckpt.pt").write_bytes(whole[: len(whole) * tenths // 10])
    code, _, err = said(capsys, "sample", run)
    assert code == 1
    assert err.count("\n") == 1
    assert "ckpt.pt" in err


def test_a_prompt_longer_than_the_window_is_cut_with_a_note(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, "sample", run, "--prompt", "abcdefgh" * 5, "--tokens", 3)
    assert code == 0
    assert out.startswith("abcdefgh" * 5)
    assert "the prompt has 40 tokens; the model reads the last 16 of them" in err


def test_a_model_smaller_than_its_tokenizer_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = torch.load(run / "ckpt.pt", weights_only=True)["config"]
    save_checkpoint(tiny_model(vocab_size=40), run / "ckpt.pt", **{**config, "vocab_size": 40})
    code, _, err = said(capsys, "sample", run)
    assert code == 1
    assert "the model has 40 tokens, its tokenizer (chars) 62" in err


def test_a_missing_data_folder_is_asked_for(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data" / "chars").rename(tmp_path / "moved")
    code, _, err = said(capsys, "sample", run)
    assert code == 1
    assert "--data DIR" in err
    assert said(capsys, "sample", run, "--data", tmp_path / "moved", "--tokens", 3)[0] == 0
