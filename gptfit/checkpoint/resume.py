"""What may change when a run is resumed, as keys.py says: frozen keys refuse, re-plannable ones are listed."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

from gptfit.checkpoint.format import Checkpoint, newest_readable
from gptfit.config.keys import KEYS, TrainConfig
from gptfit.errors import ConfigError
from gptfit.shape import ModelShape


def adopt_config(config: TrainConfig, given: Collection[str]) -> TrainConfig:
    """The run's own config with the keys `given` now on top, so that `--init_from=resume --out_dir=X` is enough."""
    checkpoint, _ = newest_readable(Path(config.out_dir), lazy=True)
    old = {**checkpoint.config, **_model_args(checkpoint)}
    kept = {
        key: old[key] for key, known in KEYS.items() if key in old and key not in given and known.on_resume != "anew"
    }
    return dataclasses.replace(config, **kept)


def check_resume(checkpoint: Checkpoint, config: TrainConfig, shape: ModelShape) -> list[str]:
    """Lines `key: old -> new` for every re-plannable key that changed; a frozen one that changed is an error."""
    old, new = {**checkpoint.config, **_model_args(checkpoint)}, {**config.as_dict(), "vocab_size": shape.vocab_size}
    for key, known in KEYS.items():
        if known.on_resume == "frozen" and key in old and old[key] != new[key]:
            raise ConfigError(
                f"{key} is {new[key]!r} but the checkpoint {checkpoint.path} has {old[key]!r}, and cannot change",
                fix=f"use --{key}={old[key]} or another --out_dir",
                key=key,
            )
    replanned = [key for key, known in KEYS.items() if known.on_resume == "replan" and key in old]
    changed = [key for key in replanned if old[key] != new[key]]
    return [f"{key}: {old[key]} -> {new[key]}" for key in changed]


def _model_args(checkpoint: Checkpoint) -> dict[str, Any]:
    args = {key: value for key, value in checkpoint.model_args.items() if key != "dropout"}
    return {**args, "arch": checkpoint.arch}
