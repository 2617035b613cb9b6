"""Parquet in: open with a readable error, find the text column, read rows in bounded batches."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gptfit.data.sources import Source
from gptfit.errors import DataError
from gptfit.files import reading_remedy, reason_of

SIGNATURE_BYTES = 28  # after the footer: a nonce of 12 and a tag of 16 (Parquet modular encryption)
NO_MEMORY = "not enough memory to read it; close other programs or use fewer --workers, and run the same command again"
UNREADABLE = (errno.EACCES, errno.EPERM, errno.EIO, errno.EISDIR)
# The columns that keep their values end to end, and the type of the places where each begins.
OFFSETS = {pa.string(): np.int32, pa.binary(): np.int32, pa.large_string(): np.int64, pa.large_binary(): np.int64}


class OutOfMemory(DataError):
    """This machine is at fault and not the file: never skipped with --skip-bad."""


@dataclass(frozen=True)
class RowGroup:
    """One row group: how many rows, and how many bytes its text column takes in the file and unpacked."""

    index: int
    first_row: int
    rows: int
    packed_bytes: int
    text_bytes: int


def open_parquet(file: str | Path | BinaryIO, name: str) -> pq.ParquetFile:
    """The file's footer, read; `name` is what errors call it."""
    try:
        opened = pq.ParquetFile(file, pre_buffer=False, buffer_size=2**20)
        if _is_encrypted(file, opened):
            raise DataError(
                f"{name}: has encrypted columns, which gptfit cannot read", fix="save a copy without encryption"
            )
        return opened
    except MemoryError:
        raise OutOfMemory(f"{name}: {NO_MEMORY}") from None
    except FileNotFoundError:
        raise DataError(f"{name}: no such file") from None
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{name}: {_why_unreadable(file, error)}") from None


def _is_encrypted(file: str | Path | BinaryIO, opened: pq.ParquetFile) -> bool:
    """Whether the footer is signed, as that of a file with encrypted columns; pyarrow would end the process at those."""
    if isinstance(file, (str, Path)):
        with open(file, "rb") as again:
            return _is_encrypted(again, opened)
    file.seek(-8, os.SEEK_END)
    footer_bytes = int.from_bytes(file.read(4), "little")
    return footer_bytes - int(opened.metadata.serialized_size) == SIGNATURE_BYTES


def _why_unreadable(file: str | Path | BinaryIO, error: Exception) -> str:
    """pyarrow's message, or what the first bytes show to be the real trouble."""
    if isinstance(error, OSError) and error.errno in UNREADABLE:
        return f"cannot be read ({reason_of(error)}); {reading_remedy(error)}"
    if isinstance(file, (str, Path)) and os.path.isfile(file):
        if os.path.getsize(file) == 0:
            return "is empty (0 bytes); it was not written or downloaded whole"
        with open(file, "rb") as opened:
            head = opened.read(256).lstrip().lower()
        if head.startswith((b"<!doctype", b"<html", b"<?xml")):
            return "is a web page, not Parquet; download the file itself, not its page"
        if not head.startswith(b"par1"):
            return "is not Parquet (it does not begin with PAR1); check the file"
        return "is cut short (no Parquet footer); download it again"
    return f"is not readable Parquet ({str(error).splitlines()[0]}); download it again"


class OpenFiles:
    """Each thread's last opened source, so that a footer with thousands of row groups is parsed once, not per unit."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[Source, BinaryIO, pq.ParquetFile]] = {}

    def get(self, source: Source) -> pq.ParquetFile:
        thread = threading.get_ident()
        last = self._last.get(thread)
        if last is not None and last[0] == source:
            return last[2]
        if last is not None:
            last[1].close()
        opened = source.open()
        try:
            file = open_parquet(opened, source.name)
        except DataError:
            opened.close()
            raise
        self._last[thread] = (source, opened, file)
        return file

    def close(self) -> None:
        for _, opened, _ in self._last.values():
            opened.close()
        self._last.clear()


def find_text_column(file: pq.ParquetFile, column: str, name: str) -> pa.DataType:
    """The column's type once it is known to hold text."""
    schema = file.schema_arrow
    if column not in schema.names:
        raise DataError(
            f"{name}: has no column {column!r}", fix=f"it has {', '.join(schema.names) or 'none'} (use --text-column)"
        )
    kind = schema.field(column).type
    if not _holds_text(kind):
        raise DataError(f"{name}: column {column!r} holds {kind}, not text", fix="use --text-column")
    return kind


