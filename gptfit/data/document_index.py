"""Where the documents of a split begin: looked for once, then kept beside its .bin files.

Finding the ends of text reads the whole split, which takes minutes for a terabyte of it; the index is 8 bytes per document.
It is only ever a copy: one that is missing, damaged or of other files is made again, and a folder that cannot be written
to does without.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gptfit.files import write_whole

SUFFIX = ".documents"  # train.bin and train-00000.bin -> train.documents

Bounds = npt.NDArray[np.int64]


def index_file(first_file: Path) -> Path:
    return first_file.with_name(first_file.stem.partition("-")[0] + SUFFIX)


def kept_bounds(files: Sequence[Path], end_of_text: int, find: Callable[[], Bounds]) -> Bounds:
    """The first token of every document and the end of the last: as kept for these very files, or found and kept."""
    path, stamp = index_file(files[0]), _stamp(files, end_of_text)
    kept = _read(path, stamp)
    if kept is not None:
        return kept
    found = find()
    content = found.astype("<i8").tobytes()
    header = json.dumps({**stamp, "crc32": zlib.crc32(content)}).encode() + b"\n"
    with suppress(OSError):  # somebody else's folder, or a full disk: a run that can go on goes on
        write_whole(path, header + content)
    return found


def _stamp(files: Sequence[Path], end_of_text: int) -> dict[str, Any]:
    """Also of a split that was replaced by another of the same size."""
    states = [file.stat() for file in files]
    return {
        "format": "gptfit-documents",
        "end_of_text": end_of_text,
        "files": [[file.name, state.st_size, state.st_mtime_ns] for file, state in zip(files, states, strict=True)],
    }


def _read(path: Path, stamp: dict[str, Any]) -> Bounds | None:
    try:
        header, _, content = path.read_bytes().partition(b"\n")
        is_same = json.loads(header) == {**stamp, "crc32": zlib.crc32(content)}
    except (OSError, ValueError, RecursionError):
        return None
    return np.frombuffer(content, "<i8").astype(np.int64) if is_same else None
