"""Putting a checkpoint back: weights, optimizer, scaler, random streams and the position in the data."""

from __future__ import annotations

import copy
from typing import Any

from gptfit.errors import RunError
from gptfit.run.batches import EpochSampler, Sampler
from gptfit.run.checkpoint import Checkpoint, load_weights
from gptfit.run.engine import Engine
from gptfit.run.progress import Progress, StepStart
from gptfit.run.randomness import seed_step, set_rng_state


def restore_from(checkpoint: Checkpoint, engine: Engine) -> Progress:
    """The engine as it was at the checkpoint, and how far the run was then."""
    load_weights(engine.model, checkpoint)
    if checkpoint.optimizer is not None:
        _load_optimizer(checkpoint, engine)
    saved = checkpoint.progress
    if engine.scaler.is_enabled() and saved.get("scaler"):
        engine.scaler.load_state_dict(saved["scaler"])
    progress = Progress.from_saved(saved)
    progress.step, progress.best_val_loss = checkpoint.iter_num, checkpoint.best_val_loss
    if not saved:
        progress.tokens = checkpoint.iter_num * engine.config.tokens_per_iter(engine.processes.count)
    return progress


def resume_position(checkpoint: Checkpoint, engine: Engine, sampler: Sampler) -> None:
    """Go on in the data where the checkpoint stood; a changed step size moves nothing already seen."""
    rank, saved = engine.processes.rank, checkpoint.progress
    if isinstance(sampler, EpochSampler):
        sampler.base_step = checkpoint.iter_num
        sampler.base_window = saved["window"] if saved else checkpoint.iter_num * sampler.per_step
        return
    starts: list[dict[str, Any]] = saved.get("starts", [])
    if rank < len(starts):
        set_rng_state(starts[rank]["rng"], engine.device)
        sampler.restore(starts[rank]["drawn"])
    else:
        # nanoGPT saves no random state; a stream of its own at least does not replay the data from the start.
        seed_step(engine.config.seed, checkpoint.iter_num, rank)


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
    if [len(g["params"]) for g in saved["param_groups"]] != [len(g["params"]) for g in groups]:
        raise RunError(
            f"{checkpoint.path}: its optimizer state is not that of {engine.config.optimizer} for this model"
        )
    saved["param_groups"] = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": old["params"]}
        for group, old in zip(groups, saved["param_groups"], strict=True)
    ]
    engine.optimizer.load_state_dict(saved)
