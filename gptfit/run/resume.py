"""What may change when a run is resumed: frozen keys refuse, re-plannable ones are listed, the rest are free."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

from gptfit.config import DEFAULTS, TrainConfig
from gptfit.errors import ConfigError
from gptfit.run.checkpoint import Checkpoint, newest_readable
from gptfit.shape import INGREDIENTS, ModelShape

# The tensors in the file have these shapes and these optimizer states; nothing can be continued with others.
FROZEN = ("arch", "n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "optimizer", *INGREDIENTS)
# How the run is watched and where it computes; changing them changes no number that matters.
FREE = (
    "out_dir",
    "eval_interval",
    "log_interval",
    "eval_iters",
    "eval_only",
    "always_save_checkpoint",
    "init_from",
    "wandb_log",
    "wandb_project",
    "wandb_run_name",
    "backend",
    "device",
    "dtype",
    "compile",
    "chunked_loss",
    "checkpoint_activations",
    "data_root",
    "max_hours",
    "early_stop_evals",
    "keep_checkpoints",
    "track",
    "gpu",
    "vocab_size",
)
# Never taken over from the checkpoint: they say what this start is to do.
OF_THIS_START = ("out_dir", "init_from", "eval_only")


def adopt_config(config: TrainConfig, given: Collection[str]) -> TrainConfig:
    """The run's own config with the keys `given` now on top, so that `--init_from=resume --out_dir=X` is enough."""
    checkpoint, _ = newest_readable(Path(config.out_dir), lazy=True)
    old = {**checkpoint.config, **_model_args(checkpoint)}
    kept = {key: old[key] for key in DEFAULTS if key in old and key not in given and key not in OF_THIS_START}
    return dataclasses.replace(config, **kept)


def check_resume(checkpoint: Checkpoint, config: TrainConfig, shape: ModelShape) -> list[str]:
    """Lines `key: old -> new` for every re-plannable key that changed; a frozen one that changed is an error."""
    old, new = {**checkpoint.config, **_model_args(checkpoint)}, {**config.as_dict(), "vocab_size": shape.vocab_size}
    for key in FROZEN:
        if key in old and old[key] != new[key]:
            raise ConfigError(
                f"{key} is {new[key]!r} but the checkpoint {checkpoint.path} has {old[key]!r}, and cannot change; "
                f"use --{key}={old[key]} or another --out_dir",
                key=key,
            )
    changed = [key for key in new if key in old and key not in FREE and old[key] != new[key]]
    return [f"{key}: {old[key]} -> {new[key]}" for key in changed]


def _model_args(checkpoint: Checkpoint) -> dict[str, Any]:
    args = {key: value for key, value in checkpoint.model_args.items() if key != "dropout"}
    return {**args, "arch": checkpoint.arch}
