"""A run.jsonl of any size, quickly: small ones whole, large ones by looking at lines spread over the file."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

from gptfit.errors import RunError
from gptfit.runlog import RUN_LOG, Event, RunLog, assemble, parse_event, read_run

# Read whole in well under a second; about 100,000 lines.
WHOLE_BYTES = 24 * 2**20
SAMPLED_LINES = 4000
GLANCE_WHOLE_BYTES = 2**18
GLANCE_LINES = 120
TAIL_BYTES = 2**16
RARE = (b'"event": "header"', b'"event": "eval"', b'"event": "event"', b'"event": "end"')
MOST_RARE = 20_000


def quick_run(path: Path) -> RunLog:
    """As read_run for a folder or file of ours; of a large file a few thousand steps and every other event."""
    file = _file(path)
    if _size(file) <= WHOLE_BYTES:
        return read_run(path)
    return _some_lines(file, lambda text: {*spread_lines(text, SAMPLED_LINES), *_rare_lines(text)})


def glance(path: Path) -> RunLog:
    """Enough of a run for one row of a list: a few lines spread over the file, and its tail."""
    file = _file(path)
    if _size(file) <= GLANCE_WHOLE_BYTES:
        return read_run(path)
    return _some_lines(file, lambda text: {*spread_lines(text, GLANCE_LINES), *_tail_lines(text)})


def _file(path: Path) -> Path:
    return path / RUN_LOG if path.is_dir() else path


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise RunError(f"{file}: cannot be read: {error.strerror or error}") from error


def _some_lines(file: Path, choose: Callable[[mmap.mmap], set[int]]) -> RunLog:
    try:
        with open(file, "rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as text:
            starts = sorted(choose(text))
            events = [event for start in starts if (event := line_event(text, start)) is not None]
    except OSError as error:
        raise RunError(f"{file}: cannot be read: {error.strerror or error}") from error
    run = assemble(file, events, [f"a large log: {len(starts):,} of its lines are shown"])
    if run is None:
        raise RunError(f"{file}: holds no run event")
    return run


def spread_lines(text: mmap.mmap, count: int) -> Iterator[int]:
    """Where lines start, at equal distances through the file, and the last whole one."""
    size = len(text)
    for i in range(count):
        start = text.find(b"\n", i * size // count) + 1 if i else 0
        if 0 < start < size or i == 0:
            yield start
    last_end = text.rfind(b"\n")
    if last_end > 0:
        yield text.rfind(b"\n", 0, last_end) + 1


def _tail_lines(text: mmap.mmap) -> Iterator[int]:
    start = text.find(b"\n", max(0, len(text) - TAIL_BYTES)) + 1
    while 0 < start < len(text):
        yield start
        start = text.find(b"\n", start) + 1


def line_event(text: mmap.mmap, start: int) -> Event | None:
    end = text.find(b"\n", start)
    return parse_event(text[start : end if end >= 0 else len(text)])


def _rare_lines(text: mmap.mmap) -> Iterator[int]:
    """Evals, samples, headers, ends: few among many steps, found by their words."""
    for words in RARE:
        place = text.find(words)
        for _ in range(MOST_RARE):
            if place < 0:
                break
            yield text.rfind(b"\n", 0, place) + 1
            place = text.find(words, place + len(words))
