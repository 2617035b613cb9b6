"""Training on a mask: the loss is over what counts, whatever the micro-batch; resumed, it ends the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from gptfit.checkpoint.format import load_checkpoint
from gptfit.checkpoint.loaded_model import open_model
from gptfit.cli import main
from gptfit.config.keys import TrainConfig
from gptfit.data.options import PrepareOptions
from gptfit.data.prepare import prepare
from gptfit.data.token_files import open_split
from gptfit.dataset import read_dataset
from gptfit.logs.events import Eval, Event, Step
from gptfit.logs.runlog import read_run
from gptfit.model.build import build_model
from gptfit.model.head import UNCOUNTED, token_loss
from gptfit.train.documents import ShuffledDocuments
from gptfit.train.order import EpochOrder
from gptfit.train.train import train
from tests.several import losses, train_together
from tests.small_runs import told

MakeConfig = Callable[..., TrainConfig]


def write_chat(path: Path, count: int = 80) -> Path:
    """Answers of very different lengths, so that micro-batches differ in what counts."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"question {i}"},
                {"role": "assistant", "content": "a" * (1 + 5 * i % 40)},
            ]
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def chat_config(tmp_path: Path, small_config: MakeConfig) -> MakeConfig:
    source = write_chat(tmp_path / "chat.jsonl")
    prepare(PrepareOptions((str(source),), tmp_path / "chat", tokenizer="bytes", val_fraction=0.2, chat=True))
    return lambda **changes: small_config(dataset=str(tmp_path / "chat"), **changes)


def weights(config: TrainConfig) -> dict[str, torch.Tensor]:
    return load_checkpoint(Path(config.out_dir) / "ckpt.pt").model


@pytest.mark.parametrize("chunk_tokens", [0, 5, 64])
@pytest.mark.parametrize("cap", [0.0, 4.0])
def test_targets_that_do_not_count_have_neither_loss_nor_gradient(chunk_tokens: int, cap: float) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(12, 8, requires_grad=True)
    weight = torch.randn(20, 8, requires_grad=True)
    targets = torch.randint(20, (12,))
    targets[[0, 3, 4, 11]] = UNCOUNTED
    loss = token_loss(hidden, weight, targets, chunk_tokens, cap, masked=True)
    loss.backward()
    counted = targets != UNCOUNTED
    h, w = hidden.detach()[counted].requires_grad_(), weight.detach().clone().requires_grad_()
    expected = token_loss(h, w, targets[counted], 0, cap) * 8 / 12
    expected.backward()
    torch.testing.assert_close(loss, expected)
    found, wanted = [t.grad for t in (hidden, weight)], [t.grad for t in (h, w)]
    assert found[0] is not None
    torch.testing.assert_close(found[0][counted], wanted[0])
    assert not found[0][~counted].any()
    torch.testing.assert_close(found[1], wanted[1])


@pytest.mark.parametrize("keys", [{}, {"arch": "modern", "optimizer": "muon"}, {"chunked_loss": True}], ids=str)
def test_the_micro_batch_changes_nothing(chat_config: MakeConfig, tmp_path: Path, keys: dict[str, Any]) -> None:
    losses, ends = [], []
    for batch_size, micro_steps in ((8, 1), (2, 4), (1, 8)):
        config = chat_config(
            out_dir=str(tmp_path / f"b{batch_size}"),
            batch_size=batch_size,
            gradient_accumulation_steps=micro_steps,
            **keys,
        )
        train(config)
        losses.append([step.loss for step in read_run(config.out_dir).steps])
        ends.append(weights(config))
    for other in (1, 2):
        torch.testing.assert_close(torch.tensor(losses[other]), torch.tensor(losses[0]), rtol=1e-5, atol=1e-6)
        for name in ends[0]:
            torch.testing.assert_close(ends[other][name], ends[0][name], rtol=1e-3, atol=1e-4)


def test_the_loss_is_the_mean_over_what_counts(chat_config: MakeConfig) -> None:
    """The first step's, by hand, from the windows it reads."""
    config = chat_config(max_iters=1)
    events: list[Event] = []
    train(config, events.append)
    shape = config.shape(257)
    torch.manual_seed(config.seed)
    model = build_model(shape, 0.0)
    file = open_split(read_dataset(config.dataset), "train", shape.block_size, 257)
    starts = EpochOrder(file.n_tokens, shape.block_size, config.seed).starts(0, 8)
    rows, counts = file.marked_windows(starts, shape.block_size + 1)
    assert counts is not None
    tokens, chosen = torch.from_numpy(rows), torch.from_numpy(counts)[:, 1:]
    assert 0 < int(chosen.sum()) < chosen.numel()
    expected = F.cross_entropy(model.logits(tokens[:, :-1])[chosen], tokens[:, 1:][chosen])
    (step,) = [event for event in events if isinstance(event, Step)]
    assert step.loss == pytest.approx(expected.item(), rel=1e-5)


