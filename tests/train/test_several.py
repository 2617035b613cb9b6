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
COMMON: dict[str, Any] = {
    "gradient_accumulation_steps": 4,
    "batch_size": 6,
    "max_iters": 4,
    "lr_decay_iters": 4,
    "eval_interval": 4,
    "eval_iters": 1,
}
MUON: dict[str, Any] = {"optimizer": "muon", "arch": "modern"}
FSDP: dict[str, Any] = {"parallel": "fsdp"}


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


def test_any_number_of_processes_any_shares_copies_and_parts_of_a_model_train_as_one_process(
    make: MakeConfig, tmp_path: Path
) -> None:
    """And a checkpoint of two resumes on one and on four: tokens per step and the order of the data go on."""
    half, fine = {"max_iters": 2}, {"gradient_accumulation_steps": 12, "batch_size": 2}
    runs = {
        1: [make("1"), make("muon-1", **MUON)],
        2: [
            *(make("2"), make("2-unequal", shares="5:1", **fine), make("2-fsdp", **FSDP)),
            *(make("muon-2", **MUON), make("muon-2-fsdp", **MUON, **FSDP)),
            *(make("2-to-1", **half), make("2-to-4", **FSDP, **half)),
        ],
        4: [
            *(make("4"), make("4-unequal", shares="1:2:2:1", **fine), make("4-fsdp", **FSDP)),
            *(make("muon-4", **MUON), make("muon-4-fsdp", **MUON, **FSDP), make("2-to-4", init_from="resume")),
        ],
    }  # fmt: skip
    for config in runs[1]:
        train(config)
    for count in (2, 4):
        train_together(count, *runs[count])
    train(make("2-to-1", init_from="resume"))
    for config in (*runs[2], *runs[4]):
        folder = Path(config.out_dir)
        assert_same_curve(tmp_path / ("muon-1" if config.optimizer == "muon" else "1"), folder)
        assert load_checkpoint(folder).progress["window"] == 4 * 24
    assert load_checkpoint(tmp_path / "2-unequal").progress["paces"] == [0.2, 1.0]
    assert_same_weights(tmp_path / "1", tmp_path / "4-unequal")
    assert_same_weights(tmp_path / "1", tmp_path / "2-fsdp")
    assert_same_weights(tmp_path / "muon-1", tmp_path / "muon-4-fsdp")


# The second run has the words of the first; only the second process knows that it was started again.
ONE_KNOWS = """
os.environ["TORCHELASTIC_RUN_ID"] = "one start"
alone = train
def train(config):
    alone(config)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ["RANK"]
"""


def test_processes_started_again_go_on_together_also_where_one_is_new_to_the_run(
    make: MakeConfig, tmp_path: Path
) -> None:
    """As after a machine was lost and another took its place, whose torchrun counts no restart."""
    train(make("whole"))
    train_together(2, make("again", max_iters=2), make("again"), before=ONE_KNOWS)
    assert_same_curve(tmp_path / "whole", tmp_path / "again")
    assert [step.step for step in read_run(tmp_path / "again").steps] == list(range(4))


# The first process cannot write its last checkpoint when it is due, and can when the run ends.
FAILS_ONCE = """
from gptfit.checkpoint.store import CheckpointStore
from gptfit.errors import RunError
save, failed = CheckpointStore.save_last, []
def save_or_fail(store, checkpoint, *rest):
    if checkpoint.iter_num == 4 and not failed:
        failed.append(True)
        raise RunError("the disk is full")
    save(store, checkpoint, *rest)
CheckpointStore.save_last = save_or_fail
"""


def test_a_save_that_failed_in_the_first_process_is_repeated_by_all(make: MakeConfig, tmp_path: Path) -> None:
    train_together(2, make("full"), before=FAILS_ONCE)
    assert load_checkpoint(tmp_path / "full").iter_num == 4
    assert [message.kind for message in read_run(tmp_path / "full").messages].count("checkpoint_failed") == 1


# The second process comes late to the checkpoint, when the first would have put another in its place. Each writes down
# which it began at and what it believes to be the best loss: evaluations are only the same where all agree on both.
IS_LATE = """
import time
from gptfit.train import train as module
read, begin = module.newest_readable, module._starting_point
def read_late(*arguments, **options):
    if os.environ["RANK"] == "1":
        time.sleep(1)
    return read(*arguments, **options)
def begin_and_tell(run):
    progress, notes = begin(run)
    (run.store.folder / f"began-{os.environ['RANK']}").write_text(f"{progress.step} {progress.best_val_loss}")
    return progress, notes
module.newest_readable, module._starting_point = read_late, begin_and_tell
"""


def test_processes_that_make_a_run_longer_begin_at_the_same_checkpoint(make: MakeConfig, tmp_path: Path) -> None:
    decay = {"schedule": "wsd", "decay_fraction": 0.5, "warmup_iters": 0, "eval_interval": 2}
    longer = {**decay, "max_iters": 8, "lr_decay_iters": 8}
    train_together(2, make("two", **decay), make("two", **longer, init_from="resume"), before=IS_LATE)
    began = [(tmp_path / "two" / f"began-{rank}").read_text() for rank in (0, 1)]
    assert began[0] == began[1]
    assert began[0].startswith("2 ")


# In the second process the named call of the engine asks for more memory than there is. Backward does so in its last
# layer, when some of DDP's buckets are on their way and others are not; or where FSDP would gather a block's weights.
RUN_OUT = """
import torch
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from gptfit.train import parallel
from gptfit.train.engine import Engine
from gptfit.train.sharded import _AllGather
parallel.DDP_OPTIONS["bucket_cap_mb"] = 0.02
calls, allocate = Counter(), _AllGather.allocate
def ask(*_, **__):
    torch.empty(2**60, dtype=torch.uint8)
def ask_in_backward(engine):
    if not engine.parallel.is_sharded:
        return next(engine.model.parameters()).register_hook(ask)
    _AllGather.allocate = ask
    return SimpleNamespace(remove=lambda: setattr(_AllGather, "allocate", allocate))
def spoil(method):
    real = getattr(Engine, method)
    def greedy(engine, *arguments, **options):
        _, wanted, call = Path(engine.config.out_dir).name.split("-")
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
# 2 micro-steps to meet, 2 per update: the 5th is the first of an update, the 6th its last, with the exchange.
RUNS_OUT = ("forward_micro_step-5", "backward_micro_step-5", "backward_micro_step-6", "_add_losses-3")
MEASURES = {
    "ddp": "out of memory: batch_size is now 3, gradient_accumulation_steps 8; still 384 tokens per step",
    "fsdp": "out of memory: from here on gradients are summed in every micro-step",
}


def test_memory_that_runs_out_in_one_of_two_processes_is_survived_by_both(make: MakeConfig, tmp_path: Path) -> None:
    train(make("whole"))
    names = [f"{how}-{where}" for how in MEASURES for where in RUNS_OUT]
    keys = {"chunked_loss": False, "max_iters": 3, "eval_interval": 2}
    train_together(2, *(make(name, parallel=name.partition("-")[0], **keys) for name in names), before=RUN_OUT)
    for name in names:
        told = [message.message for message in read_run(tmp_path / name).messages if message.kind == "oom"]
        assert told == [MEASURES[name.partition("-")[0]]]
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "whole")[:3], abs=1e-5), name


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
