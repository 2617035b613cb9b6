"""SOURCE arguments to a list of files: paths, folders, globs, http(s) links and hf:// addresses."""

from __future__ import annotations

import glob
import io
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gptfit.errors import DataError
from gptfit.files import reading_remedy, reason_of

KINDS = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".jsonl.zst": "jsonl",
    ".txt": "txt",
    ".csv": "csv",
}


class Changed(DataError):
    """A source is not what it was when prepare began."""


@dataclass(frozen=True)
class Source:
    """One file of documents. `stamp` changes when its content may have."""

    name: str  # what errors and the manifest call it
    location: str  # a local path, or the http(s) address
    kind: str  # parquet | jsonl | csv | txt
    size: int
    stamp: str

    @property
    def key(self) -> str:
        """What the split hashes: the bare file name, so that moving a folder moves no document."""
        return self.location.split("?")[0].rstrip("/").rsplit("/", 1)[-1]

    @property
    def is_remote(self) -> bool:
        return self.location.startswith(("http://", "https://"))

    def open(self) -> BinaryIO:
        """The bytes, seekable."""
        if self.is_remote:
            from gptfit.data.http import HttpFile

            return io.BufferedReader(HttpFile(self.location, expect_stamp=self.stamp), 2**16)
        return open(self.location, "rb")


def find_sources(arguments: Iterable[str], skip: Callable[[str, str], None] | None = None) -> list[Source]:
    """Every file the arguments name, each once. `skip(name, why)` takes those that cannot be used; without it they are errors."""
    found: dict[str, Source] = {}
    for argument in arguments:
        for location, name in _expand(argument):
            try:
                source = _describe(location, name)
            except DataError as error:
                if skip is None:
                    raise
                skip(name, str(error))
                continue
            found.setdefault(location, source)
    if not found:
        raise DataError("no file to prepare", fix="give a Parquet file, a folder, a glob, a link or hf://datasets/...")
    return list(found.values())


def _expand(argument: str) -> list[tuple[str, str]]:
    """(location, name) of each file an argument stands for, in sorted order."""
    if argument.startswith(("http://", "https://")):
        return [(argument, argument)]
    if argument.startswith("hf://"):
        from gptfit.data.hub import download

        return download(argument, kind_of)
    path = Path(os.path.expanduser(argument))  # Path.expanduser raises where there is no such home
    if path.is_dir():
        files = _files_below(path)
        if not files:
            raise DataError(f"{argument}: this folder holds no {', '.join(KINDS)} file")
    elif path.exists():
        files = [str(path)]
    else:
        files = sorted(file for file in glob.glob(str(path), recursive=True) if os.path.isfile(file))
        if not files:
            raise DataError(f"{argument}: no such file", fix="check the name and the folder you are in")
    return [(file, file) for file in files]


def _files_below(folder: Path) -> list[str]:
    """Those it can use, in sorted order; a folder that may not be read is an error, or its documents would be missed."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({reason_of(error)})", fix=reading_remedy(error)) from None

    found = (
        os.path.join(place, name)
        for place, _, names in os.walk(folder, onerror=refuse)
        for name in names
        if kind_of(name)
    )
    return sorted(file for file in found if os.path.isfile(file))


def _describe(location: str, name: str) -> Source:
    kind = kind_of(location.split("?")[0])
    if kind is None:
        raise DataError(f"{name}: is none of {', '.join(KINDS)}", fix="convert or rename it")
    if location.startswith(("http://", "https://")):
        from gptfit.data.http import HttpFile

        with HttpFile(location) as file:
            return Source(name, location, kind, file.size, file.stamp)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"{name!a}: the name is not UTF-8", fix="rename the file") from None
    try:
        status = os.stat(location)
        if not stat.S_ISREG(status.st_mode):  # opening a pipe waits for somebody to write into it
            raise DataError(f"{name}: is a pipe or a device, not a file", fix="write it to a file first")
        with open(location, "rb"):  # a file that may not be read is better known now
            pass
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({reason_of(error)})", fix=reading_remedy(error)) from None
    return Source(name, location, kind, status.st_size, str(status.st_mtime_ns))


def check_unchanged(source: Source) -> None:
    """After reading: half of the old file and half of the new one must never become one data set."""
    if source.is_remote:
        return  # HttpFile compares the stamp of every answer
    try:
        status = os.stat(source.location)
        is_same = (status.st_size, str(status.st_mtime_ns)) == (source.size, source.stamp)
    except OSError:
        is_same = False
    if not is_same:
        raise Changed(f"{source.name}: changed while it was read; let it be finished, then start over with --restart")


def kind_of(name: str) -> str | None:
    """By the name's ending; a local Parquet file needs its ending too, so that a folder can be searched."""
    lowered = name.lower()
    return next((kind for ending, kind in KINDS.items() if lowered.endswith(ending)), None)
