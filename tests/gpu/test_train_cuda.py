"""The training loop on an NVIDIA card; skipped where there is none."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from gptfit.checkpoint.format import load_checkpoint
from gptfit.config.keys import TrainConfig
from gptfit.device.device import find_device
from gptfit.logs.events import Event
from gptfit.logs.runlog import read_run
from gptfit.model.head import token_loss
from gptfit.train.train import train
from tests.small_runs import told

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    folder = tmp_path / "data"
    folder.mkdir()
    ids = (np.arange(60_000) * 7 % 65).astype(np.uint16)
    ids[:50_000].tofile(folder / "train.bin")
    ids[50_000:].tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))
    return TrainConfig(
        dataset=str(folder),
        out_dir=str(tmp_path / "out"),
        n_layer=2,
        n_head=2,
        n_embd=128,
        block_size=64,
        batch_size=8,
        gradient_accumulation_steps=2,
        max_iters=20,
        lr_decay_iters=20,
        warmup_iters=2,
        eval_interval=10,
        eval_iters=2,
        device="cuda",
    )


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16"])
@pytest.mark.parametrize("compile_it", [False, True])
def test_it_learns_in_every_number_format(config: TrainConfig, dtype: str, compile_it: bool) -> None:
    train(config.replace(dtype=dtype, compile=compile_it))
    log = read_run(config.out_dir)
    assert log.evals[-1].val_loss < log.evals[0].val_loss - 0.5
    assert log.steps[-1].memory_gib > 0


def test_resume_continues_the_losses(config: TrainConfig, tmp_path: Path) -> None:
    whole = train(config.replace(out_dir=str(tmp_path / "whole"), dropout=0.1))
    train(config.replace(max_iters=10, dropout=0.1))
    parts = train(config.replace(init_from="resume", dropout=0.1))
    assert parts.val_loss == pytest.approx(whole.val_loss, rel=1e-3)
    assert load_checkpoint(tmp_path / "out").iter_num == 20


def test_a_real_out_of_memory_shrinks_the_micro_batch(config: TrainConfig) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, 3 * 2**30 / total))
    try:
        events: list[Event] = []
        large = config.replace(batch_size=512, block_size=64, vocab_size=50304, chunked_loss=False, compile=False)
        result = train(large.replace(max_iters=2), events.append)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert result.micro_batch < 512
    assert bool(told(events, "oom"))


def test_the_chunked_loss_equals_the_plain_one(config: TrainConfig) -> None:
    device = find_device(config)
    hidden = torch.randn(300, 64, device="cuda", requires_grad=True)
    weight = torch.randn(1000, 64, device="cuda", requires_grad=True)
    targets = torch.randint(1000, (300,), device="cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    results = []
    for chunk in (0, 128):
        hidden.grad = weight.grad = None
        loss = token_loss(hidden, weight, targets, chunk)
        loss.backward()
        results.append((loss.detach(), hidden.grad, weight.grad))
    for plain, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, plain, rtol=1e-4, atol=1e-5)
    assert device.kind == "cuda"
