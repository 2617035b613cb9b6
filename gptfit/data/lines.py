"""Line files in: .jsonl (plain, .gz, .zst), .csv and .txt, streamed in bounded pieces."""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gptfit.conversation import pack, read_conversation
from gptfit.data.sources import Source
from gptfit.errors import DataError

CHUNK = 2**20
MOST_LINE_BYTES = 256 * 2**20  # a packed file of a few kilobytes can unpack to one line of any size
# No token of GPT-2 spans the place before a blank that follows a non-blank, so text may be cut there.
SAFE_CUT = re.compile(r"\S(?=[ \n])")


@dataclass(frozen=True)
class Bad:
    """A row that cannot be used: the reason it is counted under, and the line to say."""

    reason: str
    why: str


@dataclass(frozen=True)
class Read:
    """Values of the next rows, and how far they moved through the file.

    In text that was not UTF-8 the bad bytes are surrogates (Python's surrogateescape), for the caller to repair.
    """

    values: Sequence[str | bytes | Bad | None]
    source_bytes: int
    continues: bool = False  # the last value's document goes on in the next one
    val: bool | None = None  # set when the reader itself splits (tail)
    text_bytes: NDArray[np.int64] | None = None  # of each value, where the file tells


class _Lines:
    """Lines of a possibly compressed file, knowing how far it has read in the file itself."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._raw = source.open()
        name = source.location.split("?")[0].lower()
        packing = "gzip" if name.endswith(".gz") else "zstd" if name.endswith(".zst") else None
        self._unpacked = pa.CompressedInputStream(pa.PythonFile(self._raw, mode="r"), packing) if packing else None
        self._told = 0

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def moved(self) -> int:
        """Source bytes read since the last call."""
        position = self._raw.tell()
        moved, self._told = position - self._told, position
        return moved

    def chunks(self) -> Iterator[bytes]:
        """Pieces of bytes that end at line ends."""
        rest: list[bytes] = []
        waiting = 0
        while chunk := self._read():
            head, newline, tail = chunk.rpartition(b"\n")
            if newline:
                yield b"".join((*rest, head, newline))
                rest = []
            if tail:
                rest.append(tail)
                waiting = len(tail) if newline else waiting + len(tail)
                if waiting > MOST_LINE_BYTES:
                    raise DataError(
                        f"{self.source.name}: a line is longer than {MOST_LINE_BYTES // 2**20} MiB",
                        fix="split it, or use Parquet",
                    )
        if rest:
            yield b"".join(rest)

    def _read(self) -> bytes:
        try:
            return bytes(self._unpacked.read(CHUNK)) if self._unpacked else self._raw.read(CHUNK)
        except (pa.ArrowException, OSError) as error:
            message = str(error).splitlines()[0]
            raise DataError(f"{self.source.name}: cannot be read ({message})", fix="download it again") from None


def read_jsonl(source: Source, column: str | None, batch_bytes: int) -> Iterator[Read]:
    """One JSON object per line, its text under `column`; None: a conversation per line, packed."""
    number = 0
    with _Lines(source) as lines:
        values: list[str | Bad | None] = []
        size = 0
        for chunk in lines.chunks():
            for line in chunk.split(b"\n"):
                number += 1
                if line.strip():
                    values.append(_json_text(line, column, f"{source.name}:{number}"))
            number -= 1  # a chunk ends with a newline, so its last split is the empty rest of the line
            size += len(chunk)
            if size >= batch_bytes:
                yield Read(values, lines.moved())
                values, size = [], 0
        yield Read(values, lines.moved())


def _json_text(line: bytes, column: str | None, where: str) -> str | Bad | None:
    try:
        row = json.loads(line.decode("utf-8", "surrogateescape"))
    except ValueError as error:
        return Bad("not JSON", f"{where}: is not JSON ({error}); fix the line or use --skip-bad")
    if column is None:
        return _packed(row, where)
    if not isinstance(row, dict) or column not in row:
        present = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        return Bad("no text column", f"{where}: has no {column!r}; it has {present} (use --text-column)")
    text = row[column]
    if text is not None and not isinstance(text, str):
        return Bad("not text", f"{where}: {column!r} holds {type(text).__name__}, not text; use --text-column")
    return text


def _packed(row: Any, where: str) -> str | Bad:
    try:
        return pack(read_conversation(row))
    except ValueError as error:
        return Bad("no conversation", f"{where}: {error}; fix the line or use --skip-bad")


def read_csv(source: Source, column: str, batch_bytes: int) -> Iterator[Read]:
    """A CSV file with a header line; quoted fields may hold newlines."""
    with source.open() as opened:
        reader = csv.reader(io.TextIOWrapper(opened, "utf-8-sig", errors="surrogateescape", newline=""))
        csv.field_size_limit(2**31 - 1)  # for the whole process; putting it back would cut other threads' fields
        try:
            header = next(reader, [])
            if column not in header:
                raise DataError(
                    f"{source.name}: has no column {column!r}", fix=f"it has {', '.join(header)} (use --text-column)"
                )
            yield from _csv_pieces(reader, header.index(column), batch_bytes, opened)
        except csv.Error as error:
            raise DataError(f"{source.name}:{reader.line_num}: is not CSV ({error})", fix="fix the line") from None


def _csv_pieces(reader: Iterable[list[str]], index: int, batch_bytes: int, opened: BinaryIO) -> Iterator[Read]:
    values: list[str | None] = []
    size = told = 0
    for row in reader:
        if not row:
            continue  # a blank line, which csv gives as no fields
        values.append(row[index] if index < len(row) else None)
        size += len(values[-1] or "")
        if size >= batch_bytes:
            yield Read(values, opened.tell() - told)
            values, size, told = [], 0, opened.tell()
    yield Read(values, opened.tell() - told)


def read_txt(source: Source, batch_chars: int, tail: float | None) -> Iterator[Read]:
    """The whole file as one document, in pieces cut where no token can span.

    With `tail` the last part of its characters, that fraction, is validation, as in nanoGPT's shakespeare.
    """
    with source.open() as opened:
        if tail is None:
            yield from _txt_pieces(_text_chunks(opened), opened, batch_chars, None)
            return
        train_chars = int(sum(map(len, _text_chunks(opened))) * (1 - tail))
        opened.seek(0)
        chunks = _text_chunks(opened)
        rest: list[str] = []
        yield from _txt_pieces(_head(chunks, train_chars, rest), opened, batch_chars, False)
        yield from _txt_pieces(itertools.chain(rest, chunks), opened, batch_chars, True)


def _head(chunks: Iterator[str], n_chars: int, rest: list[str]) -> Iterator[str]:
    """The first `n_chars` characters of the chunks; what is over goes to `rest`."""
    while n_chars and (chunk := next(chunks, "")):
        yield chunk[:n_chars]
        rest[:] = [chunk[n_chars:]]
        n_chars -= min(n_chars, len(chunk))


def _txt_pieces(chunks: Iterable[str], opened: BinaryIO, batch_chars: int, val: bool | None) -> Iterator[Read]:
    text, told = "", opened.tell()
    for chunk in chunks:
        text += chunk
        cut = _last_safe_cut(text) if len(text) >= batch_chars else 0
        if cut:
            yield Read([text[:cut]], opened.tell() - told, True, val)
            text, told = text[cut:], opened.tell()
    yield Read([text], opened.tell() - told, False, val)


def _text_chunks(opened: BinaryIO) -> Iterator[str]:
    """Decoded text with newlines as nanoGPT's open(path, 'r') gives them."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("surrogateescape"), translate=True)
    while chunk := opened.read(CHUNK):
        yield decoder.decode(chunk)
    yield decoder.decode(b"", final=True)


def _last_safe_cut(text: str) -> int:
    """The end of the last place where text may be cut, or 0."""
    position = 0
    for match in SAFE_CUT.finditer(text, max(0, len(text) - 2**16)):
        position = match.end()
    return position
