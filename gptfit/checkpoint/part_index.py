"""The index of a checkpoint in parts: read without running code, and held against the files it speaks of.

Everything here raises ValueError. What it lets pass is no larger than the folder, and every number of it is stored.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gptfit import sane

INDEX = ".metadata"  # torch's name for it
MOST_DIMENSIONS = 8
FORMATS = (torch.float32, torch.float16, torch.bfloat16)
# What torch's index of a folder is made of. It is a pickle, which could name any other function to call.
KNOWN = {
    "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    "torch": ("Size", "float32", "float16", "bfloat16"),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
}


class _IndexReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in KNOWN.get(module, ()):
            raise ValueError(f"{module}.{name} has no place in it")
        return super().find_class(module, name)


def read_index(file: Path) -> Any:
    with file.open("rb") as opened:
        index = _IndexReader(opened).load()
    for place in index.storage_data.values():
        if Path(place.relative_path).name != str(place.relative_path):
            raise ValueError(f"{file}: {place.relative_path} is not in its folder")
    return index


def check_index(index: Any, file_sizes: Mapping[str, int]) -> None:
    """Every tensor is whole in files of these sizes, and an average is of all weights or of none."""
    tensors = sane.mapping(index.state_dict_metadata, "parts: tensors")
    left = sum(file_sizes.values())
    for name, known in tensors.items():
        left -= _checked_bytes(known, f"parts: {name[:80]}", left)
        _check_chunks(name, known, index.storage_data, file_sizes)
    model, average = (_shapes(tensors, kind) for kind in ("model.", "average."))
    if average and average != model:
        raise ValueError("average: it is not of this model")


def _shapes(tensors: Mapping[str, Any], start: str) -> dict[str, Any]:
    return {name.removeprefix(start): known.size for name, known in tensors.items() if name.startswith(start)}


def _checked_bytes(known: Any, what: str, most: int) -> int:
    """Of a tensor, where all files have room for it beside the others."""
    size, dtype = _sizes(known.size, what), known.properties.dtype
    if not size or dtype not in FORMATS:
        raise ValueError(f"{what} is not a tensor of weights")
    n_bytes: int = math.prod(size) * dtype.itemsize
    if n_bytes > most:
        raise ValueError(f"{what} says it has {n_bytes:,} bytes, more than its files hold")
    return n_bytes


def _check_chunks(name: str, known: Any, places: Mapping[Any, Any], file_sizes: Mapping[str, int]) -> None:
    """They are rows that follow one another, as we divide tensors, from the first to the last."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    what, size, row = f"parts: {name[:80]}", known.size, 0
    found = [(_sizes(one.offsets, what), _sizes(one.sizes, what)) for one in sane.sequence(known.chunks, what, 10**6)]
    for offsets, sizes in sorted(found):
        if offsets != (row, *[0] * (len(size) - 1)) or sizes[1:] != size[1:]:
            raise ValueError(f"{what} is not divided into rows")
        n_bytes = math.prod(sizes) * known.properties.dtype.itemsize
        _check_place(places.get(MetadataIndex(name, offsets)), what, n_bytes, file_sizes)
        row += sizes[0]
    if row != size[0]:
        raise ValueError(f"{what} has {row:,} rows of {size[0]:,}")


def _sizes(value: Any, what: str) -> tuple[int, ...]:
    return tuple(sane.integer(one, what, 0, sane.MOST_STEPS) for one in sane.sequence(value, what, MOST_DIMENSIONS))


def _check_place(place: Any, what: str, n_bytes: int, file_sizes: Mapping[str, int]) -> None:
    """In one of the files, and large enough for that many bytes as they are."""
    if place is None or str(place.relative_path) not in file_sizes or place.transform_descriptors:
        raise ValueError(f"{what} is in none of the files")
    end = file_sizes[str(place.relative_path)]
    offset = sane.integer(place.offset, f"{what}: offset", 0, end)
    sane.integer(place.length, f"{what}: length", n_bytes, end - offset)
