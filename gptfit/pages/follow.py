"""What was written to a run.jsonl since a byte offset: only whole new lines, as the columns the page appends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gptfit.errors import RunError
from gptfit.logs.events import End, Eval, Event, Sample, Step
from gptfit.logs.runlog import RUN_LOG, parse_event
from gptfit.pages.series import EVAL_COLUMNS, STEP_COLUMNS, columns, samples, thin

MOST_BYTES = 8 * 2**20  # per answer; the page asks again at once when there is more
MOST_ROWS = 2000
LONGEST_LINE = 2**20


def news(path: Path, offset: int) -> dict[str, Any]:
    """New steps, evals and samples, and the offset to ask from next. A file that shrank starts over."""
    try:
        size = path.stat().st_size
        if size < offset or path.name != RUN_LOG:
            return _nothing(size, reset=size != offset)
        with open(path, "rb") as file:
            file.seek(offset)
            chunk = file.read(MOST_BYTES)
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(chunk) == MOST_BYTES and b"\n" not in chunk:
        return _answer([], offset + len(chunk), more=True)  # inside a line too long to be one of ours: passed over
    whole = chunk[: chunk.rfind(b"\n") + 1]
    events = [event for line in whole.splitlines() if (event := parse_event(line)) is not None]
    return _answer(events, offset + len(whole), more=size > offset + len(whole) and len(chunk) == MOST_BYTES)


def end_of_whole_lines(path: Path) -> int:
    """Where the last whole line ends; a line being written is for the next answer. Other programs' logs: the size."""
    try:
        if path.name != RUN_LOG:
            return path.stat().st_size
        with open(path, "rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - LONGEST_LINE)
            file.seek(start)
            return start + file.read().rfind(b"\n") + 1
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror or error}") from error


def _nothing(offset: int, reset: bool) -> dict[str, Any]:
    return {
        "offset": offset,
        "reset": reset,
        "more": False,
        "steps": {"step": []},
        "evals": {"step": []},
        "samples": [],
        "ended": None,
    }


def _answer(events: list[Event], offset: int, more: bool) -> dict[str, Any]:
    steps = [event for event in events if isinstance(event, Step)]
    if len(steps) > MOST_ROWS:
        steps = [steps[i] for i in thin([event.loss for event in steps], MOST_ROWS)]
    ends = [event for event in events if isinstance(event, End)]
    return {
        "offset": offset,
        "reset": False,
        "more": more,
        "steps": columns(steps, STEP_COLUMNS),
        "evals": columns([event for event in events if isinstance(event, Eval)], EVAL_COLUMNS),
        "samples": samples([event for event in events if isinstance(event, Sample)]),
        "ended": (ends[-1].reason or "done") if ends else None,
    }
