"""Documents: the texts of a unit of work in batches, with what was skipped or repaired and why."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray
from pyarrow.parquet import ParquetFile

from gptfit.data import work
from gptfit.data.lines import Bad, Read, read_csv, read_jsonl, read_txt
from gptfit.data.parquet import NO_MEMORY, OpenFiles, OutOfMemory, read_batches
from gptfit.data.sources import Changed, Source, check_unchanged
from gptfit.data.split import SplitRule
from gptfit.data.tokenizer import SURROGATE, without_surrogates
from gptfit.data.work import SHUFFLE_BYTES, Span, Unit
from gptfit.errors import DataError

ESCAPED_BYTE = re.compile("[\udc80-\udcff]")  # what surrogateescape makes of a byte that is not UTF-8
OTHER_SURROGATE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
MOST_PROBLEMS = 3  # of one kind told per batch; all are counted


@dataclass
class RowAccount:
    """What became of the rows behind a batch: how many were read, which were skipped or repaired, and why."""

    source_bytes: int = 0
    rows: int = 0
    continues: bool = False  # the last document goes on in the next batch
    skipped: Counter[str] = field(default_factory=Counter)
    replaced: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def add(self, other: RowAccount) -> None:
        self.source_bytes += other.source_bytes
        self.rows += other.rows
        self.skipped += other.skipped
        self.replaced += other.replaced
        self.problems += other.problems


@dataclass
class DocumentBatch:
    """Documents ready to encode."""

    texts: list[str]
    is_val: NDArray[np.bool_]  # of each text
    origin: str = ""  # file and rows, for messages
    account: RowAccount = field(default_factory=RowAccount)
    text_bytes: NDArray[np.int64] | None = None  # of each text, where known without encoding it


@dataclass(frozen=True)
class Reading:
    """How to read: everything a worker needs besides the unit. Plain data, so it travels to other machines."""

    sources: tuple[Source, ...]
    text_column: str
    split: SplitRule
    skip_bad: bool
    shuffle_seed: int | None
    batch_bytes: int  # of text in a batch, about
    is_chat: bool = False  # rows are conversations, texts are packed ones


def plain_reading(sources: Sequence[Source], column: str, skip_bad: bool = False, is_chat: bool = False) -> Reading:
    """Everything in order, nothing for validation."""
    return Reading(tuple(sources), column, SplitRule("hash", 0, 0), skip_bad, None, work.BATCH_BYTES, is_chat)


def read_unit(reading: Reading, unit: Unit, files: OpenFiles) -> Generator[DocumentBatch, None, None]:
    """The unit's documents in their final order."""
    batches = _in_order(reading, unit, files)
    return batches if reading.shuffle_seed is None else _mixed(batches, reading, unit.index)


def _in_order(reading: Reading, unit: Unit, files: OpenFiles) -> Generator[DocumentBatch, None, None]:
    for span in unit.spans:
        source = reading.sources[span.source]
        try:
            row = span.group.first_row if span.group else 0
            for read in _read_span(source, span, reading, files):
                yield _usable(read, row, source, reading)
                row += len(read.values) - read.continues
            check_unchanged(source)
        except (OutOfMemory, Changed):
            raise  # not the fault of a row, so never skipped
        except MemoryError:
            raise OutOfMemory(f"{source.name}: {NO_MEMORY}") from None
        except DataError as error:
            if not reading.skip_bad:
                raise
            yield _unreadable(span, str(error))


def _unreadable(span: Span, why: str) -> DocumentBatch:
    rows = span.group.rows if span.group else 1
    account = RowAccount(skipped=Counter({"unreadable": rows}), problems=[f"{why} (skipped)"])
    return DocumentBatch([], np.zeros(0, np.bool_), account=account)


def _read_span(source: Source, span: Span, reading: Reading, files: OpenFiles) -> Iterator[Read]:
    if source.kind == "parquet":
        return _read_row_group(files.get(source), source, span, reading)
    if source.kind == "txt":
        return read_txt(source, reading.batch_bytes, reading.split.fraction if reading.split.kind == "tail" else None)
    if source.kind == "jsonl":
        return read_jsonl(source, None if reading.is_chat else reading.text_column, reading.batch_bytes)
    return read_csv(source, reading.text_column, reading.batch_bytes)


def _read_row_group(file: ParquetFile, source: Source, span: Span, reading: Reading) -> Iterator[Read]:
    assert span.group is not None
    rows = told = 0
    for values, text_bytes in read_batches(file, reading.text_column, span.group, reading.batch_bytes, source.name):
        rows += len(values)
        done = span.source_bytes * rows // span.group.rows
        yield Read(values, done - told, text_bytes=text_bytes)
        told = done


