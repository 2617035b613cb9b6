"""PrepareOptions, and what prepare reports while it works: the nouns of `gptfit prepare`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gptfit.conversation import TEMPLATE
from gptfit.data.split import SplitRule
from gptfit.errors import UsageError
from gptfit.estimate import Estimate

TAIL_FRACTION = 0.1  # nanoGPT's shakespeare


@dataclass(frozen=True)
class PrepareOptions:
    """What to prepare and how. The defaults are what most people want."""

    sources: tuple[str, ...]
    out: Path
    text_column: str = "text"
    tokenizer: str = "gpt2"  # gpt2 | bytes | chars | path of a tokenizer.json
    val_fraction: float | None = None  # None: 0.0005, raised to a floor for small data; 0.1 for a tail split
    split: str = "auto"  # hash | tail | auto: tail for a single .txt file
    seed: int = 2357  # nanoGPT's seed for this split
    shuffle: bool = False
    limit_documents: int | None = None
    limit_tokens: int | None = None
    skip_bad: bool = False
    restart: bool = False
    workers: int = 0  # 0: one per core
    engine: str = "local"  # local | ray
    chat: bool = False  # rows are conversations; a mask beside the tokens says which of them count

    def __post_init__(self) -> None:
        if self.val_fraction is not None and not 0 <= self.val_fraction < 1:
            raise UsageError(f"--val-fraction {self.val_fraction} is not between 0 and 1")
        for name, limit in (("documents", self.limit_documents), ("tokens", self.limit_tokens)):
            if limit is not None and limit < 1:
                raise UsageError(f"--limit {limit} {name} is less than one")
        if self.workers < 0:
            raise UsageError(f"--workers {self.workers} is less than one")
        if self.engine == "ray" and (self.limit_documents or self.limit_tokens):
            raise UsageError("--limit needs the order of one machine", fix="use --engine local")

    @property
    def n_workers(self) -> int:
        return self.workers or os.cpu_count() or 1

    def fingerprint(self, tokenizer_sha256: str | None) -> dict[str, Any]:
        """Every option that decides a byte of the output; workers, engine and skip_bad do not."""
        return {
            "text_column": self.text_column,
            "tokenizer": os.path.basename(self.tokenizer),
            "tokenizer_sha256": tokenizer_sha256,
            "val_fraction": self.val_fraction,
            "split": self.split,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "limit_documents": self.limit_documents,
            "limit_tokens": self.limit_tokens,
            **({"chat": TEMPLATE} if self.chat else {}),  # not in the folders of before
        }


@dataclass(frozen=True)
class Forecast:
    """What is known before any work: from footers and a small sample."""

    files: int
    rows: int | None  # None when a line file's rows are not counted beforehand
    source_bytes: int  # of the text columns and line files: what the progress bar counts
    text_bytes: float
    tokens: Estimate
    seconds: float
    disk_needed: int
    disk_free: int
    split: SplitRule
    tokenizer: str
    workers: int


@dataclass(frozen=True)
class PrepareProgress:
    """How far it is. `source_bytes` runs to the forecast's."""

    source_bytes: int
    tokens: int
    documents: int
    seconds: float
    counts: Mapping[str, int]


class PrepareReport(Protocol):
    """Takes what prepare has to say; the command line prints it, a test keeps it."""

    def forecast(self, forecast: Forecast) -> None: ...

    def progress(self, progress: PrepareProgress) -> None: ...

    def note(self, line: str) -> None: ...


class Silent:
    """A report that says nothing."""

    def forecast(self, forecast: Forecast) -> None:
        pass

    def progress(self, progress: PrepareProgress) -> None:
        pass

    def note(self, line: str) -> None:
        pass
