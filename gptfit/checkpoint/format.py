"""Checkpoints: nanoGPT's keys plus ours under 'gptfit'; read safely, from nanoGPT's files too."""

from __future__ import annotations

import dataclasses
import difflib
import math
import pickle
import re
import textwrap
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptfit.checkpoint.divided import StoredTensors, find_parts, with_parts
from gptfit.checkpoint.sane import check_sums, check_values
from gptfit.config.keys import INGREDIENTS
from gptfit.device.processes import own_rows
from gptfit.errors import GptfitError, RunError
from gptfit.files import reading_remedy, reason_of
from gptfit.model.base import LanguageModel
from gptfit.shape import ModelShape

LAST = "ckpt.pt"
BEST = "best.pt"
BEFORE_DECAY = "before-decay.pt"  # of schedule='wsd', to train longer from
KEPT = "ckpt-{:08d}.pt"  # an older one, by its step
FORMAT = 1
# What torch.compile and DDP put before a parameter's name when a wrapped model is saved.
WRAPPER_PREFIXES = ("_orig_mod.", "module.")


@dataclass(frozen=True)
class Checkpoint:
    """A run at the beginning of step `iter_num`. `progress` is empty when nanoGPT wrote it."""

    model: Mapping[str, Tensor]
    optimizer: dict[str, Any] | None
    model_args: dict[str, Any]
    iter_num: int
    best_val_loss: float
    config: dict[str, Any]
    arch: str = "gpt2"
    progress: dict[str, Any] = field(default_factory=dict)
    average: Mapping[str, Tensor] = field(default_factory=dict)  # of the weights over the tail; empty before it
    averaged: int = 0  # updates in it
    path: Path | None = None
    parts: dict[str, Any] | None = None  # where the tensors are, in a checkpoint about to be written without them

    @property
    def shape(self) -> ModelShape:
        keys = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias")
        ingredients = {key: self.config[key] for key in INGREDIENTS if key in self.config}
        return ModelShape(**{key: self.model_args[key] for key in keys}, arch=self.arch, **ingredients)

    def to_use(self) -> Checkpoint:
        """The model to sample from, measure and export: with the averaged weights where they were kept."""
        return dataclasses.replace(self, model={**self.model, **self.average}, average={}, averaged=0)

    def as_saved(self) -> dict[str, Any]:
        """What goes into the file: nanoGPT's six keys, readable by its train.py and sample.py, and ours."""
        average = {"average": dict(self.average), "averaged": self.averaged} if self.averaged else {}
        parts = {"parts": self.parts} if self.parts else {}
        return {
            "model": dict(self.model),
            "optimizer": _in_memory(self.optimizer),
            "model_args": self.model_args,
            "iter_num": self.iter_num,
            "best_val_loss": self.best_val_loss,
            "config": self.config,
            "gptfit": {"format": FORMAT, "arch": self.arch, "progress": self.progress, **average, **parts},
        }

    @property
    def size_bytes(self) -> int:
        return sum(t.nbytes for t in (*self.model.values(), *self.average.values(), *_tensors(self.optimizer)))


def copied_to_memory(checkpoint: Checkpoint) -> Checkpoint | None:
    """With tensors of its own, to be written later; None where there is no memory for that."""
    try:
        parts = {name: _copied(getattr(checkpoint, name)) for name in ("model", "optimizer", "average")}
    except (RuntimeError, MemoryError):
        return None
    return dataclasses.replace(checkpoint, **parts)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def best_of(path: Path) -> Path:
    """What to use of a run folder: the checkpoint with the lowest validation loss if the run kept one."""
    try:
        return path / BEST if (path / BEST).is_file() else path
    except OSError as error:  # a disk that does not answer must not make it another model
        raise RunError(f"{path / BEST}: cannot be read ({reason_of(error)})", fix=reading_remedy(error)) from None


def load_checkpoint(path: str | Path, lazy: bool = False, verify: bool = True) -> Checkpoint:
    """Any ckpt.pt of ours or nanoGPT's, on the CPU; `lazy` maps the file and reads tensors when touched.

    `verify` compares the whole file with its checksums; not needed where only its config is wanted.
    """
    file = find_checkpoint(path)
    try:
        if verify:
            check_sums(file)
        saved = _read(file, lazy)
        if parts := find_parts(saved, file, verify):
            saved = with_parts(check_values(saved, parts.n_bytes, len(parts.weights)), parts)
        else:
            saved = check_values(saved, file.stat().st_size)
        ours = saved.get("gptfit", {})
        return Checkpoint(
            model=clean_names(saved["model"]),
            optimizer=saved.get("optimizer"),
            model_args=dict(saved["model_args"]),
            iter_num=int(saved["iter_num"]),
            best_val_loss=float(saved["best_val_loss"]),
            config=dict(saved.get("config", {})),
            arch=ours.get("arch", "gpt2"),
            progress=ours.get("progress", {}),
            average=ours.get("average", {}),
            averaged=int(ours.get("averaged", 0)),
            path=file,
        )
    except RunError:
        raise
    # What torch.load raises for a cut or overwritten file depends on where the damage is.
    except (
        RuntimeError,
        pickle.UnpicklingError,
        EOFError,
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        IndexError,
        OverflowError,
        RecursionError,
        MemoryError,
    ) as e:
        raise RunError(
            f"{file}: not a readable checkpoint ({_first_line(e)})", fix="use another one of this run"
        ) from None


