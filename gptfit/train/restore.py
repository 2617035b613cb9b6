"""Putting a checkpoint back: weights, optimizer, scaler, random streams and the position in the data."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gptfit.checkpoint.format import Checkpoint, load_weights
from gptfit.errors import RunError
from gptfit.files import reason_of
from gptfit.train.batches import EpochSampler, Sampler
from gptfit.train.engine import Engine
from gptfit.train.parts import whole_shape
from gptfit.train.progress import Progress, StepStart
from gptfit.train.randomness import seed_step, set_rng_state

NUMBERS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def restore_from(checkpoint: Checkpoint, engine: Engine) -> Progress:
    """The engine as it was at the checkpoint, and how far the run was then."""
    load_weights(engine.model, checkpoint)
    if checkpoint.optimizer is not None:
        _load_optimizer(checkpoint, engine)
    _check_average(checkpoint, engine)
    engine.tail.restore(checkpoint.average, checkpoint.averaged)
    saved = checkpoint.progress
    if engine.scaler.is_enabled() and saved.get("scaler"):
        try:
            engine.scaler.load_state_dict(saved["scaler"])
        except (RuntimeError, KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"{checkpoint.path}: its scaler is damaged ({reason_of(error)})", fix="use another one"
            ) from None
    progress = Progress.from_saved(saved)
    progress.step, progress.best_val_loss = checkpoint.iter_num, checkpoint.best_val_loss
    if not saved:
        windows = engine.config.windows_until(checkpoint.iter_num, engine.processes.count)
        progress.tokens = windows * engine.config.block_size
    return progress


def resume_position(checkpoint: Checkpoint, engine: Engine, sampler: Sampler) -> None:
    """Go on in the data where the checkpoint stood; a changed step size moves nothing already seen."""
    rank, saved = engine.processes.rank, checkpoint.progress
    if isinstance(sampler, EpochSampler):
        sampler.base_step = checkpoint.iter_num
        sampler.base_window = saved["window"] if "window" in saved else sampler.until(checkpoint.iter_num)
        return
    starts: list[dict[str, Any]] = saved.get("starts", [])
    if rank < len(starts):
        try:
            set_rng_state(starts[rank]["rng"], engine.device)
        except (RuntimeError, KeyError) as error:
            raise RunError(
                f"{checkpoint.path}: its random state is damaged ({reason_of(error)})", fix="use another one"
            ) from None
        sampler.restore(starts[rank]["drawn"])
    else:
        # nanoGPT saves no random state; a stream of its own at least does not replay the data from the start.
        seed_step(engine.config.seed, checkpoint.iter_num, rank, engine.device)


def saved_progress(progress: Progress, start: StepStart, engine: Engine, sampler: Sampler) -> dict[str, Any]:
    """What `restore_from` and `resume_position` need. Only the random sampler depends on saved streams."""
    saved = progress.as_saved()
    if engine.scaler.is_enabled():
        saved["scaler"] = engine.scaler.state_dict()
    if not isinstance(sampler, EpochSampler):
        saved["starts"] = engine.processes.gather({"rng": start.rng, "drawn": start.drawn})
    return saved


def _load_optimizer(checkpoint: Checkpoint, engine: Engine) -> None:
    """The state from the file, the settings (rate, decay, fused) from the config, which may have changed."""
    assert checkpoint.optimizer is not None
    saved = copy.copy(checkpoint.optimizer)
    groups = engine.optimizer.param_groups
    numbers = itertools.count()  # torch numbers them in the order of the groups
    if [g["params"] for g in saved.get("param_groups", [])] != [[next(numbers) for _ in g["params"]] for g in groups]:
        raise RunError(
            f"{checkpoint.path}: its optimizer state is not that of {engine.config.optimizer} for this model"
        )
    _check_state(checkpoint, engine)
    saved["param_groups"] = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": old["params"]}
        for group, old in zip(groups, saved["param_groups"], strict=True)
    ]
    engine.load_optimizer(saved)


def _check_state(checkpoint: Checkpoint, engine: Engine) -> None:
    """Every tensor of the state has the shape of its parameter; torch would take any, and crash in the first step."""
    assert checkpoint.optimizer is not None
    state = checkpoint.optimizer["state"]
    members = [(group, parameter) for group in engine.optimizer.param_groups for parameter in group["params"]]
    for place, entry in state.items():
        group, parameter = members[place] if place < len(members) else ({}, None)
        wrong = "a state" if parameter is None else _wrong_entry(entry, parameter, _needed(group, checkpoint))
        if wrong:
            raise RunError(
                f"{checkpoint.path}: its optimizer state is damaged ({wrong} of parameter {place})",
                fix="use another one",
            )


def _needed(group: Mapping[str, Any], checkpoint: Checkpoint) -> tuple[str, ...]:
    """What is kept of each parameter of a group. Of a run that did not even its rows yet, no squares of rows."""
    if "parts" not in group:
        return "step", "exp_avg", "exp_avg_sq"
    is_even = group["is_normalized"] and checkpoint.config.get("normuon")
    return ("momentum_buffer", "row_squares") if is_even else ("momentum_buffer",)


def _wrong_entry(entry: Mapping[str, Any], parameter: Tensor, needed: tuple[str, ...]) -> str | None:
    if entry and (missing := [name for name in needed if not isinstance(entry.get(name), Tensor)]):
        return f"no {missing[0]}"
    for name, value in entry.items():
        shape = whole_shape(parameter)
        shape = torch.Size((*shape[:1], 1)) if name == "row_squares" else shape
        if not isinstance(value, Tensor) or value.dtype not in NUMBERS:
            return f"{name}, which is no tensor of numbers"
        if not (value.numel() == 1 and bool(value >= 0) if name == "step" else value.shape == shape):
            return f"{name} of shape {tuple(value.shape)}"
    return None


def _check_average(checkpoint: Checkpoint, engine: Engine) -> None:
    """Of every weight or of none; one with two places has one name."""
    if checkpoint.average and (odd := checkpoint.average.keys() ^ engine.parallel.parameters.keys()):
        raise RunError(
            f"{checkpoint.path}: its average is not that of this model ({min(odd)[:80]})", fix="use another one"
        )
