"""Describe: what a source file or a prepared folder holds, with its first documents."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from gptfit import sane
from gptfit.data.documents import plain_reading, read_unit
from gptfit.data.measure import ParquetFacts, measure_parquet
from gptfit.data.parquet import OpenFiles, open_parquet
from gptfit.data.sources import Source, find_sources
from gptfit.data.tokenizer import load_tokenizer
from gptfit.data.work import Unit, source_spans
from gptfit.dataset import MANIFEST, DatasetInfo, Split, read_dataset
from gptfit.errors import DataError
from gptfit.files import read_plain, reading_remedy, reason_of

SHOWN_DOCUMENTS = 3
SHOWN_CHARS = 300
SHOWN_TOKENS = 64


@dataclass(frozen=True)
class SourceDescription:
    """One source file. `columns` and `facts` are known for Parquet only."""

    source: Source
    columns: list[tuple[str, str]]
    row_groups: int | None
    compression: str | None
    created_by: str | None
    facts: ParquetFacts | None
    samples: list[str]


@dataclass(frozen=True)
class SplitStart:
    """The first tokens of a split, decoded back."""

    name: str
    split: Split
    tokens: list[int]
    text: str


@dataclass(frozen=True)
class FolderDescription:
    """One prepared folder, and its manifest when it has one."""

    info: DatasetInfo
    starts: list[SplitStart]
    manifest: dict[str, Any] | None


def describe_source(path: str, column: str = "text") -> SourceDescription:
    """Schema, counts, and the first documents of a file."""
    source = find_sources([path])[0]
    columns: list[tuple[str, str]] = []
    groups = compression = created_by = facts = None
    if source.kind == "parquet":
        with closing(source.open()) as opened:
            file = open_parquet(opened if source.is_remote else source.location, source.name)
            columns = [(field.name, str(field.type)) for field in file.schema_arrow]
            groups = file.metadata.num_row_groups
            compression = file.metadata.row_group(0).column(0).compression if groups and columns else None
            created_by = file.metadata.created_by
        if column not in [name for name, _ in columns]:
            # The schema is what the person needs now; there is no text to show.
            return SourceDescription(source, columns, groups, compression, created_by, None, [])
        facts = measure_parquet(source.location, column) if not source.is_remote else None
    return SourceDescription(source, columns, groups, compression, created_by, facts, _samples(source, column))


def _samples(source: Source, column: str) -> list[str]:
    reading = plain_reading([source], column)
    found: list[str] = []
    with closing(OpenFiles()) as files:
        for span in source_spans(source, 0, column):
            with closing(read_unit(reading, Unit(0, (span,)), files)) as batches:
                for batch in batches:
                    found += [_beginning(text) for text in islice(batch.texts, SHOWN_DOCUMENTS - len(found))]
                    if len(found) == SHOWN_DOCUMENTS:
                        return found
    return found


def _beginning(text: str) -> str:
    """As much as can be looked at, up to the end of a word."""
    if len(text) <= SHOWN_CHARS:
        return text
    words = text[: SHOWN_CHARS + 1].rsplit(None, 1)
    return f"{words[0] if len(words) == 2 else text[:SHOWN_CHARS]} ..."


def describe_folder(folder: str | Path) -> FolderDescription:
    """What a prepared folder holds; also one that nanoGPT made."""
    info = read_dataset(folder)
    manifest = info.folder / MANIFEST
    content = _account(manifest) if info.has_manifest else None
    tokenizer = load_tokenizer(info)
    starts = []
    for name, split in (("train", info.train), ("val", info.val)):
        if split is not None and split.files:
            tokens = np.fromfile(split.files[0], info.dtype, SHOWN_TOKENS).tolist()
            starts.append(SplitStart(name, split, tokens, tokenizer.decode(tokens)))
    if not starts:
        raise DataError(f"{folder}: its token files are empty", fix="prepare the folder again")
    return FolderDescription(info, starts, content)


def _account(path: Path) -> dict[str, Any]:
    """The manifest's account of how the data was made, where it is one that can be shown."""
    try:
        content = sane.mapping(json.loads(read_plain(path)), "its content")
        rule = sane.mapping(content["split_rule"], "split_rule")
        sane.text(rule["kind"], "split_rule kind", 100)
        sane.number(rule["fraction"], "split_rule fraction", 0, 1)
        sane.integer(rule["seed"], "split_rule seed", -(2**63), 2**63)
        for title in ("skipped", "replaced"):
            for why, number in sane.mapping(content.get(title) or {}, title).items():
                sane.integer(number, f"{title} {why[:50]}", 0, 2**53)
        for source in sane.sequence(content["sources"], "sources", 10**6):
            sane.text(sane.mapping(source, "a source")["path"], "a source's path")
            sane.integer(source["size"], "a source's size", 0, 2**63)
            if source.get("rows") is not None:
                sane.integer(source["rows"], "a source's rows", 0, 2**53)
        return content
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({reason_of(error)})", fix=reading_remedy(error)) from None
    except KeyError as error:
        raise DataError(f"{path}: damaged manifest (it has no {error})", fix="prepare the folder again") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: damaged manifest ({reason_of(error)})", fix="prepare the folder again") from None
