"""A checkpoint too large for one process to hold: its tensors in a folder that all processes write (torch's DCP).

ckpt.pt then holds everything but the tensors, and names the folder. It is written last, so that a folder somebody
was still writing is nobody's. Any number of processes reads it, one whole tensor at a time.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptfit import sane
from gptfit.checkpoint.part_index import INDEX, check_index, read_index
from gptfit.errors import RunError
from gptfit.files import reason_of, remove_tree, sync_folder

# The first process needs room for the whole of a checkpoint in its host's memory; beyond this nobody gathers it.
WHOLE_UP_TO = 16 * 2**30
FOLDER = "parts-{:08d}-{}"
READ_BYTES = 2**22


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
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        stored = self._names[name]
        known = self._index.state_dict_metadata[stored]
        wanted = {stored: torch.empty(known.size, dtype=known.properties.dtype)}
        reader = FileSystemReader(self._folder)
        reader.read_metadata = lambda *_, **__: self._index  # type: ignore[method-assign]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it is not several processes reading
                load(wanted, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            if not isinstance(cause, Exception):
                raise cause from None  # Ctrl-C
            raise RunError(
                f"{self._folder}: {stored} cannot be read ({reason_of(cause)})", fix="use another one of this run"
            ) from None
        return wanted[stored]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class Parts:
    """The folder of a checkpoint's tensors, looked at and still on the disk."""

    folder: Path
    index: Any
    tied: dict[str, str]
    n_bytes: int

    @property
    def weights(self) -> dict[str, str]:
        """What the model's tensors are called here -> there, a tied one under both of its names."""
        own = self._names("model.")
        return own | {alias: own[name] for alias, name in self.tied.items()}

    def tensors(self, start: str) -> StoredTensors:
        return StoredTensors(self.folder, self.index, self._names(start))

    def _names(self, start: str) -> dict[str, str]:
        return {name.removeprefix(start): name for name in self.index.state_dict_metadata if name.startswith(start)}


def find_parts(saved: Mapping[str, Any], file: Path, verify: bool) -> Parts | None:
    """Where a checkpoint's tensors are, if not in it. ValueError where the folder is not what was written."""
    if "parts" not in (ours := sane.mapping(saved.get("gptfit", {}), "gptfit")):
        return None
    parts = sane.mapping(ours["parts"], "parts")
    folder = file.parent / Path(sane.text(parts.get("folder"), "parts: folder")).name
    files = {Path(name).name: entry for name, entry in sane.mapping(parts.get("files"), "parts: files").items()}
    for name, entry in files.items():
        _check_file(folder / name, sane.sequence(entry, f"parts: {name[:80]}", 2), verify)
    if INDEX not in files:
        raise ValueError("its parts have no index")
    index = read_index(folder / INDEX)
    sizes = {name: int(entry[0]) for name, entry in files.items()}
    check_index(index, sizes)
    found = Parts(folder, index, sane.mapping(parts.get("tied", {}), "parts: tied"), sum(sizes.values()))
    if any(f"model.{name}" not in index.state_dict_metadata for name in found.tied.values()):
        raise ValueError("parts: tied names a weight that is not there")
    return found


def with_parts(saved: dict[str, Any], parts: Parts) -> dict[str, Any]:
    """The file's dictionary with tensors in it that are read when they are asked for."""
    optimizer = dict(saved["optimizer"])
    optimizer["state"] = {
        number: _Entry(entry, parts.tensors(f"optimizer.{number}.")) for number, entry in optimizer["state"].items()
    }
    model = StoredTensors(parts.folder, parts.index, parts.weights)
    ours = {**saved["gptfit"], "average": parts.tensors("average.")}
    return {**saved, "model": model, "optimizer": optimizer, "gptfit": ours}


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


def _check_file(file: Path, entry: list[Any], verify: bool) -> None:
    if not file.is_file():
        raise ValueError(f"{file} is missing")
    size, checksum = (sane.integer(value, f"parts: {file.name}", 0, 2**63) for value in entry)
    if file.stat().st_size != size or (verify and _sum(file)[1] != checksum):
        raise ValueError(f"{file} is damaged")


def part_folders(folder: Path) -> list[Path]:
    """The folders of tensors in a run's folder; what a person calls parts-mine is not one of them."""
    return [path for path in folder.glob("parts-*") if re.fullmatch(r"parts-\d{8,}-\d+", path.name) and path.is_dir()]


def remove_unnamed(folder: Path) -> None:
    """Folders of tensors that no checkpoint names, by the process that writes the checkpoints."""
    found = part_folders(folder)
    try:
        named = {_folder_of(file) for file in folder.glob("*.pt")} if found else set()
    except (RuntimeError, OSError, pickle.UnpicklingError, EOFError, ValueError):
        return  # a checkpoint that cannot be read now may name any of them
    for path in found:
        if path.name not in named:
            remove_tree(path)


def _folder_of(file: Path) -> str | None:
    """The folder a checkpoint names; None for one that holds its tensors itself."""
    saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    with contextlib.suppress(KeyError, TypeError):
        return str(saved["gptfit"]["parts"]["folder"])
    return None
