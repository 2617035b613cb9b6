"""run.jsonl: one self-describing event per line (header, step, eval, sample, event, end); the one writer and the reader."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from gptfit.errors import RunError
from gptfit.files import Lines, reason_of, remedy_of
from gptfit.logs.events import EVENT_WORDS, End, Eval, Event, Header, Message, Sample, Step, event_json
from gptfit.logs.sanitise import event_from_json

RUN_LOG = "run.jsonl"
BATCH_BYTES = 2**20


@dataclass(frozen=True)
class RunLog:
    """A run as read back: what it was, and what happened in order. `notes` says what was odd about the file."""

    path: Path
    header: Header = field(default_factory=Header)
    steps: Sequence[Step] = ()
    evals: Sequence[Eval] = ()
    messages: Sequence[Message] = ()
    samples: Sequence[Sample] = ()  # as they were while it trained
    end: End | None = None
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.header.name or self.path.stem

    @property
    def config(self) -> dict[str, Any]:
        return self.header.config

    @property
    def last_step(self) -> int:
        return max((events[-1].step for events in (self.steps, self.evals) if events), default=0)

    @property
    def planned_steps(self) -> int | None:
        """max_iters, or what was reached where a later start asked for less; None where the log does not say."""
        wanted = self.config.get("max_iters")
        return max(wanted, self.last_step) if wanted and wanted > 0 else None


class RunLogWriter:
    """Appends events; each line is written at once, so a crash loses at most the line being written.

    A line that the disk does not take raises, is kept, and goes first the next time.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_file():
            raise RunError(f"{self.path}: is no file, and a run's log has this name", fix="move it away")
        self._lines = Lines(self.path)

    def append(self, event: Event) -> None:
        with self._named_errors():
            self._lines.append(json.dumps(event_json(event), allow_nan=False))

    def close(self) -> None:
        """Safe on disk, then closed."""
        with self._named_errors():
            self._lines.close()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written ({reason_of(error)})", fix=remedy_of(error)) from None

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
        raise RunError(f"{file}: no such run log", fix=f"a run folder has a {RUN_LOG} in it")
    notes: list[str] = []
    run = assemble(path, iterate_events(file, notes), notes)
    if run is None:
        words = ", ".join(EVENT_WORDS.values())
        raise RunError(f"{file}: holds no run event", fix=f'looked for JSON lines with an "event" of {words}')
    return run


def assemble(path: Path, events: Iterable[Event], notes: list[str]) -> RunLog | None:
    """Events in the order they were written as one run; None when there are none."""
    header: Header | None = None
    steps: list[Step] = []
    evals: list[Eval] = []
    messages: list[Message] = []
    samples: list[Sample] = []
    end: End | None = None
    for event in events:
        match event:
            case Step():
                _rewind(steps, evals, samples, event.step)
                _drop_from(steps, event.step)
                steps.append(event)
                end = None  # a resumed run goes on past an old end, whatever the clock says
            case Eval():
                _rewind(steps, evals, samples, event.step)
                _drop_from(evals, event.step)
                evals.append(event)
                end = None
            case Header():
                header, end = event, None
            case Sample():
                samples.append(event)
            case Message():
                messages.append(event)
            case End():
                end = event
    if header is None and end is None and not (steps or evals or messages or samples):
        return None
    return RunLog(path, header or Header(), steps, evals, messages, samples, end, tuple(notes))


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
    return [event_from_json(event) for event in events]


def parse_event(line: bytes | str) -> Event | None:
    try:
        return event_from_json(json.loads(line))
    except (ValueError, RecursionError):
        return None


def _rewind(steps: list[Step], evals: list[Eval], samples: list[Sample], step: int) -> None:
    """A resumed run goes back to its checkpoint: what was written past that point did not become part of it."""
    if steps and step < steps[-1].step:
        _drop_from(steps, step)
        # An eval or a sample of step s is taken before update s, so a run that goes on with step s keeps it.
        _drop_from(evals, step + 1)
        _drop_from(samples, step + 1)


def _drop_from(events: list[Step] | list[Eval] | list[Sample], step: int) -> None:
    while events and events[-1].step >= step:
        events.pop()
