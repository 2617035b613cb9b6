"""run.jsonl: one self-describing event per line (header, step, eval, event, end); append and read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from gptfit.errors import RunError

RUN_LOG = "run.jsonl"
FORMAT = 1
EVENTS = ("header", "step", "eval", "event", "end")
BATCH_BYTES = 2**20

Event = dict[str, Any]


@dataclass(frozen=True)
class RunLog:
    """A run as read back: what it was, and what happened in order. `notes` says what was odd about the file."""

    path: Path
    header: Event
    steps: tuple[Event, ...] = ()
    evals: tuple[Event, ...] = ()
    events: tuple[Event, ...] = ()
    end: Event | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        return str(self.header.get("name") or self.path.stem)

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.header.get("config") or {})


class RunLogWriter:
    """Appends events; each line is flushed, so a crash loses at most the line being written."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        _end_torn_line(self.path)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the run

    def append(self, event: Mapping[str, Any]) -> None:
        """NaN and infinity become null: JSON has neither, and a reader must not choke on a diverged run."""
        with self._named_errors():
            self._file.write(json.dumps(_plain(event), allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Safe on disk, then closed."""
        if not self._file.closed:
            with self._named_errors(), self._file:
                self._file.flush()
                os.fsync(self._file.fileno())

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written ({error.strerror}); make room on this disk") from None

    def __enter__(self) -> RunLogWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_run(path: str | Path) -> RunLog:
    """A run folder or its run.jsonl. Damaged lines are counted in `notes`; a resumed run is stitched by step."""
    path = Path(path)
    file = path / RUN_LOG if path.is_dir() else path
    if not file.is_file():
        raise RunError(f"{file}: no such run log; a run folder has a {RUN_LOG} in it")
    notes: list[str] = []
    run = assemble(path, iterate_events(file, notes), notes)
    if run is None:
        raise RunError(f'{file}: holds no run event; looked for JSON lines with an "event" of {", ".join(EVENTS)}')
    return run


def assemble(path: Path, events: Iterable[Event], notes: list[str]) -> RunLog | None:
    """Events in the order they were written as one run; None when there are none."""
    by_kind: dict[str, list[Event]] = {kind: [] for kind in EVENTS}
    for event in events:
        if event["event"] in ("step", "eval"):
            _rewind(by_kind, event)
        by_kind[event["event"]].append(event)
    if not any(by_kind.values()):
        return None
    return RunLog(
        path=path,
        header=by_kind["header"][-1] if by_kind["header"] else {},
        steps=tuple(by_kind["step"]),
        evals=tuple(by_kind["eval"]),
        events=tuple(by_kind["event"]),
        end=_last_end(by_kind),
        notes=tuple(notes),
    )


def iterate_events(file: Path, notes: list[str]) -> Iterator[Event]:
    """Every readable event in file order; what could not be read is said in `notes`."""
    bad = 0
    with open(file, "rb") as lines:
        while batch := lines.readlines(BATCH_BYTES):
            for line, event in zip(batch, _parse_batch(batch), strict=True):
                if event is not None:
                    yield event
                elif line.strip():
                    bad += 1
                    if not line.endswith(b"\n"):
                        notes.append("the last line is torn, as after a crash; it was left out")
                        bad -= 1
    if bad:
        notes.append(
            f"{bad} line{'s' if bad > 1 else ''} could not be read and {'were' if bad > 1 else 'was'} left out"
        )


def _parse_batch(lines: list[bytes]) -> list[Event | None]:
    """Many lines as one JSON array: more than twice as fast, and equal keys become one object in memory."""
    try:
        events = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        return [parse_event(line) for line in lines]
    if len(events) != len(lines):  # two halves of a broken line can make one whole
        return [parse_event(line) for line in lines]
    return [_checked(event) for event in events]


def parse_event(line: bytes | str) -> Event | None:
    try:
        return _checked(json.loads(line))
    except (ValueError, RecursionError):
        return None


def _checked(event: Any) -> Event | None:
    if not isinstance(event, dict) or event.get("event") not in EVENTS:
        return None
    if event["event"] not in ("step", "eval"):
        return event
    step = event.get("step")
    return event if type(step) is int and 0 <= step < 2**53 else None


def _rewind(by_kind: dict[str, list[Event]], event: Event) -> None:
    """A resumed run goes back to its checkpoint: what was written past that point did not become part of it."""
    step = event["step"]
    if by_kind["step"] and step < by_kind["step"][-1]["step"]:
        _drop_from(by_kind["step"], step)
        # An eval of step s is taken before update s, so a run that goes on with step s keeps it.
        _drop_from(by_kind["eval"], step + 1)
    _drop_from(by_kind[event["event"]], step)


def _drop_from(events: list[Event], step: int) -> None:
    while events and events[-1]["step"] >= step:
        events.pop()


def _last_end(by_kind: dict[str, list[Event]]) -> Event | None:
    """The end belongs to the run only if no later step follows it (a resumed run goes on past an old end)."""
    if not by_kind["end"]:
        return None
    end = by_kind["end"][-1]
    last_step = by_kind["step"][-1] if by_kind["step"] else None
    if last_step and (last_step.get("time") or 0) > (end.get("time") or 0):
        return None
    return end


def _end_torn_line(path: Path) -> None:
    """A crash may have left half a line; ending it keeps the next event readable."""
    try:
        with open(path, "rb+") as file:
            if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                file.write(b"\n")
    except FileNotFoundError:
        return


def _plain(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value
