"""From an architecture's name to its model: one line per architecture."""

from __future__ import annotations

from importlib import import_module

from gptfit.errors import ConfigError
from gptfit.model.base import Checkpointing, LanguageModel
from gptfit.shape import ModelShape

# arch -> module and class; imported when first asked for.
ARCHITECTURES = {"gpt2": ("gptfit.model.gpt2", "GPT2"), "modern": ("gptfit.model.modern", "Modern")}


def build_model(
    shape: ModelShape, dropout: float = 0.0, checkpoint_activations: Checkpointing = False
) -> LanguageModel:
    """A freshly initialised model, drawing from torch's global random stream."""
    if shape.arch not in ARCHITECTURES:
        raise ConfigError(
            f"arch = {shape.arch!r} is not known", fix=f"use one of {', '.join(ARCHITECTURES)}", key="arch"
        )
    module_name, class_name = ARCHITECTURES[shape.arch]
    model_class: type[LanguageModel] = getattr(import_module(module_name), class_name)
    return model_class(shape, dropout, checkpoint_activations)
