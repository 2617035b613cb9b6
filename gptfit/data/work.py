"""Units of work: which rows are read together, in which order; a pure function of footers, seed and --shuffle."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pyarrow.parquet import ParquetFile

from gptfit.data.parquet import RowGroup, find_text_column, open_parquet, row_groups
from gptfit.data.sources import Source
from gptfit.errors import DataError

BATCH_BYTES = 2 * 2**20  # text handed to the encoder at once; 4 MiB took 3 % more CPU time, 1 MiB no less
SHUFFLE_BYTES = 32 * 2**20  # text whose documents are mixed with each other under --shuffle


@dataclass(frozen=True)
class Span:
    """A stretch of one source: a row group of Parquet, or a whole line file (group is None)."""

    source: int  # index into the list of sources
    source_bytes: int  # its part of the progress bar
    text_bytes: int
    group: RowGroup | None = None


@dataclass(frozen=True)
class Unit:
    """Spans read by one worker, one after another. Units are written in the order of their index."""

    index: int
    spans: tuple[Span, ...]

    @property
    def source_bytes(self) -> int:
        return sum(span.source_bytes for span in self.spans)


def source_spans(source: Source, index: int, column: str) -> list[Span]:
    """The stretches of one source, from its footer; `index` is its place in the list of sources."""
    if source.kind != "parquet":
        if source.size == 0:
            raise DataError(f"{source.name}: is empty (0 bytes)", fix="give a file with text")
        return [Span(index, source.size, 0)]
    # A local path rather than an open file: the error for a file that is no Parquet looks at its first bytes.
    if source.is_remote:
        with source.open() as opened:
            file = open_parquet(opened, source.name)
            return _parquet_spans(file, source, index, column)
    return _parquet_spans(open_parquet(source.location, source.name), source, index, column)


def _parquet_spans(file: ParquetFile, source: Source, index: int, column: str) -> list[Span]:
    find_text_column(file, column, source.name)
    groups = row_groups(file, column)
    return [Span(index, max(1, group.packed_bytes), group.text_bytes, group) for group in groups if group.rows]


def plan_units(spans: Sequence[Span], shuffle_seed: int | None) -> list[Unit]:
    """Small neighbours share a unit; with a shuffle seed the neighbours are drawn from all over the sources."""
    ordered = list(spans)
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(ordered)
    most = BATCH_BYTES if shuffle_seed is None else SHUFFLE_BYTES
    units: list[Unit] = []
    pending: list[Span] = []
    for span in ordered:
        if pending and sum(waiting.text_bytes for waiting in pending) + span.text_bytes > most:
            units.append(Unit(len(units), tuple(pending)))
            pending = []
        pending.append(span)
    if pending:
        units.append(Unit(len(units), tuple(pending)))
    return units


def shards(units: Sequence[Unit], n_shards: int) -> list[tuple[Unit, ...]]:
    """The units in order, cut into runs of about equal size; fewer when there are fewer units."""
    total = sum(unit.source_bytes for unit in units) or 1
    runs: list[list[Unit]] = [[] for _ in range(n_shards)]
    before = 0
    for unit in units:
        middle = before + unit.source_bytes / 2
        runs[min(n_shards - 1, int(n_shards * middle / total))].append(unit)
        before += unit.source_bytes
    return [tuple(run) for run in runs if run]