def _holds_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _holds_text(kind.value_type)
    tests = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_binary_view,
    )
    return any(test(kind) for test in tests)


def row_groups(file: pq.ParquetFile, column: str) -> list[RowGroup]:
    """Every row group, from the footer alone."""
    metadata = file.metadata
    leaf = next(i for i in range(metadata.num_columns) if metadata.schema.column(i).path == column)
    groups, first_row = [], 0
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        chunk = group.column(leaf)
        # An unpacked byte array carries a 4-byte length before each value (Parquet PLAIN encoding).
        text_bytes = max(0, chunk.total_uncompressed_size - 4 * group.num_rows)
        groups.append(RowGroup(index, first_row, group.num_rows, chunk.total_compressed_size, text_bytes))
        first_row += group.num_rows
    return groups


def read_batches(
    file: pq.ParquetFile, column: str, group: RowGroup, batch_bytes: int, name: str
) -> Iterator[tuple[list[str | bytes | None], NDArray[np.int64] | None]]:
    """The row group's texts, about `batch_bytes` at a time, and how many bytes each has, if the column tells.

    A value that is not UTF-8 stays bytes.
    """
    rows = max(1, min(group.rows, batch_bytes * group.rows // max(1, group.text_bytes)))
    try:
        for batch in file.iter_batches(rows, row_groups=[group.index], columns=[column], use_threads=False):
            texts, sizes = values(batch.column(0)), byte_lengths(batch.column(0))
            del batch  # or a document of a gigabyte would be held twice while it is encoded
            yield texts, sizes
    except MemoryError:  # pyarrow's too; the file is as good as before
        raise OutOfMemory(f"{name}: row group {group.index}: {NO_MEMORY}") from None
    except (pa.ArrowException, OSError) as error:
        message = str(error).splitlines()[0]
        raise DataError(f"{name}: row group {group.index} is damaged ({message})", fix="download it again") from None


def values(array: pa.Array) -> list[str | bytes | None]:
    """A text column as Python values: str where it is UTF-8, bytes where it is not."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    large = array.type in (pa.large_string(), pa.large_binary())
    if array.type not in OFFSETS:
        array = array.cast(pa.binary())
    try:
        if array.null_count == 0:
            return _slices(array)
        found: list[Any] = array.cast(pa.large_string() if large else pa.string()).to_pylist()
        return found
    # One bad row must not lose its batch. (A string column is not checked by the cast, a binary one is.)
    except (UnicodeDecodeError, pa.ArrowInvalid):
        raw = array.cast(pa.large_binary() if large else pa.binary()).to_pylist()
        return [_decoded(value) for value in raw]


def _slices(array: pa.Array) -> list[str | bytes | None]:
    """The strings straight from the column's buffers: twice as fast as to_pylist, which makes a scalar of each."""
    data = array.buffers()[2]
    if len(array) == 0 or data is None:
        return [""] * len(array)
    view = memoryview(data)
    return [str(view[start:stop], "utf-8") for start, stop in itertools.pairwise(_ends(array).tolist())]


def byte_lengths(array: pa.Array) -> NDArray[np.int64] | None:
    """The size of each value, from the column's offsets; None for a column that keeps its values otherwise."""
    if array.type not in OFFSETS or array.null_count or len(array) == 0:
        return None
    return np.diff(_ends(array)).astype(np.int64)


def _ends(array: pa.Array) -> NDArray[np.signedinteger]:
    """Where each value begins in the data, and where the last one ends."""
    offsets = np.frombuffer(array.buffers()[1], OFFSETS[array.type])
    return offsets[array.offset : array.offset + len(array) + 1]


def _decoded(raw: bytes | None) -> str | bytes | None:
    try:
        return raw.decode("utf-8") if raw is not None else None
    except UnicodeDecodeError:
        return raw
