"""A checkpoint too large for one process to hold: its tensors in a folder that all processes write (torch's DCP).

ckpt.pt then holds everything but the tensors, and names the folder. It is written last, so that a folder somebody
was still writing is nobody's. Any number of processes reads it, one whole tensor at a time.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptfit import sane
from gptfit.errors import RunError
from gptfit.files import reason_of, remove_tree, sync_folder

# The first process needs room for the whole of a checkpoint in its host's memory; beyond this nobody gathers it.
WHOLE_UP_TO = 16 * 2**30
FOLDER = "parts-{:08d}-{}"
ANY_FOLDER = "parts-*"
INDEX = ".metadata"  # torch's name for it
READ_BYTES = 2**22
MOST_FILES = 100_000
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


def free_name(folder: Path, step: int) -> str:
    """Of a folder for the tensors of this step that is not there yet: after a return to an earlier step it may be."""
    number = 1
    while (folder / FOLDER.format(step, number)).exists():
        number += 1
    return FOLDER.format(step, number)


def write_parts(folder: Path, tensors: Mapping[str, Tensor], rank: int) -> dict[str, list[int]]:
    """All processes call this with their DTensors; returns the size and checksum of what this one wrote."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(dict(tensors), storage_writer=FileSystemWriter(folder))
        sync_folder(folder)
        own = [folder / INDEX] if rank == 0 else []
        return {file.name: list(_sum(file)) for file in [*own, *folder.glob(f"__{rank}_*")]}
    except (CheckpointException, OSError, RuntimeError) as error:
        raise RunError(
            f"{folder}: could not be written ({_reason(error)})", fix="the previous one is untouched"
        ) from None


def _reason(error: BaseException) -> str:
    """DCP hands on what failed in any process as a dictionary by rank."""
    failures = getattr(error, "failures", None)
    return reason_of(next(iter(failures.values()))[0]) if failures else reason_of(error)


def _sum(file: Path) -> tuple[int, int]:
    total = size = 0
    with file.open("rb") as opened:
        while piece := opened.read(READ_BYTES):
            total, size = zlib.crc32(piece, total), size + len(piece)
    return size, total


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a folder, each read when it is asked for; `names` are what they are called here -> there."""

    def __init__(self, folder: Path, index: Any, names: Mapping[str, str]) -> None:
        self._folder, self._index, self._names = folder, index, names

    def __getitem__(self, name: str) -> Tensor:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        stored = self._names[name]
        known = self._index.state_dict_metadata[stored]
        wanted = {stored: torch.empty(known.size, dtype=known.properties.dtype)}
        reader = FileSystemReader(self._folder)
        reader.read_metadata = lambda *_, **__: self._index  # type: ignore[method-assign]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is not several processes reading
            load(wanted, storage_reader=reader, no_dist=True)
        return wanted[stored]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def with_parts(saved: dict[str, Any], file: Path, verify: bool) -> dict[str, Any]:
    """The file's dictionary with tensors in it, still on the disk. ValueError where the folder is not what was written."""
    parts = sane.mapping(saved["gptfit"]["parts"], "parts")
    folder = file.parent / Path(sane.text(parts.get("folder"), "parts: folder")).name
    for name, entry in sane.mapping(parts.get("files"), "parts: files").items():
        _check_file(folder / Path(name).name, sane.sequence(entry, f"parts: {name[:80]}", 2), verify)
    index = read_index(folder / INDEX)
    stored = index.state_dict_metadata
    names = {name.partition(".")[2]: name for name in stored if name.startswith("model.")}
    for alias, name in sane.mapping(parts.get("tied", {}), "parts: tied").items():
        names[alias] = f"model.{name}"
    average = {name.partition(".")[2]: name for name in stored if name.startswith("average.")}
    ours = {**saved["gptfit"], "average": StoredTensors(folder, index, average)}
    optimizer = dict(saved["optimizer"])
    optimizer["state"] = {
        number: _Entry(entry, StoredTensors(folder, index, _state_names(number, stored)))
        for number, entry in optimizer.get("state", {}).items()
    }
    return {**saved, "model": StoredTensors(folder, index, names), "optimizer": optimizer, "gptfit": ours}


class _Entry(Mapping[str, Any]):
    """One weight's optimizer state: numbers from ckpt.pt, tensors from the folder."""

    def __init__(self, plain: Mapping[str, Any], stored: StoredTensors) -> None:
        self._plain, self._stored = plain, stored

    def __getitem__(self, name: str) -> Any:
        return self._plain[name] if name in self._plain else self._stored[name]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._plain, *self._stored])

    def __len__(self) -> int:
        return len(self._plain) + len(self._stored)


def _state_names(number: int, stored: Mapping[str, Any]) -> dict[str, str]:
    start = f"optimizer.{number}."
    return {name.removeprefix(start): name for name in stored if name.startswith(start)}


def _check_file(file: Path, entry: list[Any], verify: bool) -> None:
    if not file.is_file():
        raise ValueError(f"{file} is missing")
    size, checksum = (sane.integer(value, f"parts: {file.name}", 0, 2**63) for value in entry)
    if file.stat().st_size != size or (verify and _sum(file)[1] != checksum):
        raise ValueError(f"{file} is damaged")


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


def remove_unnamed(folder: Path) -> None:
    """Folders of tensors that no checkpoint names, by the process that writes the checkpoints."""
    found = [path for path in folder.glob(ANY_FOLDER) if path.is_dir()]
    if not found:
        return
    named = {name for file in folder.glob("*.pt") if (name := _folder_of(file))}
    for path in found:
        if path.name not in named:
            remove_tree(path)


def _folder_of(file: Path) -> str | None:
    """The folder a checkpoint names; None for one that holds its tensors itself, or cannot be read."""
    with contextlib.suppress(RuntimeError, OSError, pickle.UnpicklingError, KeyError, TypeError, EOFError, ValueError):
        saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return str(saved["gptfit"]["parts"]["folder"])
    return None
