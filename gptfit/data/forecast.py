"""The forecast before work: footers of all files, a small sample encoded, the split rule, disk and time."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import stdev

import numpy as np
import pyarrow as pa

from gptfit.data.documents import DocumentBatch, Reading, plain_reading, read_unit
from gptfit.data.encode import encode_documents
from gptfit.data.options import TAIL_FRACTION, Forecast, PrepareOptions, PrepareReport
from gptfit.data.parquet import OpenFiles
from gptfit.data.sources import Source, find_sources
from gptfit.data.split import SplitRule, hash_rule
from gptfit.data.tokenizer import Tokenizer, byte_tokenizer
from gptfit.data.work import Span, Unit, plan_units, source_spans
from gptfit.errors import DataError
from gptfit.estimate import Estimate

FOOTERS_AT_ONCE = 16
SAMPLED_SPANS = 8
SAMPLED_CHARS = 2**18  # from each; all of it takes a tenth of a second
COUNTED_LINE_BYTES = 64 * 2**20  # line files up to this are read once to count their rows, for an exact split
# Relative half-widths: of an estimate from one sample, and the least for several samples.
WIDE_RANGE, NARROW_RANGE = 0.15, 0.03


@dataclass(frozen=True)
class WorkPlan:
    """The work laid out: sources, units and how to read them."""

    reading: Reading
    units: list[Unit]
    rows: dict[int, int]  # by source; line files are missing when not counted
    skipped_files: list[dict[str, str]]
    forecast: Forecast


def lay_out(options: PrepareOptions, tokenizer: Tokenizer | None, report: PrepareReport) -> WorkPlan:
    """Reads every footer, samples the text, and settles the split. `tokenizer` is None for chars, not yet known."""
    skipped: list[dict[str, str]] = []

    def skip(name: str, why: str) -> None:
        skipped.append({"path": name, "why": why})
        report.note(f"{why} (file skipped)")

    sources, spans, rows = _open_all(options, find_sources(options.sources, skip if options.skip_bad else None), skip)
    tail = _is_tail(options, sources)
    if options.chat and (other := next((source for source in sources if source.kind != "jsonl"), None)):
        raise DataError(f"{other.name}: --chat reads JSON lines, one conversation per line", fix="give .jsonl files")
    plain = plain_reading(sources, options.text_column, options.skip_bad, options.chat)
    sample = _sample(replace(plain, batch_bytes=SAMPLED_CHARS), spans, tokenizer or byte_tokenizer())
    if not tail:
        rows |= _count_lines(plain, spans, rows)
    tokens = _expected_tokens(sample, spans, sum(rows.values()))
    share = _limited_share(options, tokens.value, sum(rows.values()))
    tokens = tokens.map(share)
    text_bytes = sum(span.text_bytes or span.source_bytes * sample.text_per_source for span in spans)
    if tail:
        fraction = TAIL_FRACTION if options.val_fraction is None else options.val_fraction
        rule = SplitRule("tail", fraction, options.seed)
    else:
        known = [(s.key, rows[i]) for i, s in enumerate(sources)] if len(rows) == len(sources) else None
        rule = hash_rule(options.val_fraction, options.seed, known, tokens.value)
    shuffle_seed = options.seed if options.shuffle else None
    reading = replace(plain, split=rule, shuffle_seed=shuffle_seed)
    item_bytes = (
        np.dtype(tokenizer.dtype if tokenizer else "uint16").itemsize + options.chat
    )  # a byte per token says what counts
    forecast = Forecast(
        files=len(sources),
        rows=sum(rows.values()) if len(rows) == len(sources) else None,
        source_bytes=sum(span.source_bytes for span in spans),
        text_bytes=text_bytes,
        tokens=tokens,
        seconds=sample.seconds_per_text_byte * text_bytes * share / options.n_workers,
        disk_needed=int(tokens.high * item_bytes),
        disk_free=free_bytes(options.out),
        split=rule,
        tokenizer=options.tokenizer,
        workers=options.n_workers,
    )
    return WorkPlan(reading, plan_units(spans, shuffle_seed), rows, skipped, forecast)


def _open_all(
    options: PrepareOptions, sources: Sequence[Source], skip: Callable[[str, str], None]
) -> tuple[list[Source], list[Span], dict[int, int]]:
    """The sources that can be read, their spans, and the rows of the Parquet ones."""
    good: list[Source] = []
    spans: list[Span] = []
    rows: dict[int, int] = {}
    for source, answer in zip(sources, _footers(sources, options.text_column), strict=True):
        if isinstance(answer, DataError):
            if not options.skip_bad:
                raise answer
            skip(source.name, str(answer))
            continue
        found = [replace(span, source=len(good)) for span in answer]
        if source.kind == "parquet":
            rows[len(good)] = sum(span.group.rows for span in found if span.group)
        spans += found
        good.append(source)
    if not spans:
        raise DataError(f"no documents in {', '.join(options.sources)}", fix="check the sources")
    return good, spans, rows


def _footers(sources: Sequence[Source], column: str) -> Iterator[list[Span] | DataError]:
    """Several at once: of thousands of files over a network each takes a tenth of a second of waiting."""

    def look(source: Source) -> list[Span] | DataError:
        try:
            return source_spans(source, 0, column)
        except DataError as error:
            return error

    with ThreadPoolExecutor(FOOTERS_AT_ONCE) as pool:
        yield from pool.map(look, sources)


def _is_tail(options: PrepareOptions, sources: Sequence[Source]) -> bool:
    single_text = len(sources) == 1 and sources[0].kind == "txt"
    if options.split == "tail" and not single_text:
        raise DataError("--split tail cuts one text: give a single .txt file, or use --split hash")
    return single_text and options.split != "hash"


@dataclass(frozen=True)
class _EncodedSample:
    ratios: list[float]  # tokens per byte of text, one per sampled span
    tokens_per_text_byte: float
    tokens_per_source_byte: float  # of line files
    text_per_source: float
    seconds_per_text_byte: float  # of one core, reading and encoding


def _sample(reading: Reading, spans: Sequence[Span], tokenizer: Tokenizer) -> _EncodedSample:
    """The first batch of a few spans, spread over all of them."""
    # At random, not evenly: sources of equal length would be in step with even spacing. The seed is fixed because
    # the split's floor depends on the result, and a resumed prepare must find the same.
    chosen = random.Random(0).sample(spans, min(SAMPLED_SPANS, len(spans)))
    ratios: list[float] = []
    tokens = text_bytes = source_bytes = 0
    paces = []
    for batch, seconds in _first_batches(reading, chosen):
        started = time.process_time()
        piece = encode_documents(_head(batch), tokenizer, None)
        encoding = (time.process_time() - started) / max(1, int(piece.text_bytes.sum()))
        paces.append(seconds / sum(map(len, batch.texts)) + encoding)
        ratios.append(int(piece.lengths.sum()) / max(1, int(piece.text_bytes.sum())))
        tokens += int(piece.lengths.sum())
        text_bytes += int(piece.text_bytes.sum())
        source_bytes += piece.account.source_bytes
    return _EncodedSample(
        ratios=ratios,
        tokens_per_text_byte=tokens / max(1, text_bytes),
        tokens_per_source_byte=tokens / max(1, source_bytes),
        text_per_source=text_bytes / max(1, source_bytes),
        seconds_per_text_byte=min(paces, default=0.0),  # the first ones fill caches and are several times slower
    )


def _first_batches(reading: Reading, spans: Sequence[Span]) -> Iterator[tuple[DocumentBatch, float]]:
    """The first batch of each span, and the seconds it took to read."""
    with closing(OpenFiles()) as files:
        for span in spans:
            started = time.process_time()
            with closing(read_unit(reading, Unit(0, (span,)), files)) as batches:
                batch = next(batches, None)
            if batch is not None and batch.texts:
                yield batch, time.process_time() - started
    pa.default_memory_pool().release_unused()


def _head(batch: DocumentBatch) -> DocumentBatch:
    """The batch's first SAMPLED_CHARS or so."""
    total, texts = 0, []
    for text in batch.texts:
        texts.append(text[: SAMPLED_CHARS - total])
        total += len(texts[-1])
        if total >= SAMPLED_CHARS:
            break
    source_bytes = max(1, batch.account.source_bytes * total // sum(map(len, batch.texts)))
    account = replace(batch.account, source_bytes=source_bytes)
    return replace(batch, texts=texts, is_val=batch.is_val[: len(texts)], account=account, text_bytes=None)


def _expected_tokens(sample: _EncodedSample, spans: Sequence[Span], rows: int) -> Estimate:
    ratios = sample.ratios
    if not ratios:
        return Estimate(0.0, 0.0, 0.0, "measured")
    mean = sample.tokens_per_text_byte
    parquet = sum(span.text_bytes for span in spans if span.group)
    lines = sum(span.source_bytes for span in spans if not span.group)
    value = parquet * mean + lines * sample.tokens_per_source_byte + rows
    spread = (
        WIDE_RANGE if len(ratios) < 2 or lines else max(NARROW_RANGE, 2 * stdev(ratios) / mean / len(ratios) ** 0.5)
    )
    return Estimate.within(value, min(spread, 0.9), "measured")


def _limited_share(options: PrepareOptions, tokens: float, rows: int) -> float:
    """The part of the sources that --limit leaves."""
    share = 1.0
    if options.limit_tokens is not None:
        share = min(share, options.limit_tokens / max(1.0, tokens))
    if options.limit_documents is not None and rows:
        share = min(share, options.limit_documents / rows)
    return share


def _count_lines(reading: Reading, spans: Sequence[Span], rows: dict[int, int]) -> dict[int, int]:
    """Rows of the line files, when they are small enough to be read twice."""
    line_spans = [span for span in spans if span.group is None]
    if sum(span.source_bytes for span in line_spans) > COUNTED_LINE_BYTES:
        return {}
    with closing(OpenFiles()) as files:
        return {
            span.source: sum(batch.account.rows for batch in read_unit(reading, Unit(0, (span,)), files))
            for span in line_spans
            if span.source not in rows
        }


def free_bytes(folder: Path) -> int:
    """Free space where the folder is or will be."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free
