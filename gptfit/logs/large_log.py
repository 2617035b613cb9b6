"""A log of any size, quickly: small ones whole, large ones by looking at lines spread over the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from gptfit.errors import RunError
from gptfit.files import reading_remedy, reason_of
from gptfit.logs.events import EVENT_WORDS, Step
from gptfit.logs.open_run import FORMATS, open_run, run_from_text
from gptfit.logs.runlog import RUN_LOG, RunLog, assemble, parse_event, read_run

# Read whole in about half a second: 100,000 lines.
WHOLE_BYTES = 16 * 2**20
SAMPLED_LINES = 4000
GLANCE_WHOLE_BYTES = 2**18
GLANCE_LINES = 120
EDGE_BYTES = 2**16
# Words of the lines that are few among many steps: ours and other programs'.
OWN_RARE = tuple(f'"event": "{word}"'.encode() for event, word in EVENT_WORDS.items() if event is not Step)
RARE = (*OWN_RARE, *(words for log_format in FORMATS for words in log_format.rare_words))
MOST_RARE = 20_000

CHUNK_BYTES = 4 * 2**20
LONGEST_LINE = 2**20  # a longer one is no event: it is read in pieces, which are passed over

# Read with seek and read, never mapped: a file that is cut short while it is mapped ends the process (SIGBUS).
Starts = Callable[[BinaryIO, int], set[int]]


def quick_run(path: Path) -> RunLog:
    """As open_run; of a large file a few thousand steps, and every eval, sample and header."""
    return _read(path, WHOLE_BYTES, lambda file, size: {*spread_lines(file, size, SAMPLED_LINES), *_rare_lines(file)})


def glance(path: Path) -> RunLog:
    """Enough of a run for one row of a list: a few lines spread over the file, its beginning and its end."""
    return _read(path, GLANCE_WHOLE_BYTES, lambda file, size: {*spread_lines(file, size, GLANCE_LINES)})


def _read(path: Path, whole_bytes: int, choose: Starts) -> RunLog:
    file = path / RUN_LOG if path.is_dir() else path
    ours = file.name == RUN_LOG
    try:
        if file.stat().st_size <= whole_bytes:
            return read_run(path) if ours else open_run(path)
        lines = _some_lines(file, choose)
    except OSError as error:
        raise RunError(f"{file}: cannot be read ({reason_of(error)})", fix=reading_remedy(error)) from None
    if not ours:
        return run_from_text(file, b"".join(lines).decode("utf-8", errors="replace"))
    events = [event for line in lines if (event := parse_event(line)) is not None]
    run = assemble(file, events, [f"a large log: {len(lines):,} of its lines are shown"])
    if run is None:
        raise RunError(f"{file}: holds no run event")
    return run


def _some_lines(path: Path, choose: Starts) -> list[bytes]:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        edges = {*_edge_lines(file, 0), *_edge_lines(file, max(0, size - EDGE_BYTES))}
        lines = []
        for start in sorted(choose(file, size) | edges):
            file.seek(start)
            lines.append(file.readline(LONGEST_LINE))
        return lines


def spread_lines(file: BinaryIO, size: int, count: int) -> Iterator[int]:
    """Where lines start, at equal distances through the file."""
    for i in range(1, count):
        file.seek(i * size // count)
        file.readline(LONGEST_LINE)
        if file.tell() < size:
            yield file.tell()


def _edge_lines(file: BinaryIO, first: int) -> Iterator[int]:
    """All lines that begin within EDGE_BYTES after `first`."""
    file.seek(first)
    if first:
        file.readline(LONGEST_LINE)
    while (start := file.tell()) < first + EDGE_BYTES and file.readline(LONGEST_LINE):
        yield start


def _rare_lines(file: BinaryIO) -> Iterator[int]:
    """Evals, samples, headers, ends, found by their words in chunks of whole lines."""
    file.seek(0)
    left = dict.fromkeys(RARE, MOST_RARE)
    offset = 0
    while chunk := file.read(CHUNK_BYTES) + file.readline(LONGEST_LINE):
        for words in RARE:
            place = chunk.find(words)
            while place >= 0 and left[words]:
                left[words] -= 1
                yield offset + chunk.rfind(b"\n", 0, place) + 1
                place = chunk.find(words, place + len(words))
        offset += len(chunk)
