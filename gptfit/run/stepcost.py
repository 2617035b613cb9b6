"""StepCost: what a micro-step, an update and an eval really take at one micro-batch, measured on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gptfit.config import TrainConfig
from gptfit.run.batches import Batch
from gptfit.run.device import Device
from gptfit.run.engine import Engine, build_engine
from gptfit.shape import ModelShape


@dataclass(frozen=True)
class StepCost:
    """Seconds are medians after a warm-up and after synchronising; compilation is told apart."""

    micro_batch: int
    tokens: int  # of one micro-step
    compile_seconds: float
    micro_step_seconds: float
    update_seconds: float
    eval_seconds: float  # forward only
    peak_bytes: int

    def step_seconds(self, micro_steps: int) -> float:
        return micro_steps * self.micro_step_seconds + self.update_seconds

    def tokens_per_s(self, micro_steps: int = 1) -> float:
        return micro_steps * self.tokens / self.step_seconds(micro_steps)


def measure_step_cost(
    config: TrainConfig, shape: ModelShape, device: Device, micro_batch: int, repeats: int = 5
) -> StepCost:
    """Builds the model of the config and really trains it a little on random tokens.

    Running out of memory comes out as the device's own error; `is_out_of_memory` knows it.
    """
    engine = build_engine(config.replace(batch_size=micro_batch, tokens_per_step=0), shape, device)
    ids = torch.randint(shape.vocab_size, (micro_batch, shape.block_size + 1), device=device.torch_device)
    batch = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    device.reset_peak_memory()
    first = _seconds(device, lambda: _whole_step(engine, batch))
    warm = _seconds(device, lambda: _whole_step(engine, batch))
    micro = [_seconds(device, lambda: _micro_step(engine, batch)) for _ in range(repeats)]
    # The last of these micro-steps left its gradients for the first update; each later update gets its own.
    updates = []
    for _ in range(repeats):
        updates.append(_seconds(device, lambda: _update(engine)))
        _micro_step(engine, batch)
    engine.forget_gradients()
    engine.mean_loss([batch])
    evals = [_seconds(device, lambda: engine.mean_loss([batch])) for _ in range(repeats)]
    return StepCost(
        micro_batch=micro_batch,
        tokens=batch[0].numel(),
        compile_seconds=max(0.0, first - warm),
        micro_step_seconds=statistics.median(micro),
        update_seconds=statistics.median(updates),
        eval_seconds=statistics.median(evals),
        peak_bytes=device.peak_memory_bytes(),
    )


def _whole_step(engine: Engine, batch: Batch) -> None:
    _micro_step(engine, batch)
    _update(engine)


def _micro_step(engine: Engine, batch: Batch) -> None:
    engine.backward_micro_step(engine.forward_micro_step(batch, is_last=True), 1)


def _update(engine: Engine) -> None:
    engine.update(torch.zeros((), device=engine.device.torch_device), 1, engine.config.learning_rate)


def _seconds(device: Device, action: Callable[[], object]) -> float:
    device.synchronize()
    began = time.perf_counter()
    action()
    device.synchronize()
    return time.perf_counter() - began
