"""Reading a Hugging Face GPT-2 folder (stock gpt2, or one of our exports) as a checkpoint."""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptfit import sane
from gptfit.checkpoint.format import Checkpoint
from gptfit.checkpoint.hf_names import from_hf, shape_of_hf
from gptfit.checkpoint.sane import check_storage, check_sums
from gptfit.config.start_model import RELEASED
from gptfit.data.hub import failures
from gptfit.errors import RunError
from gptfit.files import read_plain, reason_of
from gptfit.shape import ModelShape

STOCK = tuple(RELEASED)
WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def is_hf_folder(path: Path) -> bool:
    return os.path.isfile(path / "config.json") and any(os.path.isfile(path / name) for name in WEIGHTS)


def find_stock(name: str) -> Path:
    """The folder of a released GPT-2 in the Hugging Face cache, downloaded if it is not there."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise RunError(f"{name}: give a folder with its weights, or pip install 'gptfit[hf]' to fetch them") from None
    files = ["config.json", "model.safetensors", "tokenizer.json"]
    try:
        return Path(snapshot_download(f"openai-community/{name}", allow_patterns=files))
    except failures() as error:
        raise RunError(
            f"{name}: cannot be fetched ({reason_of(error)})", fix="give a folder with its config.json and weights"
        ) from None


def read_hf_config(folder: Path) -> tuple[ModelShape, dict[str, Any]]:
    """The model a folder holds, and its config.json; the weights are not read."""
    path = folder / "config.json"
    with _readable(folder):
        config = json.loads(read_plain(path))
        shape = shape_of_hf(sane.mapping(config, "config.json"), str(path))
        size = sum((folder / name).stat().st_size for name in WEIGHTS if (folder / name).is_file())
        sane.model_sizes(vars(shape), sane.MOST_LAYERS, size)
        return shape, config


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise RunError(f"{folder}: not a readable GPT-2 folder ({reason_of(error)})", fix="fetch it again") from None


def read_hf_folder(folder: Path) -> tuple[Checkpoint, dict[str, Any]]:
    """The weights under nanoGPT's names, and the folder's config.json."""
    shape, config = read_hf_config(folder)
    with _readable(folder):
        state = from_hf(_read_tensors(folder))
    keys = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias")
    args = {key: getattr(shape, key) for key in keys}
    return Checkpoint(state, None, args, 0, math.inf, {}, path=folder), config


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    import safetensors
    import safetensors.torch

    file = next(folder / name for name in WEIGHTS if (folder / name).is_file())
    try:
        if file.suffix == ".safetensors":
            found: dict[str, Tensor] = safetensors.torch.load_file(file)
        else:
            check_sums(file)
            found = torch.load(file, map_location="cpu", weights_only=True)
    except (safetensors.SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        reason = (str(error).splitlines() or ["cut short"])[0][:100]
        raise RunError(f"{file}: damaged ({reason})", fix="fetch it again") from None
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise RunError(f"{file}: holds something else than named tensors", fix="fetch it again")
    for name, tensor in found.items():
        check_storage(str(name), tensor, file.stat().st_size)
    return {name: tensor.float() for name, tensor in found.items()}
