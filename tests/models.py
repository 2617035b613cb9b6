"""Small models and checkpoints that tests of sampling, evaluation and export share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from gptfit.checkpoint.format import Checkpoint, load_checkpoint, load_weights
from gptfit.model.base import LanguageModel
from gptfit.model.build import ARCHITECTURES, build_model
from gptfit.shape import ModelShape

ARCHES = sorted(ARCHITECTURES)
TINY = ModelShape(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64, bias=True)


def tiny_model(arch: str = "gpt2", seed: int = 0, **changes: object) -> LanguageModel:
    """Random weights several times larger than at initialisation, so that nothing in the model is nearly linear."""
    shape = replace(TINY, **{"arch": arch, "bias": arch == "gpt2", **changes})  # type: ignore[arg-type]
    torch.manual_seed(seed)
    model = build_model(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
            elif arch == "gpt2":
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def save_checkpoint(model: LanguageModel, path: Path, **config: object) -> Path:
    shape = model.shape
    keys = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias")
    args = {key: getattr(shape, key) for key in keys}
    checkpoint = Checkpoint(model.state_dict(), None, args, 100, 3.25, {**args, **config}, arch=shape.arch)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(checkpoint.as_saved(), path)
    return path


def load_model(path: Path) -> tuple[LanguageModel, Checkpoint]:
    """A checkpoint's model in eval mode on the CPU, and what else the file says."""
    checkpoint = load_checkpoint(path, lazy=True)
    with torch.device("meta"):
        model = build_model(checkpoint.shape, dropout=0.0)
    model.to_empty(device="cpu")
    load_weights(model, checkpoint)
    return model.eval(), checkpoint
