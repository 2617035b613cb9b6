"""TokenFile: a split's .bin files as one array of tokens; every fault of them in one line."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gptfit.dataset import DTYPE_BYTES, DatasetInfo, Split
from gptfit.errors import DataError
from gptfit.files import BINARY, reading_remedy

# Files up to this many tokens are checked whole before the first step (a fraction of a second);
# windows of larger ones are checked as they are read.
CHECK_AT_ONCE = 256_000_000


CHECK_TOKENS = 2**22  # of them at a time


class _Part:
    """One .bin file, read by place. Not mapped: a file cut short by somebody must be an error, not a signal (SIGBUS)."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.path = path
        self._dtype = np.dtype(dtype)
        self._lock = threading.Lock()
        try:
            self._descriptor = os.open(path, os.O_RDONLY | BINARY)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})", fix=reading_remedy(error)) from None
        weakref.finalize(self, os.close, self._descriptor)
        self._length = os.fstat(self._descriptor).st_size // self._dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def read(self, start: int, count: int) -> npt.NDArray[np.unsignedinteger]:
        """Tokens start .. start+count-1, fewer at the end of the file."""
        wanted = self._dtype.itemsize * max(0, min(count, self._length - start))
        try:
            found = self._bytes(start * self._dtype.itemsize, wanted)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror})", fix=reading_remedy(error)) from None
        if len(found) < wanted:
            raise DataError(f"{self.path}: became shorter while it was read", fix="prepare the data again, then resume")
        return np.frombuffer(found, self._dtype)

    def places_of(self, token: int) -> npt.NDArray[np.int64]:
        """Where a token stands, found a piece at a time."""
        firsts = range(0, self._length, CHECK_TOKENS)
        return np.concatenate([np.flatnonzero(self.read(first, CHECK_TOKENS) == token) + first for first in firsts])

    def _bytes(self, place: int, count: int) -> bytes:
        if hasattr(os, "pread"):
            return os.pread(self._descriptor, count, place)
        with self._lock:  # Windows has one position per file
            os.lseek(self._descriptor, place, os.SEEK_SET)
            return os.read(self._descriptor, count)


COUNTS = 1 << 31  # set in a token that is read from a masked file and counts


class _MaskedPart(_Part):
    """A .bin file read together with its mask, so that whatever moves a token moves its mark too."""

    def __init__(self, path: Path, dtype: str, mask: Path) -> None:
        super().__init__(path, dtype)
        self._mask = _Part(mask, "uint8")
        if len(self._mask) != len(self):
            raise DataError(f"{mask}: is not as long as {path.name}", fix="prepare the data again")

    def read(self, start: int, count: int) -> npt.NDArray[np.unsignedinteger]:
        tokens = super().read(start, count).astype(np.uint32)
        return tokens | (self._mask.read(start, count).astype(np.uint32) << np.uint32(31))

    def places_of(self, token: int) -> npt.NDArray[np.int64]:
        """Where a conversation ends: at the end of text before the one that begins the next."""
        ends = np.sort(np.concatenate([super().places_of(token), super().places_of(token | COUNTS)]))
        found: npt.NDArray[np.int64] = ends[:-1][np.diff(ends) == 1]
        return found


class TokenFile:
    """Read-only and window by window, so opening 10^11 tokens costs nothing."""

    def __init__(self, split: Split, dtype: str, vocab_size: int) -> None:
        self.files = split.files
        self.vocab_size = vocab_size
        self.is_masked = bool(split.masks)
        masks = split.masks or [None] * len(split.files)
        self._parts = [
            _Part(file, dtype) if mask is None else _MaskedPart(file, dtype, mask)
            for file, mask in zip(split.files, masks, strict=True)
            if file.stat().st_size
        ]
        self._ends = np.cumsum([len(part) for part in self._parts], dtype=np.int64)
        self.n_tokens = int(self._ends[-1]) if self._parts else 0

    def windows(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """(len(starts), length) tokens; an id the model has no row for is named with its place."""
        return self.marked_windows(starts, length)[0]

    def marked_windows(
        self, starts: npt.NDArray[np.int64], length: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_] | None]:
        """The same, and which of them a loss is about; None: all."""
        out = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(out, starts, strict=True):
            self._copy(int(start), row)
        counts = out >= COUNTS if self.is_masked else None
        if self.is_masked:
            out &= COUNTS - 1
        if out.size and int(out.max()) >= self.vocab_size:
            window, place = divmod(int((out >= self.vocab_size).argmax()), length)
            raise self._bad_token(int(out[window, place]), self.place_in_file(int(starts[window]) + place))
        return out, counts

    def place_in_file(self, position: int) -> int:
        return position

    def _copy(self, start: int, row: npt.NDArray[np.int64]) -> None:
        done, part = 0, int(np.searchsorted(self._ends, start, side="right"))
        while done < len(row):
            offset = start + done - int(self._ends[part - 1] if part else 0)
            piece = self._parts[part].read(offset, len(row) - done)
            row[done : done + len(piece)] = piece
            done, part = done + len(piece), part + 1

    def check_tokens(self) -> None:
        """Look for an id beyond the vocabulary in a file small enough to read at once."""
        if self.n_tokens > CHECK_AT_ONCE:
            return
        before = 0
        for part in self._parts:
            for first in range(0, len(part), CHECK_TOKENS):
                tokens = part.read(first, CHECK_TOKENS)
                tokens = tokens & np.uint32(COUNTS - 1) if self.is_masked else tokens
                if int(tokens.max()) >= self.vocab_size:
                    place = int((tokens >= self.vocab_size).argmax())
                    raise self._bad_token(int(tokens[place]), before + first + place)
            before += len(part)

    def _bad_token(self, token: int, position: int) -> DataError:
        part = int(np.searchsorted(self._ends, position, side="right"))
        inside = position - int(self._ends[part - 1] if part else 0)
        return DataError(
            f"{self.files[part]}: token id {token} at position {inside:,} is beyond the vocabulary of "
            f"{self.vocab_size:,}",
            fix="set vocab_size, or prepare the data with this model's tokenizer",
        )


Opener = Callable[[Split, str, int], TokenFile]


def open_split(info: DatasetInfo, name: str, block_size: int, vocab_size: int, opener: Opener = TokenFile) -> TokenFile:
    """The named split, checked: there, not empty, at least one window long, every id below vocab_size."""
    split = info.train if name == "train" else info.val
    if split is None:
        raise DataError(
            f"{info.folder / f'{name}.bin'}: missing", fix="make it with `gptfit prepare` (both splits are needed)"
        )
    where = split.files[0] if split.files else info.folder / f"{name}.bin"
    _check_sizes(split.files, DTYPE_BYTES[info.dtype])
    tokens = opener(split, info.dtype, vocab_size)
    if not tokens.n_tokens:
        raise DataError(f"{where}: is empty", fix="prepare the data again")
    if tokens.n_tokens < block_size + 1:
        raise DataError(
            f"{where}: {tokens.n_tokens:,} tokens are fewer than one window of block_size + 1 = {block_size + 1:,}",
            fix=f"use block_size = {tokens.n_tokens - 1} or less, or more data",
        )
    tokens.check_tokens()
    return tokens


def _check_sizes(files: tuple[Path, ...], width: int) -> None:
    for file in files:
        size = file.stat().st_size
        if size % width:
            raise DataError(
                f"{file}: {size:,} bytes is not a whole number of {8 * width}-bit tokens", fix="prepare it again"
            )
