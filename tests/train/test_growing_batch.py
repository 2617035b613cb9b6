"""A batch that grows: which updates read how much, each window once, exact on resume, and what is refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from gptfit.checkpoint.format import load_checkpoint
from gptfit.config.keys import TrainConfig, find_problems
from gptfit.gpus import find
from gptfit.logs.events import Event, Step
from gptfit.logs.runlog import read_run
from gptfit.plan.plan import plan
from gptfit.schedule import batch_part, batches_until
from gptfit.train.batches import EpochSampler
from gptfit.train.order import EpochOrder
from gptfit.train.train import train
from tests.train.test_faults import fail_in

GROWING = {"gradient_accumulation_steps": 4, "grow_batch_iters": 5}


def test_a_quarter_then_half_then_all() -> None:
    assert [batch_part(5, step) for step in range(7)] == [4, 4, 4, 2, 2, 1, 1]
    assert [batch_part(0, step) for step in range(3)] == [1, 1, 1]
    for grow in (0, 1, 2, 5, 8):
        parts = [1 / batch_part(grow, step) for step in range(12)]
        assert [batches_until(grow, step) for step in range(13)] == pytest.approx(np.cumsum([0, *parts]).tolist())


@pytest.mark.parametrize("processes", [1, 2])
def test_every_window_is_read_once_and_in_order_of_the_steps(processes: int) -> None:
    config = TrainConfig(batch_size=2, gradient_accumulation_steps=8, grow_batch_iters=4)
    order = EpochOrder(100_000, 16, seed=5)
    read: list[int] = []
    for step in range(8):
        share = config.batch_size * config.micro_steps(step, processes)
        for rank in range(processes):
            sampler = EpochSampler(
                order, lambda s: config.windows_until(s, processes), lambda s, before=rank * share: before
            )
            read += sampler.starts(step, 0, share).tolist()
    assert read == order.starts(0, len(read)).tolist()
    assert len(read) == config.windows_until(8, processes) == 2 * (2 * 2 + 2 * 4 + 4 * 8)


@pytest.mark.parametrize("stop_at", [1, 3, 6])
def test_a_run_stopped_while_its_batch_grows_ends_with_the_same_weights(
    stop_at: int, small_config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(small_config(out_dir=str(whole), dropout=0.1, **GROWING))

    def interrupt(event: Event) -> None:
        if isinstance(event, Step) and event.step == stop_at:
            os.kill(os.getpid(), signal.SIGINT)

    train(small_config(out_dir=str(parts), dropout=0.1, **GROWING), interrupt)
    train(small_config(out_dir=str(parts), dropout=0.1, init_from="resume", **GROWING))
    a, b = load_checkpoint(whole), load_checkpoint(parts)
    assert all(torch.equal(tensor, b.model[name]) for name, tensor in a.model.items())
    window = 4 * 16  # batch_size * block_size
    tokens = [event.tokens for event in read_run(whole / "run.jsonl").steps]
    assert tokens == [window * n for n in (1, 2, 3, 5, 7, 11, 15, 19)]


def test_memory_that_runs_out_while_the_batch_grows_changes_no_update(
    small_config: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(small_config(out_dir=str(tmp_path / "whole"), **GROWING))
    fail_in(monkeypatch, "forward_micro_step", largest=2)
    assert train(small_config(out_dir=str(tmp_path / "shrunk"), **GROWING)).micro_batch == 2
    whole, shrunk = (load_checkpoint(tmp_path / name) for name in ("whole", "shrunk"))
    assert shrunk.progress["window"] == whole.progress["window"]
    for name, tensor in whole.model.items():
        torch.testing.assert_close(shrunk.model[name], tensor, rtol=1e-3, atol=1e-4)


def test_a_batch_that_cannot_be_quartered_is_refused() -> None:
    values = TrainConfig(gradient_accumulation_steps=40).as_dict()
    assert not find_problems(values | {"grow_batch_iters": 10})
    for wrong in ({"gradient_accumulation_steps": 6}, {"tokens_per_step": 12 * 1024 * 2}):
        problem = find_problems(values | {"grow_batch_iters": 10} | wrong)[0]
        assert problem.where == "grow_batch_iters"
        assert "more gradient_accumulation_steps" in problem.fix


def test_the_plan_counts_what_is_read() -> None:
    config = TrainConfig(max_iters=1000, lr_decay_iters=1000, warmup_iters=0, gradient_accumulation_steps=8)
    gpu = find("RTX 4070")
    steady, growing = (plan(c, c.shape(), gpu) for c in (config, config.replace(grow_batch_iters=400)))
    assert growing.tokens == 0.75 * steady.tokens  # 200 quarters, 200 halves, 600 whole ones
    assert growing.seconds is not None
    assert steady.seconds is not None
    assert growing.seconds.value < 0.8 * steady.seconds.value
