"""The model whose weights `init_from` names, as far as it can be known without opening them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from gptfit import sane
from gptfit.config.keys import MODEL_KEYS, TrainConfig
from gptfit.config.read import Loaded
from gptfit.errors import GptfitError
from gptfit.files import read_plain
from gptfit.shape import ModelShape

# Layers, heads and width of OpenAI's released models (Radford et al. 2019, table 2; heads of 64 channels).
RELEASED = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}
RELEASED_WINDOW, RELEASED_VOCABULARY = 1024, 50257
MOST_WEIGHTS = 10**13  # more than any model that one machine holds


def is_pretrained(config: TrainConfig) -> bool:
    return config.init_from not in ("scratch", "resume")


def known_shape(init_from: str) -> ModelShape | None:
    """A released model by its name, a run by its log, a Hugging Face folder by its config.json; None for other files."""
    from gptfit.logs.runlog import RUN_LOG, read_run  # late: few configs begin from a run

    path = Path(init_from)
    try:
        if os.path.isfile(path / RUN_LOG):
            return read_run(path).header.shape
        if os.path.isfile(path / "config.json"):
            facts = sane.mapping(json.loads(read_plain(path / "config.json")), "config.json")
            sizes = {key: facts[key] for key in ("n_layer", "n_head", "n_embd", "vocab_size")}
            shape = {**sizes, "block_size": facts["n_positions"]}
            sane.model_sizes(shape, sane.MOST_LAYERS, MOST_WEIGHTS)
            return ModelShape(**shape, bias=True)
    except (GptfitError, OSError, ValueError, KeyError, RecursionError):
        return None
    if init_from in RELEASED and not os.path.exists(path):
        return ModelShape(*RELEASED[init_from], RELEASED_WINDOW, RELEASED_VOCABULARY, bias=True)
    return None


def with_window(loaded: Loaded) -> Loaded:
    """Where nobody asked for a window, that of the weights the run begins from: the default may be longer than they know."""
    config, sources = loaded.config, loaded.sources
    if "block_size" in sources or not is_pretrained(config) or (known := known_shape(config.init_from)) is None:
        return loaded
    if known.block_size >= config.block_size:
        return loaded
    changed = TrainConfig.unchecked(**config.as_dict() | {"block_size": known.block_size})
    note = f"block_size = {known.block_size}: {config.init_from} knows no more positions"
    return replace(loaded, config=changed, sources=sources | {"block_size": "init_from"}, notes=(*loaded.notes, note))


def with_model_of(config: TrainConfig, shape: ModelShape) -> TrainConfig:
    """The config with the weights' model, unchecked."""
    return TrainConfig.unchecked(**config.as_dict() | model_values(shape))


def model_values(shape: ModelShape) -> dict[str, Any]:
    """The keys the weights decide; the window may be shorter than theirs."""
    return {key: getattr(shape, key) for key in MODEL_KEYS if key != "block_size"}
