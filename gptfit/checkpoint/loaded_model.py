"""Opening a trained model: a run folder, a ckpt.pt of ours or nanoGPT's, a Hugging Face GPT-2 folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptfit.checkpoint.format import Checkpoint, best_of, load_checkpoint, load_weights
from gptfit.checkpoint.hf_folder import STOCK, find_stock, is_hf_folder, read_hf_folder
from gptfit.checkpoint.hf_names import gelu_of_hf
from gptfit.config.keys import GPT2_VOCAB_SIZES, TrainConfig
from gptfit.data.tokenizer import Tokenizer, load_tokenizer
from gptfit.dataset import DatasetInfo, read_dataset
from gptfit.device.device import Device, find_device
from gptfit.errors import DataError, RunError
from gptfit.logs.runlog import RUN_LOG, read_run
from gptfit.model.base import LanguageModel
from gptfit.model.build import build_model
from gptfit.model.layers import MLP
from gptfit.shape import ModelShape


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode on its device, in float32, with what reads and writes its text."""

    path: Path
    model: LanguageModel
    tokenizer: Tokenizer
    checkpoint: Checkpoint
    device: Device
    data: DatasetInfo | None
    notes: tuple[str, ...] = ()
    gelu: str = "none"

    @property
    def shape(self) -> ModelShape:
        return self.model.shape

    @property
    def sampled_vocab_size(self) -> int:
        """Rows of a padded vocabulary beyond the tokenizer's are never trained and must never be drawn."""
        return min(self.shape.vocab_size, self.tokenizer.vocab_size)


def open_model(path: str, data: str | None = None, device: str = "auto") -> LoadedModel:
    """`data` names the data folder when the checkpoint does not, or its folder has moved."""
    where = find_stock(path) if path in STOCK and not Path(path).exists() else Path(path)
    found_device = find_device(TrainConfig(device=device, dtype="auto"))
    gelu = "none"
    notes: list[str] = []
    if is_hf_folder(where):
        checkpoint, hf_config = read_hf_folder(where)
        gelu = gelu_of_hf(hf_config)
        info, tokenizer = _hf_tokenizer(where, checkpoint, data)
    else:
        checkpoint = load_checkpoint(best_of(where), lazy=True).to_use()
        info, tokenizer, notes = _run_tokenizer(checkpoint, data)
    model = _build(checkpoint, found_device.torch_device, gelu)
    return LoadedModel(checkpoint.path or where, model, tokenizer, checkpoint, found_device, info, tuple(notes), gelu)


def _build(checkpoint: Checkpoint, device: torch.device, gelu: str) -> LanguageModel:
    with torch.device("meta"):
        model = build_model(checkpoint.shape)
    model.to_empty(device=device)
    load_weights(model, checkpoint)
    for module in model.modules():
        if isinstance(module, MLP):
            module.gelu = gelu
    return model.eval().requires_grad_(False)


def _hf_tokenizer(folder: Path, checkpoint: Checkpoint, data: str | None) -> tuple[DatasetInfo | None, Tokenizer]:
    info = read_dataset(data) if data else None
    file = folder / "tokenizer.json"
    if checkpoint.shape.vocab_size in GPT2_VOCAB_SIZES or not file.is_file():
        return info, _checked(load_tokenizer(info or "gpt2"), checkpoint)
    return info, _checked(load_tokenizer(file), checkpoint)


def _run_tokenizer(checkpoint: Checkpoint, data: str | None) -> tuple[DatasetInfo | None, Tokenizer, list[str]]:
    """From the data folder the run was trained on; without it GPT-2's if it can be, as nanoGPT assumes."""
    folder = Path(data) if data else find_data_folder(checkpoint)
    if folder is not None:
        info = read_dataset(folder)
        notes = [] if info.has_manifest or info.tokenizer else [f"{folder} has no manifest: assuming GPT-2's tokenizer"]
        return info, _checked(load_tokenizer(info), checkpoint), notes
    named = _logged_tokenizer(checkpoint)
    if named in ("gpt2", "bytes"):
        return None, _checked(load_tokenizer(named), checkpoint), []
    if checkpoint.shape.vocab_size not in GPT2_VOCAB_SIZES:
        raise DataError(
            f"{checkpoint.path}: its data folder {_data_name(checkpoint.config) or ''} is not here, and a vocabulary of "
            f"{checkpoint.shape.vocab_size:,} is not GPT-2's",
            fix="say where it is with --data DIR",
        )
    return None, load_tokenizer("gpt2"), ["no data folder with a manifest: assuming GPT-2's tokenizer"]


def find_data_folder(checkpoint: Checkpoint) -> Path | None:
    """Where the checkpoint says its data was, if that is a folder here; relative to here, then to the run folder."""
    name = _data_name(checkpoint.config)
    if name is None:
        return None
    bases = [Path(), *(checkpoint.path.resolve().parents if checkpoint.path else ())]
    folders = [base / folder for base in bases[:4] for folder in (name, str(checkpoint.config.get("dataset")))]
    return next((folder for folder in folders if (folder / "train.bin").is_file() or _has_manifest(folder)), None)


def _has_manifest(folder: Path) -> bool:
    return (folder / "manifest.json").is_file()


def _data_name(config: Mapping[str, Any]) -> str | None:
    if not config.get("dataset"):
        return None
    return str(Path(config.get("data_root") or "data") / str(config["dataset"]))


def _logged_tokenizer(checkpoint: Checkpoint) -> str | None:
    """What the run's own log says about its data."""
    folder = checkpoint.path.parent if checkpoint.path else None
    if folder is None or not (folder / RUN_LOG).is_file():
        return None
    return read_run(folder).header.dataset.tokenizer


def _checked(tokenizer: Tokenizer, checkpoint: Checkpoint) -> Tokenizer:
    if tokenizer.vocab_size > checkpoint.shape.vocab_size:
        raise RunError(
            f"{checkpoint.path}: the model has {checkpoint.shape.vocab_size:,} tokens, its tokenizer "
            f"({tokenizer.name}) {tokenizer.vocab_size:,}",
            fix="name the right data folder with --data DIR",
        )
    return tokenizer