TORCH_STARTS = (b"PK", b"\x80")  # a zip archive; a pickle, before 2020


def _read(file: Path, lazy: bool) -> dict[str, Any]:
    """weights_only: a checkpoint from the internet cannot run code. torch's format of before 2020 cannot be mapped."""
    with open(file, "rb") as opened:
        if not opened.read(2).startswith(TORCH_STARTS):
            if file.suffix == ".pt":  # a run's own file, damaged; otherwise another kind of file was named
                raise ValueError("it does not begin as torch's files do")
            raise RunError(f"{file}: not a checkpoint", fix=f"name a run's folder, or the {LAST} or {BEST} in it")
    return dict(torch.load(file, map_location="cpu", weights_only=True, mmap=lazy and zipfile.is_zipfile(file)))


def _near_run(path: Path) -> str:
    """The run beside it whose name was probably meant."""
    try:
        runs = [str(file.parent) for file in path.parent.glob(f"*/{LAST}")]
    except OSError:
        return ""
    close = difflib.get_close_matches(str(path), runs, n=1)
    return f"did you mean {close[0]}?" if close and not path.exists() else ""


def find_checkpoint(path: str | Path) -> Path:
    """A file, or the last checkpoint of a run folder."""
    path = Path(path)
    file = path / LAST if path.is_dir() else path
    if not file.is_file():
        usual = f"`gptfit train` writes {LAST} and {BEST} into its out_dir"
        raise RunError(f"{file}: no such checkpoint", fix=_near_run(path) or usual)
    return file


def load_weights(model: LanguageModel, checkpoint: Checkpoint) -> None:
    """Into the model; a tensor that does not fit is named."""
    expected = model.state_dict()
    for name, tensor in expected.items():
        found = checkpoint.model.get(name)
        if found is None or found.shape != tensor.shape:
            has = "is missing" if found is None else f"has shape {tuple(found.shape)}"
            raise RunError(
                f"{checkpoint.path}: {name} {has}, the model needs {tuple(tensor.shape)}", fix="not of this model"
            )
    extra = set(checkpoint.model) - set(expected)
    # The causal mask that nanoGPT registers on old torch versions.
    extra = {name for name in extra if not name.endswith(".attn.bias")}
    if extra:
        raise RunError(f"{checkpoint.path}: {min(extra)} is no tensor of a {checkpoint.arch} model")
    with torch.no_grad():
        for name, tensor in expected.items():
            _copy_into(tensor, checkpoint.model[name])


def _copy_into(tensor: Tensor, whole: Tensor) -> None:
    """Of a tensor that several processes share (a DTensor, whose import takes a second), this one's part."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        tensor.copy_(whole)
    else:
        tensor.to_local().copy_(own_rows(whole, mesh.get_local_rank(), mesh.size()))  # type: ignore[attr-defined]


def _in_memory(value: Any) -> Any:
    """Plain dictionaries, also of what is read when it is asked for."""
    if isinstance(value, Mapping):
        return {key: _in_memory(item) for key, item in value.items()}
    return value


def clean_names(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Parameter names as the bare model has them."""
    if isinstance(state, StoredTensors):
        return state  # only we write these
    cleaned = {}
    for name, tensor in state.items():
        while name.startswith(WRAPPER_PREFIXES):
            name = name.partition(".")[2]
        cleaned[name] = tensor
    return cleaned


def newest_readable(folder: Path, lazy: bool = False) -> tuple[Checkpoint, list[str]]:
    """The last checkpoint; if it is damaged the one before, with a sentence for each that was passed over."""
    candidates = [folder / LAST, *kept_copies(folder), folder / BEST]
    damaged: list[GptfitError] = []
    for path in candidates:
        if not path.is_file():
            continue
        try:
            found = load_checkpoint(path, lazy)
            if _kept_step(path) in (None, found.iter_num):
                return found, [str(error) for error in damaged]
            damaged.append(RunError(f"{path}: holds step {found.iter_num}, not what its name says"))
        except GptfitError as error:
            damaged.append(error)
    if damaged:
        raise RunError(damaged[0].message, fix=f"{folder} has no other readable checkpoint, start from scratch")
    raise RunError(f"{folder / LAST}: no such checkpoint", fix="start the run without --init_from=resume")


def kept_copies(folder: Path, before: float = math.inf) -> list[Path]:
    """The checkpoints older than step `before`, newest first; what a person calls ckpt-mine.pt is not one of them."""
    steps = {path: _kept_step(path) for path in folder.glob("ckpt-*.pt")}
    found = [(step, path) for path, step in steps.items() if step is not None and step < before]
    return [path for _, path in sorted(found, reverse=True)]


def _kept_step(path: Path) -> int | None:
    """The step in the name of a kept copy, as we write it; None for any other file."""
    name = re.fullmatch(r"ckpt-(\d{8}|[1-9]\d{8,})\.pt", path.name)
    return int(name[1]) if name else None


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return textwrap.shorten(lines[0], 120, placeholder="").rstrip(".:") if lines else type(error).__name__
