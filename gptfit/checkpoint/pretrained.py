"""Starting from weights that are there already: a released GPT-2, a Hugging Face folder, a checkpoint, another run."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from gptfit.checkpoint.format import Checkpoint, best_of, load_checkpoint
from gptfit.checkpoint.hf_folder import STOCK, find_stock, is_hf_folder, read_hf_config, read_hf_folder
from gptfit.config.keys import TrainConfig
from gptfit.config.start_model import model_values
from gptfit.errors import ConfigError
from gptfit.shape import ModelShape

POSITIONS = "transformer.wpe.weight"


def adopt_model(config: TrainConfig) -> TrainConfig:
    """The config with the model of the weights it starts from, as nanoGPT does for its gpt2 names."""
    shape = _shape(_find(config))
    if config.block_size > shape.block_size:
        raise ConfigError(
            f"block_size is {config.block_size} but {config.init_from} knows {shape.block_size} positions",
            fix=f"use --block_size={shape.block_size} or less",
            key="block_size",
        )
    return dataclasses.replace(config, **model_values(shape))


def load_pretrained(config: TrainConfig) -> Checkpoint:
    """The weights alone, cut to the config's window."""
    path = _find(config)
    checkpoint = read_hf_folder(path)[0] if is_hf_folder(path) else load_checkpoint(path, lazy=True).to_use()
    weights = dict(checkpoint.model)
    if POSITIONS in weights:
        weights[POSITIONS] = weights[POSITIONS][: config.block_size]
    return dataclasses.replace(checkpoint, model=weights, optimizer=None)


def _find(config: TrainConfig) -> Path:
    path, own = Path(config.init_from), Path(config.out_dir).resolve()
    exists = bool(config.init_from) and os.path.exists(path)  # Path.exists raises for a name that is too long
    is_own = exists and path.resolve() in (own, *own.glob("*.pt"))
    if exists and not is_own:
        return best_of(path)
    if config.init_from in STOCK:  # also when out_dir bears the name
        return find_stock(config.init_from)
    if is_own:
        raise ConfigError(
            f"init_from = {config.init_from!r} is in out_dir itself",
            fix="use --init_from=resume or another --out_dir",
            key="init_from",
        )
    raise ConfigError(
        f"init_from = {config.init_from!r} is not known",
        fix=(
            f"use scratch, resume, {', '.join(STOCK)}, or the path of a run, "
            "a checkpoint or a Hugging Face GPT-2 folder"
        ),
        key="init_from",
    )


def _shape(path: Path) -> ModelShape:
    """Without reading the weights: a released GPT-2 is gigabytes."""
    return read_hf_config(path)[0] if is_hf_folder(path) else load_checkpoint(path, lazy=True, verify=False).shape
