"""Measure a Parquet file without preparing it: rows, bytes of text, and GPT-2 tokens with a range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gptfit.data.parquet import RowGroup, find_text_column, open_parquet, read_batches, row_groups, values
from gptfit.data.tokenizer import Tokenizer, gpt2_tokenizer, without_surrogates
from gptfit.errors import DataError
from gptfit.estimate import Estimate

SAMPLE_GROUPS = 12
SAMPLE_BYTES = 2 * 2**20  # of text from each sampled row group; twelve of them encode in about half a second
CHECKED_ROWS = 64  # rows whose token_count is recounted before the column is believed
# Student's t for a two-sided 90 % range with k - 1 degrees of freedom, k sampled row groups (2 to 12).
STUDENT_T = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81, 1.80)
# A few dense documents (tables, hex) carry several percent of the tokens and may all be missed: on MDN's pages
# twelve samples agreed within 1 % and were 2.3 % low.
LEAST_RELATIVE_RANGE = 0.03
SHARED_TEXT_RATIO = 1.5  # sampled text this much larger than its share of the footer means a shared dictionary
ONE_GROUP_RELATIVE_RANGE = 0.10  # one sampled piece of one row group says nothing about the spread


@dataclass(frozen=True)
class ParquetFacts:
    """What one Parquet file holds. `tokens` counts one end-of-text per document, as prepare writes them."""

    rows: int
    text_bytes: int
    tokens: Estimate
    bytes_per_token: float


def measure_parquet(path: str | Path, column: str = "text", tokenizer: Tokenizer | None = None) -> ParquetFacts:
    """Exact from a token_count column that proves right, else an estimate from a few row groups."""
    name = str(path)
    file = open_parquet(path, name)
    find_text_column(file, column, name)
    groups = [group for group in row_groups(file, column) if group.rows]
    if not groups:
        raise DataError(f"{name}: has no rows", fix="give a file with documents")
    tokenizer = tokenizer or gpt2_tokenizer()
    samples = [_sample(file, column, group, tokenizer, name) for group in _spread(groups)]
    text_bytes = _text_bytes(samples, groups)
    tokens = _counted_tokens(file, column, tokenizer, name) or _estimate(samples, text_bytes, groups, tokenizer)
    return ParquetFacts(file.metadata.num_rows, text_bytes, tokens, text_bytes / max(1.0, tokens.value))


@dataclass(frozen=True)
class _RowSample:
    documents: int
    text_bytes: int
    tokens: int  # without end-of-text
    footer_bytes: float  # the sampled rows' share of the row group's size in the footer
    whole: bool


def _spread(groups: Sequence[RowGroup]) -> list[RowGroup]:
    """Up to SAMPLE_GROUPS row groups, evenly over the file."""
    wanted = min(SAMPLE_GROUPS, len(groups))
    return [groups[(2 * i + 1) * len(groups) // (2 * wanted)] for i in range(wanted)]


def _sample(file: pq.ParquetFile, column: str, group: RowGroup, tokenizer: Tokenizer, name: str) -> _RowSample:
    batch, _ = next(read_batches(file, column, group, SAMPLE_BYTES, name))
    texts = [_text(value) for value in batch if value]
    ids, _ = tokenizer.encoder.encode_batch(texts)
    share = group.text_bytes * len(batch) / group.rows
    text_bytes = sum(len(text.encode("utf-8")) for text in texts)
    return _RowSample(len(texts), text_bytes, len(ids), share, len(batch) == group.rows)


def _text(value: str | bytes) -> str:
    return without_surrogates(value) if isinstance(value, str) else value.decode("utf-8", "replace")


def _counted_tokens(file: pq.ParquetFile, column: str, tokenizer: Tokenizer, name: str) -> Estimate | None:
    """The sum of FineWeb's token_count column, if it holds this tokenizer's counts."""
    schema = file.schema_arrow
    if "token_count" not in schema.names or not pa.types.is_integer(schema.field("token_count").type):
        return None
    try:
        counts = file.read(columns=["token_count"], use_threads=False).column("token_count")
        head = next(file.iter_batches(CHECKED_ROWS, columns=[column, "token_count"], use_threads=False))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{name}: is damaged ({str(error).splitlines()[0]})", fix="download it again") from None
    if counts.null_count:
        return None
    found = [len(tokenizer.encode(_text(value or ""))) for value in values(head.column(0))]
    if found != head.column(1).to_pylist():
        return None
    documents = pc.sum(pc.greater(counts, 0)).as_py() if tokenizer.end_of_text is not None else 0
    return Estimate.exact(float(pc.sum(counts).as_py() + documents))


def _text_bytes(samples: Sequence[_RowSample], groups: Sequence[RowGroup]) -> int:
    """The footer's sum, which is right to about 0.1 % unless equal texts share one dictionary entry."""
    footer = sum(group.text_bytes for group in groups)
    seen = sum(sample.text_bytes for sample in samples)
    if _all_seen(samples, groups):
        return seen
    ratio = seen / max(1.0, sum(sample.footer_bytes for sample in samples))
    return round(footer * ratio) if ratio > SHARED_TEXT_RATIO else footer


def _all_seen(samples: Sequence[_RowSample], groups: Sequence[RowGroup]) -> bool:
    return len(samples) == len(groups) and all(sample.whole for sample in samples)


def _estimate(
    samples: Sequence[_RowSample], text_bytes: int, groups: Sequence[RowGroup], tokenizer: Tokenizer
) -> Estimate:
    """Tokens per byte of the sampled text, times all bytes of text, with a Student t range."""
    ends = tokenizer.end_of_text is not None
    seen_tokens = sum(sample.tokens for sample in samples)
    if _all_seen(samples, groups):
        return Estimate.exact(float(seen_tokens + ends * sum(sample.documents for sample in samples)))
    per_byte = seen_tokens / max(1, sum(sample.text_bytes for sample in samples))
    value = text_bytes * per_byte + ends * sum(group.rows for group in groups)
    ratios = [sample.tokens / max(1, sample.text_bytes) for sample in samples]
    if len(ratios) < 2:
        return Estimate.within(value, ONE_GROUP_RELATIVE_RANGE, "measured")
    error = STUDENT_T[len(ratios) - 2] * stdev(ratios) / math.sqrt(len(ratios))
    return Estimate.within(value, min(0.9, max(LEAST_RELATIVE_RANGE, error / max(per_byte, 1e-9))), "measured")
