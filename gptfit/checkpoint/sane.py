"""Is a checkpoint what it says: types, ranges, shapes and sizes, and the checksums of its parts.

weights_only keeps code out of a file; it does not make its values sane. Everything here raises ValueError.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptfit import sane
from gptfit.config.keys import INGREDIENTS, KEYS
from gptfit.config.read import coerce
from gptfit.errors import ConfigError

MOST_TENSORS = 10**6
MOST_PROCESSES = 100_000
READ_BYTES = 2**22
WHOLE_NUMBERS = ("window", "step", "best_step", "tokens", "evaluated_step", "evals_without_gain", "rises")
SECONDS = ("seconds", "wall_seconds")


def check_values(saved: Any, file_bytes: int, n_stored: int = 0) -> dict[str, Any]:
    """The file's dictionary, once everything in it is of the kind that the rest of gptfit relies on.

    `n_stored`: of its weights, in a folder of `file_bytes` that was looked at already.
    """
    found = sane.mapping(saved, "its content")
    args = sane.mapping(found.get("model_args"), "model_args")
    model = sane.mapping(found.get("model"), "model")
    if not n_stored:
        _check_tensors(model, file_bytes)
    sane.model_sizes(args, n_stored or len(model), file_bytes)
    sane.flag(args.get("bias"), "bias")
    sane.integer(_plain(found.get("iter_num")), "iter_num", 0, sane.MOST_STEPS)
    sane.number(_plain(found.get("best_val_loss")), "best_val_loss")
    _check_config(sane.mapping(found.get("config", {}), "config"))
    ours = sane.mapping(found.get("gptfit", {}), "gptfit")
    _check_ours(ours)
    _check_average(sane.mapping(ours.get("average", {}), "average"), model, file_bytes)
    if found.get("optimizer") is not None:
        _check_optimizer(sane.mapping(found["optimizer"], "optimizer"), file_bytes)
    return found


def _plain(value: Any) -> Any:
    """nanoGPT saves its best loss as a tensor."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _check_tensors(tensors: Mapping[str, Any], file_bytes: int) -> None:
    sane.integer(len(tensors), "the number of tensors", 1, MOST_TENSORS)
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or (not tensor.is_floating_point() and not name.endswith(".attn.bias")):
            raise ValueError(f"{name[:80]} is {sane.short(tensor)}, not a tensor of weights")
        check_storage(name, tensor, file_bytes)


def check_storage(name: str, tensor: Tensor, file_bytes: int) -> None:
    """A tensor of a few bytes can claim any shape by strides of zero, and a sparse one any size."""
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter)
    if not is_plain or tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise ValueError(f"{name[:80]} is not a plain tensor")
    if tensor.nbytes > min(tensor.untyped_storage().nbytes(), file_bytes):
        raise ValueError(f"{name[:80]} says it has {tensor.nbytes:,} bytes, more than the file holds of it")


def _check_config(config: Mapping[str, Any]) -> None:
    """The keys we know have a value that the key takes; of others nothing is used."""
    for key in KEYS.keys() & config.keys():
        try:
            coerce(key, config[key], "config")
        except (ConfigError, OverflowError) as error:
            raise ValueError(str(error)) from None
    for key in INGREDIENTS:
        if key in config and (problem := KEYS[key].problem(config)):
            raise ValueError(f"config: {problem.line}")


def _check_average(average: Mapping[str, Any], model: Mapping[str, Any], file_bytes: int) -> None:
    """Of tensors that the model has, each as large."""
    if average:
        _check_tensors(average, file_bytes)
    for name, tensor in average.items():
        if name not in model or model[name].shape != tensor.shape:
            raise ValueError(f"average: {name[:80]} is not of this model")


