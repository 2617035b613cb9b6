"""Token files: appended with plain writes, cut back to a known length, and published under their name when whole."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gptfit.errors import DataError
from gptfit.files import BINARY, FULL, reason_of, remedy_of, write_whole
from gptfit.files import publish as give_name

PART = ".part"  # what is being written never bears the final name


class TokenFileWriter:
    """One growing file of raw little-endian token ids. Never a memory map: a full disk must be an error, not a signal."""

    def __init__(self, path: Path, keep_bytes: int) -> None:
        """Opens PATH.part and cuts it to `keep_bytes`, the length the journal vouches for."""
        self.path = path
        self.size = keep_bytes
        try:
            self._fd = os.open(_part(path), os.O_WRONLY | os.O_CREAT | BINARY, 0o644)
            if os.fstat(self._fd).st_size < keep_bytes:
                os.close(self._fd)
                raise DataError(f"{_part(path)}: is shorter than its journal says", fix="start over with --restart")
            os.ftruncate(self._fd, keep_bytes)
            os.lseek(self._fd, keep_bytes, os.SEEK_SET)
        except OSError as error:
            raise write_error(path, error) from None

    def append(self, *arrays: NDArray[np.unsignedinteger]) -> None:
        try:
            for tokens in arrays:
                view = np.ascontiguousarray(tokens).view(np.uint8).data
                while view.nbytes:
                    written = os.write(self._fd, view)
                    view = view[written:]
                    self.size += written
        except OSError as error:
            raise write_error(self.path, error) from None

    def sync(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise write_error(self.path, error) from None

    def close(self) -> None:
        with suppress(OSError):  # what counts was flushed by `sync`, which says so when it fails
            os.close(self._fd)


class CountedTokenWriter:
    """Tokens with bit 31 where they count, as a token file and a mask beside it, a byte per token.

    What the journal knows is the token file's length; the mask's follows from it.
    """

    def __init__(self, path: Path, keep_bytes: int, dtype: str) -> None:
        self._dtype = np.dtype(dtype)
        self._tokens = TokenFileWriter(path, keep_bytes)
        self._mask = TokenFileWriter(mask_path(path), keep_bytes // self._dtype.itemsize)

    @property
    def size(self) -> int:
        return self._tokens.size

    def append(self, *arrays: NDArray[np.unsignedinteger]) -> None:
        for both in arrays:
            self._tokens.append((both & 0x7FFF_FFFF).astype(self._dtype))
            self._mask.append((both >> 31).astype(np.uint8))

    def sync(self) -> None:
        self._tokens.sync()
        self._mask.sync()

    def close(self) -> None:
        self._tokens.close()
        self._mask.close()


def mask_path(path: Path) -> Path:
    """train.bin -> train_mask.bin"""
    return path.with_name(f"{path.stem}_mask.bin")


def publish(path: Path, size: int) -> None:
    """Give PATH.part its name; doing it again after a crash changes nothing."""
    part = _part(path)
    try:
        if part.exists():
            give_name(part, path)
        found = path.stat().st_size if path.exists() else 0  # an empty file may already have been removed
    except OSError as error:
        raise write_error(path, error) from None
    if found != size:
        raise DataError(f"{path}: is not what the journal says was written", fix="start over with --restart")


def write_file(path: Path, content: bytes) -> None:
    """All of it or nothing, with prepare's words for a disk that cannot take it."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise write_error(path, error) from None


def remove_file(path: Path) -> None:
    """One that we made, if it is there."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise write_error(path, error) from None


def write_error(path: Path, error: OSError) -> DataError:
    """Going on is advised where it can help: not where something else has the name or may not be written at all."""
    if error.errno in FULL:
        return DataError(f"{path}: the disk is full", fix="free some space and run the same command again to go on")
    return DataError(f"{path}: cannot write ({reason_of(error)})", fix=f"{remedy_of(error)}")


def _part(path: Path) -> Path:
    return path.with_name(path.name + PART)