def test_a_resumed_run_ends_with_the_same_weights(chat_config: MakeConfig, tmp_path: Path) -> None:
    whole = chat_config(out_dir=str(tmp_path / "whole"))
    train(whole)
    half = chat_config(out_dir=str(tmp_path / "half"), max_iters=4)
    train(half)
    train(chat_config(out_dir=str(tmp_path / "half"), init_from="resume"))
    assert all(torch.equal(tensor, weights(half)[name]) for name, tensor in weights(whole).items())


def test_two_processes_count_what_one_counts(chat_config: MakeConfig, tmp_path: Path) -> None:
    """Each has other windows with other numbers of tokens that count; the mean is over all of them."""
    keys: dict[str, Any] = {"batch_size": 1, "gradient_accumulation_steps": 4, "max_iters": 4, "lr_decay_iters": 4}
    runs = {name: chat_config(out_dir=str(tmp_path / name), **keys) for name in ("one", "two")}
    unequal = chat_config(out_dir=str(tmp_path / "unequal"), shares="3:1", **keys)
    train(runs["one"])
    train_together(2, runs["two"], unequal)
    alone = read_run(runs["one"].out_dir)
    for config in (runs["two"], unequal):
        assert losses(Path(config.out_dir)) == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
        evals = read_run(config.out_dir).evals
        assert [e.val_loss for e in evals] == pytest.approx([e.val_loss for e in alone.evals], abs=1e-5)
        assert [e.eval_tokens for e in evals] == [e.eval_tokens for e in alone.evals]
        for name, tensor in weights(runs["one"]).items():
            torch.testing.assert_close(weights(config)[name], tensor, rtol=1e-3, atol=1e-4)


def test_an_update_in_which_nothing_counts_leaves_the_weights_alone(tmp_path: Path, small_config: MakeConfig) -> None:
    rows = [{"messages": [{"role": "user", "content": "x" * 400}, {"role": "assistant", "content": "y"}]}] * 12
    source = tmp_path / "long.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare(PrepareOptions((str(source),), tmp_path / "chat", tokenizer="bytes", val_fraction=0.2, chat=True))
    config = small_config(dataset=str(tmp_path / "chat"), batch_size=1, gradient_accumulation_steps=1, max_iters=12)
    events: list[Event] = []
    result = train(config, events.append)
    steps = [event.step for event in events if isinstance(event, Step)]
    assert result.reason == "max_iters"
    assert len(steps) < 12
    assert told(events, "nonfinite") == []
    assert told(events, "rollback") == []


def test_eval_counts_the_same_tokens_as_training(chat_config: MakeConfig, capsys: pytest.CaptureFixture[str]) -> None:
    config = chat_config(eval_iters=1000, max_iters=4)
    events: list[Event] = []
    train(config, events.append)
    last = [event for event in events if isinstance(event, Eval)][-1]
    assert main(["eval", config.out_dir, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["val_loss"]
    info = read_dataset(config.dataset)
    assert info.val is not None
    assert found["tokens"] == info.val.counted
    # Training leaves out what does not fill a window; the rest is the same.
    assert last.val_loss is not None
    assert found["loss"] == pytest.approx(last.val_loss, abs=0.05)
    assert last.eval_tokens is not None
    assert info.val.counted is not None
    assert 0 <= info.val.counted - last.eval_tokens <= config.block_size


def test_documents_are_shuffled_as_whole_conversations(chat_config: MakeConfig) -> None:
    info = read_dataset(chat_config().dataset)
    assert info.train is not None
    file = ShuffledDocuments(info.train, info.dtype, 257, 256, seed=1)
    assert file.n_documents == info.train.documents
    train(chat_config(shuffle_documents=True))


def test_plan_compare_sample_and_the_page_take_such_a_run(
    chat_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, every in ((1, 8), (2, 0)):
        train(chat_config(seed=seed, out_dir=str(tmp_path / f"run{seed}"), sample_interval=every))
    runs = [str(tmp_path / f"run{seed}") for seed in (1, 2)]
    assert main(["plan", f"--dataset={chat_config().dataset}", "--gpu", "4070"]) == 0
    assert "assistant" in capsys.readouterr().out
    assert main(["compare", *runs, "--html", str(tmp_path / "page.html")]) == 0
    assert main(["runs", str(tmp_path)]) == 0
    assert main(["sample", runs[0], "--tokens", "5"]) == 0
    assert open_model(runs[0]).data is not None
    samples = read_run(runs[0]).samples
    assert [sample for sample in samples if sample.prompt][-1].prompt.endswith("Assistant:")
