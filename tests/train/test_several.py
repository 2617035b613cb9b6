"""Several processes train as one: the same losses, the same data, whatever their number and shares; faults are agreed on."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gptfit.checkpoint.format import load_checkpoint
from gptfit.config.keys import TrainConfig
from gptfit.logs.runlog import read_run
from gptfit.train.batches import EpochSampler
from gptfit.train.order import EpochOrder
from gptfit.train.setup import open_data
from gptfit.train.train import train
from tests.several import losses, train_together

MakeConfig = Callable[..., TrainConfig]
COMMON: dict[str, Any] = {"gradient_accumulation_steps": 12, "batch_size": 2, "max_iters": 5, "lr_decay_iters": 5}


@pytest.fixture
def make(small_config: MakeConfig, tmp_path: Path) -> MakeConfig:
    return lambda name, **changes: small_config(out_dir=str(tmp_path / name), **{**COMMON, **changes})


def assert_same_curve(folder: Path, *others: Path) -> None:
    one = losses(folder)
    for other in others:
        assert losses(other) == pytest.approx(one, abs=1e-5), other.name


def assert_same_weights(one: Path, other: Path, tolerance: float = 1e-4) -> None:
    for name, tensor in load_checkpoint(one).model.items():
        torch.testing.assert_close(load_checkpoint(other).model[name], tensor, rtol=tolerance, atol=tolerance)


def test_one_two_and_four_processes_and_any_shares_give_the_same_losses(make: MakeConfig, tmp_path: Path) -> None:
    muon = {"optimizer": "muon", "arch": "modern"}
    train(make("1"))
    train(make("muon-1", **muon))
    train_together(2, make("2"), make("2-unequal", shares="5:1"), make("muon-2", **muon))
    train_together(4, make("4"), make("4-unequal", shares="1:2:2:1"), make("muon-4", **muon))
    assert_same_curve(tmp_path / "1", *(tmp_path / name for name in ("2", "2-unequal", "4", "4-unequal")))
    assert_same_curve(tmp_path / "muon-1", tmp_path / "muon-2", tmp_path / "muon-4")
    assert load_checkpoint(tmp_path / "2-unequal").progress["paces"] == [0.2, 1.0]
    assert_same_weights(tmp_path / "1", tmp_path / "4-unequal")


def test_a_checkpoint_of_two_processes_resumes_on_one_and_on_four(make: MakeConfig, tmp_path: Path) -> None:
    """Tokens per step and the order of the data go on as if nothing had changed."""
    train(make("whole"))
    train_together(2, make("to-1", max_iters=2), make("to-4", max_iters=2))
    train(make("to-1", init_from="resume"))
    train_together(4, make("to-4", init_from="resume"))
    assert_same_curve(tmp_path / "whole", tmp_path / "to-1", tmp_path / "to-4")
    assert load_checkpoint(tmp_path / "to-4").progress["window"] == 5 * 24


# In the second process the named call of the engine asks for more memory than there is; backward does so in its last
# layer, when some of DDP's buckets are on their way and others are not.
RUN_OUT = """
import torch
from collections import Counter
from pathlib import Path
from gptfit.train import parallel
from gptfit.train.engine import Engine
parallel.DDP_OPTIONS["bucket_cap_mb"] = 0.02
calls = Counter()
def ask(*_, **__):
    torch.empty(2**60, dtype=torch.uint8)
def ask_in_backward(engine):
    return next(engine.model.parameters()).register_hook(ask)
def spoil(method):
    real = getattr(Engine, method)
    def greedy(engine, *arguments, **options):
        wanted, call = Path(engine.config.out_dir).name.split("-")
        calls[engine.config.out_dir, method] += 1
        is_now = wanted == method and calls[engine.config.out_dir, method] == int(call) and os.environ["RANK"] == "1"
        hook = ask_in_backward(engine) if is_now and method == "backward_micro_step" else None
        try:
            if is_now and method != "backward_micro_step":
                ask()
            return real(engine, *arguments, **options)
        finally:
            if hook:
                hook.remove()
    setattr(Engine, method, greedy)
for name in ("forward_micro_step", "backward_micro_step", "_add_losses"):
    spoil(name)
"""


def test_memory_that_runs_out_in_one_of_two_processes_is_survived_by_both(make: MakeConfig, tmp_path: Path) -> None:
    """2 micro-steps to meet, 6 per update: the 9th is the first of an update, the 14th its last, with the exchange."""
    cases = ("forward_micro_step-9", "backward_micro_step-10", "backward_micro_step-14", "_add_losses-3")
    train(make("whole"))
    train_together(2, *(make(name, chunked_loss=False, log_interval=1) for name in cases), before=RUN_OUT)
    for name in cases:
        told = [message.message for message in read_run(tmp_path / name).messages if message.kind == "oom"]
        assert told == ["out of memory: batch_size is now 1, gradient_accumulation_steps 24; still 384 tokens per step"]
    assert_same_curve(tmp_path / "whole", *(tmp_path / name for name in cases))


def test_many_shards_are_read_once_per_epoch_by_all_processes_together(token_folder: Path, tmp_path: Path) -> None:
    """Every window of every shard once, over an epoch's end and at shares that are not equal."""
    folder = tmp_path / "shards"
    folder.mkdir()
    tokens = np.fromfile(token_folder / "train.bin", dtype=np.uint16)
    splits = {"train": np.array_split(tokens, 50), "val": [tokens[:500]]}
    entries = {}
    for name, parts in splits.items():
        files = [f"{name}-{i:05d}.bin" for i in range(len(parts))]
        for file, part in zip(files, parts, strict=True):
            part.tofile(folder / file)
        entries[name] = {"tokens": sum(map(len, parts)), "documents": 1, "bytes": 0, "files": files}
    tokenizer = {"name": "bytes", "sha256": None, "vocab_size": 65, "end_of_text": None, "file": None}
    manifest = {"format": "gptfit-dataset", "version": 1, "tokenizer": tokenizer, "dtype": "uint16", "splits": entries}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    config = TrainConfig(dataset=str(folder), block_size=16, batch_size=2, gradient_accumulation_steps=12)
    data = open_data(config)
    train_file = data.files["train"]
    assert len(train_file.files) == 50
    order = EpochOrder(train_file.n_tokens, 16, config.seed)
    seen: list[int] = []

    def before(shares: list[int], rank: int, step: int) -> int:
        return 2 * sum(shares[:rank])

    for step in range(-(-2 * order.windows // 24)):
        for shares in ([12], [6, 6], [10, 2], [2, 4, 4, 2]):
            read = [
                EpochSampler(order, lambda n: 24 * n, partial(before, shares, rank)).starts(step, 0, 2 * share)
                for rank, share in enumerate(shares)
            ]
            together = np.concatenate(read)
            assert together.tolist() == order.starts(24 * step, 24).tolist()
        seen += together.tolist()
    for epoch in range(2):
        windows = sorted(seen[epoch * order.windows : (epoch + 1) * order.windows])
        assert np.diff(windows).tolist() == [16] * (order.windows - 1)
    rows = train_file.windows(np.array(seen[: order.windows], dtype=np.int64), 16)
    assert sorted(rows.ravel().tolist()) == sorted(tokens[: order.windows * 16].tolist())