def _usable(read: Read, first_row: int, source: Source, reading: Reading) -> DocumentBatch:
    """Nulls and empty texts dropped, broken text repaired, each counted; and the split of every document."""
    values = read.values
    rows = np.arange(first_row, first_row + len(values))
    val = reading.split.is_val(source.key, rows) if read.val is None else np.full(len(values), read.val)
    origin = f"{source.name}: rows {first_row} to {first_row + max(0, len(values) - 1)}"
    account = RowAccount(read.source_bytes, len(values) - read.continues, read.continues)
    batch = DocumentBatch([], val, origin, account)
    if set(map(type, values)) == {str} and "" not in values:  # nearly always
        batch.texts = list(cast(Sequence[str], values))
        batch.text_bytes = read.text_bytes
    else:
        kept = [
            _keep(value, batch, f"{source.name}: row {row}", reading.skip_bad)
            for value, row in zip(values, rows, strict=True)
        ]
        batch.is_val, rows = val[kept], rows[kept]
    if source.kind != "parquet":  # Parquet holds bytes, which cannot decode to surrogates
        for i, text in enumerate(batch.texts):
            if not text.isascii() and SURROGATE.search(text):
                batch.texts[i] = _repaired(text, batch, f"{source.name}: row {rows[i]}")
    return batch


def _keep(value: str | bytes | Bad | None, batch: DocumentBatch, where: str, skip_bad: bool) -> bool:
    """Adds a usable text to the batch; otherwise counts why not."""
    if isinstance(value, Bad):
        if not skip_bad:
            raise DataError(value.why)
        _tell(batch.account.skipped, batch.account.problems, value.reason, f"{value.why} (skipped)")
    elif not value:
        reason = "null" if value is None else "empty"
        _tell(batch.account.skipped, batch.account.problems, reason, f"{where}: {reason} text skipped")
    elif isinstance(value, bytes):
        batch.texts.append(value.decode("utf-8", "replace"))
        _tell(batch.account.replaced, batch.account.problems, "invalid UTF-8", f"{where}: invalid UTF-8 replaced")
    else:
        batch.texts.append(value)
    return bool(value) and not isinstance(value, Bad)


def _repaired(text: str, batch: DocumentBatch, where: str) -> str:
    """A line reader's text: escaped bad bytes replaced as Parquet's are, half surrogate pairs too."""
    if ESCAPED_BYTE.search(text):
        _tell(batch.account.replaced, batch.account.problems, "invalid UTF-8", f"{where}: invalid UTF-8 replaced")
        whole = OTHER_SURROGATE.sub("\ufffd", text)
        return whole.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    _tell(batch.account.replaced, batch.account.problems, "lone surrogate", f"{where}: lone surrogate replaced")
    return without_surrogates(text)


def _tell(counter: Counter[str], problems: list[str], reason: str, line: str) -> None:
    counter[reason] += 1
    if counter[reason] <= MOST_PROBLEMS:
        problems.append(line)


def _mixed(batches: Iterator[DocumentBatch], reading: Reading, unit: int) -> Generator[DocumentBatch, None, None]:
    """Documents of up to SHUFFLE_BYTES at a time in a seeded order."""
    waiting: list[DocumentBatch] = []
    size = window = 0
    unfinished = False
    for batch in batches:
        in_pieces, unfinished = unfinished or batch.account.continues, batch.account.continues
        if not in_pieces:
            waiting.append(batch)
            size += sum(map(len, batch.texts))
        if waiting and (in_pieces or size >= SHUFFLE_BYTES):
            yield from _shuffled(waiting, random.Random(f"{reading.shuffle_seed} {unit} {window}"), reading.batch_bytes)
            waiting, size, window = [], 0, window + 1
        if in_pieces:  # one text larger than a batch: its pieces must stay together
            yield batch
    if waiting:
        yield from _shuffled(waiting, random.Random(f"{reading.shuffle_seed} {unit} {window}"), reading.batch_bytes)


def _shuffled(batches: list[DocumentBatch], rng: random.Random, batch_bytes: int) -> Iterator[DocumentBatch]:
    documents = [pair for batch in batches for pair in zip(batch.texts, batch.is_val.tolist(), strict=True)]
    rng.shuffle(documents)
    first = DocumentBatch([], np.zeros(0, np.bool_), batches[0].origin)
    for batch in batches:  # what happened to the rows is reported once, with the first documents
        first.account.add(batch.account)
    for start, stop in _slices([len(text) for text, _ in documents], batch_bytes) or [(0, 0)]:
        chosen = documents[start:stop]
        batch = first if start == 0 else DocumentBatch([], np.zeros(0, np.bool_), first.origin)
        batch.texts = [text for text, _ in chosen]
        batch.is_val = np.array([val for _, val in chosen], np.bool_)
        yield batch


def _slices(sizes: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Cuts a list into runs whose sizes add up to about `most`."""
    cuts, start, total = [], 0, 0
    for i, size in enumerate(sizes):
        total += size
        if total >= most:
            cuts.append((start, i + 1))
            start, total = i + 1, 0
    return [*cuts, (start, len(sizes))] if start < len(sizes) else cuts