def _check_ours(ours: Mapping[str, Any]) -> None:
    if ours.get("arch", "gpt2") not in KEYS["arch"].choices:
        raise ValueError(f"arch is {sane.short(ours['arch'])}, which this version does not know")
    sane.integer(ours.get("averaged", 0), "averaged", 0, sane.MOST_STEPS)
    progress = sane.mapping(ours.get("progress", {}), "progress")
    for key in WHOLE_NUMBERS:
        if key in progress:
            sane.integer(progress[key], f"progress: {key}", -1, sane.MOST_STEPS)
    for key in SECONDS:
        if key in progress:
            sane.number(progress[key], f"progress: {key}", 0, 1e12)
    for key in ("best_val_loss", "last_train_loss", "last_val_loss"):
        value = progress.get(key)
        if value is not None and not (isinstance(value, float) and math.isnan(value)):
            sane.number(value, f"progress: {key}")
    sane.text(progress.get("start", ""), "progress: start")
    for pace in sane.sequence(progress.get("paces", []), "progress: paces", MOST_PROCESSES):
        sane.number(pace, "progress: paces", 1e-12, 1e12)
    for start in sane.sequence(progress.get("starts", []), "progress: starts", MOST_PROCESSES):
        _check_start(sane.mapping(start, "progress: starts"))


def _check_start(start: Mapping[str, Any]) -> None:
    for name, state in sane.mapping(start.get("rng"), "progress: rng").items():
        if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.numel() > 10**6:
            raise ValueError(f"progress: rng {name[:20]} is {sane.short(state)}, not the state of a random stream")
        if name == "cpu" and state.numel() != torch.get_rng_state().numel():
            raise ValueError(f"progress: rng cpu has {state.numel():,} bytes, not the state of a random stream")
    for window in sane.sequence(start.get("drawn"), "progress: drawn", 10**7):
        sane.integer(window, "progress: drawn", 0, sane.MOST_STEPS)


def _check_optimizer(optimizer: Mapping[str, Any], file_bytes: int) -> None:
    groups = sane.sequence(optimizer.get("param_groups", []), "optimizer: param_groups", 10_000)
    for group in groups:
        numbers = sane.sequence(
            sane.mapping(group, "optimizer: group").get("params"), "optimizer: params", MOST_TENSORS
        )
        for place in numbers:
            sane.integer(place, "optimizer: params", 0, MOST_TENSORS)
    state = optimizer.get("state")
    if not isinstance(state, Mapping):
        raise ValueError(f"optimizer: state is {sane.short(state)}, not one entry per parameter")
    for place, entry in state.items():
        sane.integer(place, "optimizer: state", 0, MOST_TENSORS)
        for name, tensor in sane.mapping(entry, f"optimizer: state {place}").items():
            if isinstance(tensor, Tensor):
                check_storage(f"optimizer: {name} of {place}", tensor, file_bytes)
            elif tensor is not None:
                sane.number(tensor, f"optimizer: {name} of {place}")


def check_sums(path: Path) -> None:
    """Every part of the file against the checksum (CRC-32) that stands beside it: a flipped bit is noticed.

    The file is a zip archive, as torch writes it, so nanoGPT's files and everyone else's have them too. A writer that
    leaves the sums out (an option of torch) has them wrong everywhere, which a flipped bit never does.
    """
    if not zipfile.is_zipfile(path):
        return  # torch's format of before 2020 has none
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
            _check_parts(parts, path.stat().st_size)
            wrong = [part.filename for part in parts if _crc(archive, part) != part.CRC]
    except (zipfile.BadZipFile, NotImplementedError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"damaged: {error}") from None
    if wrong and len(wrong) < max(2, len(parts)):
        raise ValueError(f"damaged: the checksum of {wrong[0].rpartition('/')[2]} is wrong")


def _check_parts(parts: list[zipfile.ZipInfo], file_bytes: int) -> None:
    """torch stores tensors as they are; a compressed part could become any size in memory."""
    claimed = sum(part.file_size for part in parts)
    if claimed > file_bytes or any(part.compress_type != zipfile.ZIP_STORED for part in parts):
        raise ValueError(f"its parts say they hold {claimed:,} bytes, the file has {file_bytes:,}")


def _crc(archive: zipfile.ZipFile, part: zipfile.ZipInfo) -> int:
    """Of what the file holds at this part's place, read past zipfile's own check so that all can be counted."""
    total = 0
    for piece in _pieces(archive, part):
        total = zlib.crc32(piece, total)
    return total


def _pieces(archive: zipfile.ZipFile, part: zipfile.ZipInfo) -> Iterator[bytes]:
    with archive.open(part) as opened:
        opened._expected_crc = None  # type: ignore[attr-defined]
        while piece := opened.read(READ_BYTES):
            yield piece
