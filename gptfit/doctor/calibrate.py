"""Calibrate, in the process that is timed: whole models, what compiling saves, and what blocks keep, as one record."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from gptfit.config.keys import TrainConfig
from gptfit.device.allocator import keep_freed_memory
from gptfit.device.compiler import find_compile_problem
from gptfit.device.device import find_device
from gptfit.doctor.fit_costs import Observed, fit_costs
from gptfit.doctor.kept_bytes import kept_bytes
from gptfit.doctor.whole_models import LEAST, Timed, saved_by_compiling, time_models
from gptfit.plan.calibration import Calibration
from gptfit.plan.step_work import joined, micro_work, update_work
from gptfit.shape import ModelShape
from gptfit.tune.trials import Timing

# Nearly no work: what such a process still holds is what every one holds.
TINY = ModelShape(n_layer=1, n_head=2, n_embd=128, block_size=64, vocab_size=256)
TINY_BATCH = 2


def measure_costs(
    config: TrainConfig, compiled: bool, most_s: float, tell: Callable[[str], None], least: int = LEAST
) -> Calibration:
    """Everything but the memory of a process, which `complete` adds; beyond `least` no model is timed after `most_s`."""
    began, device = time.monotonic(), find_device(config.replace(dtype="auto"))  # every format is timed
    compiled = compiled and find_compile_problem(device) is None  # which also finds the code that was compiled before
    if device.kind == "cpu":
        keep_freed_memory()
    saved = saved_by_compiling(device, tell) if compiled else {}
    models = time_models(device, began + most_s - time.monotonic(), tell, least)
    kept: dict[str, float] = {}
    for dtype in models:
        kept |= kept_bytes(replace(device, dtype=dtype), compiled and dtype == device.dtype)
    return Calibration(
        device=device.name,
        torch=torch.__version__,
        costs={dtype: micro_costs(dtype, timed) for dtype, timed in models.items()},
        update_costs={dtype: costs for dtype, timed in models.items() if (costs := costs_of_updates(dtype, timed))},
        saved_by_compiling=saved,
        kind=device.kind,
        dtype=device.dtype,
        saved_bytes=kept,
        total_bytes=float(device.total_memory_bytes()),
        time=time.time(),
    )


def micro_costs(dtype: str, timed: Sequence[Timed]) -> dict[str, float]:
    return fit_costs([Observed(joined(micro_work(each.model.setting(dtype))), each.micro_s) for each in timed])


def costs_of_updates(dtype: str, timed: Sequence[Timed]) -> dict[str, float]:
    """None where every update was skipped: a plan then does not know the format."""
    samples = [(update_work(each.model.setting(dtype)), each.update_s) for each in timed]
    found = [Observed(work, seconds) for work, seconds in samples if seconds is not None]
    return fit_costs(found) if found else {}


def tiny_config(config: TrainConfig, compiled: bool) -> TrainConfig:
    """A trial of next to nothing, in a fresh process."""
    return config.replace(
        n_layer=TINY.n_layer,
        n_head=TINY.n_head,
        n_embd=TINY.n_embd,
        block_size=TINY.block_size,
        vocab_size=TINY.vocab_size,
        batch_size=TINY_BATCH,
        gradient_accumulation_steps=2,
        tokens_per_step=0,
        arch="gpt2",
        optimizer="adamw",
        compile=compiled,
        chunked_loss=False,
        checkpoint_activations=False,
        dropout=0.0,
    )


def complete(found: Calibration, tiny: dict[bool, Timing]) -> Calibration:
    """With what tiny trials, by whether they were compiled, tell: the memory of a process."""
    context = {
        "compiled" if compiled else "eager": (timing.device_gib or 0.0) * 1024**3 for compiled, timing in tiny.items()
    }
    return replace(found, context_bytes=context)
