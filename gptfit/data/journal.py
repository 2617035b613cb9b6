"""The journal of an unfinished prepare: how far it came, for which options and sources."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gptfit.data.bins import write_file
from gptfit.errors import DataError
from gptfit.files import read_plain

FORMAT = "gptfit-prepare-journal"
VERSION = 2  # higher whenever units, pieces or the split are laid out otherwise: an old place would mean another one


@dataclass(frozen=True)
class Journal:
    """Everything before (unit, piece) is in the token files, whose lengths are here."""

    options: Mapping[str, Any]
    sources: tuple[Mapping[str, Any], ...]
    unit: int = 0
    piece: int = 0
    train_bytes: int = 0
    val_bytes: int = 0
    source_bytes: int = 0
    seconds: float = 0.0
    complete: bool = False
    counts: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION} | vars(self), indent=1)

    def write(self, path: Path) -> None:
        write_file(path, self.as_json().encode())


def read_journal(path: Path) -> Journal | None:
    """The journal in a folder, or None when there is none."""
    try:
        content = json.loads(read_plain(path))
        if content.pop("format") != FORMAT or content.pop("version") != VERSION:
            raise ValueError("written by another version")
        content["counts"] = Counter(content["counts"])
        content["sources"] = tuple(content["sources"])
        return Journal(**content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: damaged journal ({error})", fix="start over with --restart") from None


def resume_point(path: Path, fresh: Journal) -> Journal:
    """Where to go on: `fresh` when nothing was begun, else the journal if it is about the same work."""
    found = read_journal(path)
    if found is None:
        return fresh
    wanted = json.loads(fresh.as_json())
    changed = [
        f"{key} was {found.options.get(key)!r}, now {wanted['options'].get(key)!r}"
        for key in {**wanted["options"], **found.options}
        if found.options.get(key) != wanted["options"].get(key)
    ]
    if changed:
        raise DataError(
            f"{path.parent}: holds an unfinished prepare with other options ({'; '.join(changed)})",
            fix="use the same options to go on, or --restart to start over",
        )
    if list(found.sources) != wanted["sources"]:
        raise DataError(
            f"{path.parent}: {_first_difference(found.sources, wanted['sources'])} since this prepare began",
            fix="--restart starts over",
        )
    return replace(found, options=fresh.options, sources=fresh.sources)


def _first_difference(before: tuple[Mapping[str, Any], ...], now: list[Mapping[str, Any]]) -> str:
    for old, new in zip(before, now, strict=False):
        if old != new:
            return f"{old['path']} changed" if old["path"] == new["path"] else f"{old['path']} became {new['path']}"
    return f"the sources changed from {len(before)} to {len(now)} files"
