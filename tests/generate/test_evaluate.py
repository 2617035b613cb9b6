"""`gptfit eval`: every token counted once, HellaSwag with known answers, results kept."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gptfit.checkpoint.loaded_model import LoadedModel, open_model
from gptfit.cli import main
from gptfit.dataset import read_dataset
from gptfit.errors import DataError, UsageError
from gptfit.generate import exact_loss
from gptfit.generate.eval_file import read_results
from gptfit.generate.exact_loss import split_loss
from gptfit.generate.hellaswag import hellaswag, read_items
from gptfit.generate.references import references
from gptfit.generate.score import score_continuations
from gptfit.model.base import LanguageModel
from tests.models import ARCHES, save_checkpoint, tiny_model


def make_byte_run(folder: Path, n_val: int, arch: str = "gpt2") -> Path:
    """A run over random bytes with an end-of-text after every 20, and a manifest."""
    data = folder / "data"
    data.mkdir(parents=True)
    tokens = np.random.default_rng(1).integers(0, 256, 200).astype(np.uint16)
    tokens[::21] = 256
    sizes = {"train": len(tokens), "val": n_val}
    for name, size in sizes.items():
        tokens[:size].tofile(data / f"{name}.bin")
    manifest = {
        "format": "gptfit-dataset",
        "version": 1,
        "tokenizer": {"name": "bytes", "vocab_size": 257, "end_of_text": 256, "file": None},
        "dtype": "uint16",
        "splits": {name: {"tokens": size, "files": [f"{name}.bin"]} for name, size in sizes.items()},
    }
    (data / "manifest.json").write_text(json.dumps(manifest))
    save_checkpoint(tiny_model(arch, vocab_size=257), folder / "ckpt.pt", dataset=str(data))
    return folder


def val_tokens(opened: LoadedModel) -> torch.Tensor:
    assert opened.data is not None
    return torch.from_numpy(np.fromfile(opened.data.folder / "val.bin", dtype=np.uint16).astype(np.int64))


def test_the_loss_is_computed_with_all_digits_where_training_rounds_its_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_model(str(make_byte_run(tmp_path, 40)))
    real, rounds = exact_loss._losses, []

    def look(*args: Any) -> Any:
        rounds.append(torch.backends.cuda.matmul.allow_tf32)
        return real(*args)

    monkeypatch.setattr(exact_loss, "_losses", look)
    assert opened.data is not None
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        split_loss(opened, opened.data)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert set(rounds) == {False}


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("n_val", [2, 10, 16, 17, 18, 33, 100])
def test_the_loss_is_the_mean_over_every_token_but_the_first(arch: str, n_val: int, tmp_path: Path) -> None:
    opened = open_model(str(make_byte_run(tmp_path, n_val, arch)))
    tokens, losses = val_tokens(opened), []
    for start in range(0, n_val - 1, 16):
        window = tokens[start : start + 17]
        losses.append(F.cross_entropy(opened.model.logits(window[None, :-1])[0], window[1:], reduction="none"))
    expected = torch.cat(losses)
    assert len(expected) == n_val - 1
    assert opened.data is not None
    found = split_loss(opened, opened.data)
    assert found.tokens == n_val - 1
    assert found.loss == pytest.approx(float(expected.mean()), abs=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    n_bytes = int((tokens[1:] != 256).sum())
    assert found.bits_per_byte == pytest.approx(found.loss * (n_val - 1) / math.log(2) / n_bytes)


@pytest.mark.parametrize("stride", [1, 5, 15])
@pytest.mark.parametrize("n_val", [10, 17, 60])
def test_sliding_windows_give_each_token_the_context_they_promise(stride: int, n_val: int, tmp_path: Path) -> None:
    opened = open_model(str(make_byte_run(tmp_path, n_val)))
    tokens, total = val_tokens(opened), 0.0
    for place in range(1, n_val):
        # The window that first reaches this token: 16 long, its end 16, 16 + stride, 16 + 2 stride, ...
        end = min(n_val - 1, 16 + max(0, math.ceil((place - 16) / stride)) * stride)
        start = max(0, end - 16)
        log_p = opened.model.logits(tokens[None, start:place])[0, -1].log_softmax(0)
        total -= float(log_p[tokens[place]])
    assert opened.data is not None
    assert split_loss(opened, opened.data, stride=stride).loss == pytest.approx(total / (n_val - 1), abs=1e-5)


def test_a_stride_beyond_the_window_is_refused(tmp_path: Path) -> None:
    opened = open_model(str(make_byte_run(tmp_path, 50)))
    for stride in (0, 17):
        with pytest.raises(UsageError, match=f"--stride {stride}"):
            split_loss(opened, read_dataset(tmp_path / "data"), stride=stride)


@pytest.mark.parametrize("arch", ARCHES)
@torch.inference_mode()
def test_continuations_score_as_when_each_is_read_alone(arch: str) -> None:
    model = tiny_model(arch)
    context, endings = [1, 2, 3, 4, 5], [[6], [7, 8, 9, 10], [11, 12]]
    for ending, score in zip(endings, score_continuations(model, context, endings), strict=True):
        log_p = model.logits(torch.tensor([context + ending]))[0].log_softmax(1)
        places = range(len(context) - 1, len(context) + len(ending) - 1)
        assert score.log_p == pytest.approx(
            sum(float(log_p[i, t]) for i, t in zip(places, ending, strict=True)), abs=1e-4
        )
        assert score.n_tokens == len(ending)


def test_greedy_means_that_every_token_is_the_likeliest() -> None:
    model, text = tiny_model(), [1, 2, 3]
    for _ in range(3):
        text.append(int(model.logits(torch.tensor([text]))[0, -1].argmax()))
    scores = score_continuations(model, text[:3], [text[3:], [*text[3:5], (text[5] + 1) % 64]])
    assert [score.is_greedy for score in scores] == [True, False]


def test_a_context_too_long_for_the_window_loses_its_beginning() -> None:
    model = tiny_model()
    long, ending = list(range(40)), [50, 51, 52]
    assert score_continuations(model, long, [ending]) == score_continuations(model, long[-14:], [ending])
    alone = [score_continuations(model, long, [tokens])[0] for tokens in ([50], ending)]
    assert score_continuations(model, long, [[50], ending]) == alone


@torch.inference_mode()
def test_a_continuation_longer_than_the_window_is_scored_in_windows_side_by_side() -> None:
    model, text = tiny_model(), [(5 * i + 1) % 64 for i in range(41)]
    expected = 0.0
    for start in range(0, 40, 16):
        window = torch.tensor(text[start : start + 17])
        expected -= float(F.cross_entropy(model.logits(window[None, :-1])[0], window[1:], reduction="sum"))
    score = score_continuations(model, text[:1], [text[1:]])[0]
    assert score.log_p == pytest.approx(expected, abs=1e-3)
    assert score.n_tokens == 40


class NextLetter(LanguageModel):
    """After byte b comes b + 1, nearly always: a model whose opinion on any text is known."""

    def __init__(self, like: LanguageModel) -> None:
        super().__init__(like.shape)
        self.lm_head = torch.nn.Linear(257, 257, bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(torch.eye(257) * 9)

    def hidden(self, idx: torch.Tensor, cache: object = None) -> torch.Tensor:
        if cache is not None:
            for layer in cache.layers:  # type: ignore[attr-defined]
                layer.attend(*[torch.zeros(len(idx), 2, idx.shape[1], 16)] * 3)
        return F.one_hot((idx + 1) % 257, 257).float()


@pytest.fixture
def next_letter(tmp_path: Path) -> LoadedModel:
    opened = open_model(str(make_byte_run(tmp_path, 50)))
    return LoadedModel(
        opened.path, NextLetter(opened.model), opened.tokenizer, opened.checkpoint, opened.device, opened.data
    )


def write_questions(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_hellaswag_finds_the_known_answers(next_letter: LoadedModel, tmp_path: Path) -> None:
    # The ending follows after a space, so what counts is the order of letters inside it.
    rows = [
        {"ctx": "abc", "endings": ["zzzz", "abcd", "dcba", "aaaa"], "label": 1},
        {"ctx": "abc", "endings": ["mnop", "mmmm", "ponm", "xxxx"], "label": 0},
        {"ctx": "abc", "endings": ["mnop", "mmmm", "ponm", "xxxx"], "label": "2"},  # the model must get this wrong
        # A short wrong ending has the larger sum, the long right one the larger mean.
        {"ctx": "abc", "endings": ["ba", "abcdefgz"], "label": 1},
    ]
    items = read_items(write_questions(tmp_path / "h.jsonl", rows))
    found = hellaswag(next_letter, items)
    assert found.items == 4
    assert found.normalised == 3 / 4
    assert found.accuracy == 2 / 4


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"ctx": "a"}',
        '{"ctx": "a", "endings": ["b"], "label": 0}',
        '{"ctx": "a", "endings": ["b", "c"], "label": 2}',
        "",
    ],
)
def test_a_damaged_question_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "h.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DataError, match=r"h\.jsonl"):
        read_items(path)


def test_eval_prints_and_keeps_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_byte_run(tmp_path, 100)
    questions = write_questions(tmp_path / "h.jsonl", [{"ctx": "ab", "endings": ["c", "d"], "label": 0}] * 3)
    assert main(["eval", str(run), "--hellaswag", str(questions)]) == 0
    out = capsys.readouterr().out
    assert "all 99 tokens" in out
    assert "bits per byte" in out
    assert "known: acc 0.2859 GPT-2 124M" in out
    assert "known: acc_norm 0.2955 GPT-2 124M" in out
    kept = json.loads((tmp_path / "eval.json").read_text())["results"]
    assert f"val loss {kept['val_loss']['loss']:.4f}" in out
    assert main(["eval", str(run), "--split", "train", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["train_loss"]["tokens"] == 199
    assert set(json.loads((tmp_path / "eval.json").read_text())["results"]) == {"val_loss", "train_loss", "hellaswag"}


def test_results_that_the_disk_does_not_take_are_shown_and_said_to_be_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_byte_run(tmp_path, 100)
    (tmp_path / "eval.json").mkdir()
    for words in ([], ["--json"]):
        assert main(["eval", str(run), *words]) == 0
        said = capsys.readouterr()
        assert "loss" in said.out
        assert said.err.splitlines()[-1].startswith(f"not kept: {tmp_path / 'eval.json'}: ")


def test_earlier_results_that_cannot_be_read_are_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad moment of the disk must not cost what another evaluation found in hours; nor a model card its figures."""
    run = make_byte_run(tmp_path, 100)
    assert main(["eval", str(run)]) == 0
    before = (tmp_path / "eval.json").read_bytes()

    def refuse(path: Path, *_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr("gptfit.generate.eval_file.read_plain", refuse)
    assert main(["eval", str(run), "--split", "train"]) == 0
    assert "not kept: " in capsys.readouterr().err
    assert (tmp_path / "eval.json").read_bytes() == before
    with pytest.raises(OSError, match="Input/output error"):
        read_results(open_model(str(run)))


def test_the_known_loss_of_gpt2_on_openwebtext_is_shown() -> None:
    assert references("data/openwebtext", "loss")[0].value == 3.12
    assert references("data/my_own", "loss") == ()
    assert [row.value for row in references("fineweb10B", "loss")] == [3.28]
    assert references("fineweb-edu", "loss") == ()  # other text, whose losses are lower


def test_data_from_another_vocabulary_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_byte_run(tmp_path / "run", 100)
    np.full(100, 300, dtype=np.uint16).tofile(run / "data" / "val.bin")
    assert main(["eval", str(run)]) == 1
    err = capsys.readouterr().err.splitlines()[-1]
    assert "token id 300 at position 0 is beyond the vocabulary of 257" in err


def test_a_card_computes_it_with_all_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training lets a card round float32 products to TF32; the loss that `eval` promises as exact is not."""
    opened = open_model(str(make_byte_run(tmp_path, 40, "gpt2")))
    assert opened.data is not None
    rounded: list[bool] = []
    real = exact_loss._losses
    monkeypatch.setattr(
        exact_loss, "_losses", lambda *a: rounded.append(torch.backends.cuda.matmul.allow_tf32) or real(*a)
    )
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        split_loss(opened, opened.data)
        assert torch.backends.cuda.matmul.allow_tf32, "as it was, for what comes after"
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert rounded
    assert not any(rounded)
