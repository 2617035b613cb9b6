"""A log of any size, quickly: small ones whole, large ones by looking at lines spread over the file."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

from gptfit.errors import RunError
from gptfit.foreignlog import open_run, run_from_text
from gptfit.runlog import RUN_LOG, RunLog, assemble, parse_event, read_run

# Read whole in about half a second: 100,000 lines.
WHOLE_BYTES = 16 * 2**20
SAMPLED_LINES = 4000
GLANCE_WHOLE_BYTES = 2**18
GLANCE_LINES = 120
EDGE_BYTES = 2**16
# Words of the lines that are few among many steps: ours, nanoGPT's, nanochat's.
RARE = (
    b'"event": "header"',
    b'"event": "eval"',
    b'"event": "event"',
    b'"event": "end"',
    b": train loss ",
    b"Validation bpb",
)
MOST_RARE = 20_000

Starts = Callable[[mmap.mmap], set[int]]


def quick_run(path: Path) -> RunLog:
    """As open_run; of a large file a few thousand steps, and every eval, sample and header."""
    return _read(path, WHOLE_BYTES, lambda text: {*spread_lines(text, SAMPLED_LINES), *_rare_lines(text)})


def glance(path: Path) -> RunLog:
    """Enough of a run for one row of a list: a few lines spread over the file, its beginning and its end."""
    return _read(path, GLANCE_WHOLE_BYTES, lambda text: {*spread_lines(text, GLANCE_LINES)})


def _read(path: Path, whole_bytes: int, choose: Starts) -> RunLog:
    file = path / RUN_LOG if path.is_dir() else path
    ours = file.name == RUN_LOG
    try:
        if file.stat().st_size <= whole_bytes:
            return read_run(path) if ours else open_run(path)
        lines = _some_lines(file, choose)
    except OSError as error:
        raise RunError(f"{file}: cannot be read: {error.strerror or error}") from error
    if not ours:
        return run_from_text(file, b"".join(lines).decode("utf-8", errors="replace"))
    events = [event for line in lines if (event := parse_event(line)) is not None]
    run = assemble(file, events, [f"a large log: {len(lines):,} of its lines are shown"])
    if run is None:
        raise RunError(f"{file}: holds no run event")
    return run


def _some_lines(file: Path, choose: Starts) -> list[bytes]:
    with open(file, "rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as text:
        starts = sorted(choose(text) | {*_edge_lines(text, 0), *_edge_lines(text, len(text) - EDGE_BYTES)})
        return [text[start : text.find(b"\n", start) + 1 or len(text)] for start in starts]


def spread_lines(text: mmap.mmap, count: int) -> Iterator[int]:
    """Where lines start, at equal distances through the file."""
    for i in range(1, count):
        start = text.find(b"\n", i * len(text) // count) + 1
        if 0 < start < len(text):
            yield start


def _edge_lines(text: mmap.mmap, first: int) -> Iterator[int]:
    """All lines that begin within EDGE_BYTES after `first`."""
    start = text.find(b"\n", first) + 1 if first > 0 else 0
    while start < min(len(text), first + EDGE_BYTES):
        yield start
        start = text.find(b"\n", start) + 1
        if start == 0:
            return


def _rare_lines(text: mmap.mmap) -> Iterator[int]:
    """Evals, samples, headers, ends, found by their words."""
    for words in RARE:
        place = text.find(words)
        for _ in range(MOST_RARE):
            if place < 0:
                break
            yield text.rfind(b"\n", 0, place) + 1
            place = text.find(words, place + len(words))
