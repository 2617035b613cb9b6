"""The runs in a folder: found, and each summed up from a few lines of its log; status, ETA, sparkline."""

from __future__ import annotations

import bisect
import math
import os
import stat
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from gptfit.compare.attention import needs_attention
from gptfit.compare.facts import run_facts, usual_step_ms
from gptfit.compare.planned_loss import planned_loss
from gptfit.compare.projection import project_loss
from gptfit.errors import GptfitError, RunError
from gptfit.files import LOCK
from gptfit.logs.events import Event
from gptfit.logs.large_log import glance, quick_run
from gptfit.logs.runlog import RUN_LOG, RunLog

DEEPEST = 4  # folders below the watched one
MOST_RUNS = 2000
LOG_SUFFIXES = (".txt", ".log")
TRACKER_FOLDERS = ("wandb", "tensorboard")  # their copies of what a run prints are no runs
SPARK_POINTS = 40
FEWEST_EVALS = 5  # below this the steps say more
# A run is taken to be alive while its log was written within this many of its usual steps, or this many seconds.
ALIVE_STEPS = 20
ALIVE_SECONDS = 60
ENDINGS = {
    "max_iters": "finished",
    "eval_only": "evaluated",
    "early_stop": "stopped early",
    "max_hours": "out of hours",
    "SIGINT": "stopped by Ctrl-C",
    "SIGTERM": "stopped by SIGTERM",
    "SIGHUP": "stopped: terminal gone",
}
# What a log that somebody else wrote can bring about: it is left out, and the others are listed.
ODD = (
    GptfitError,
    OSError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
)

Stamp = tuple[int, int, int]


@dataclass
class Listing:
    """A watched folder. Summaries are kept until a log's size or time changes."""

    root: Path
    _kept: dict[str, tuple[Stamp, dict[str, Any]]] = field(default_factory=dict)
    _looked_at: dict[str, tuple[tuple[Stamp, str], list[str]]] = field(default_factory=dict)
    _foreign: dict[str, tuple[Stamp, bool]] = field(default_factory=dict)
    _odd_names: dict[str, Path] = field(default_factory=dict)  # logs whose path is not UTF-8, by the id they are given

    def runs(self) -> list[dict[str, Any]]:
        """Newest first; runs of one name are told apart by their folder."""
        found = [row for path in self._paths() if (row := self._summary(path))]
        if not differ_in_tokenizer(found):
            found = [row if row["tokenizer"] not in (None, "gpt2") else row | {"bits_per_byte": None} for row in found]
        names = Counter(row["name"] for row in found)
        for row in found:
            if names[row["name"]] > 1:
                row["name"] = row["id"].removesuffix(f"/{RUN_LOG}")
        return sorted(found, key=lambda row: -row["written"])

    def path_of(self, run_id: str) -> Path:
        """The log a page names, or RunError: nothing outside the folder, nothing that is no log."""
        with suppress(*ODD):
            path = self._odd_names.get(run_id) or (self.root / run_id).resolve()
            is_log = path.name == RUN_LOG or path.suffix in LOG_SUFFIXES
            if path.is_relative_to(self.root.resolve()) and is_log and path.is_file():
                return path
        raise RunError("no such run in this folder")

    def open(self, run_id: str) -> RunLog:
        return quick_run(self.path_of(run_id))

    def status(self, run_id: str) -> str:
        row = self._summary(self.path_of(run_id))
        return str(row["status"]) if row else "cannot be read"

    def _paths(self) -> Iterator[Path]:
        count = 0
        for folder, folders, files in os.walk(self.root):
            depth = len(Path(folder).relative_to(self.root).parts)
            folders[:] = sorted(name for name in folders if not _is_hidden(name)) if depth < DEEPEST else []
            for name in sorted(files):
                path = Path(folder, name)
                if (name == RUN_LOG or path.suffix in LOG_SUFFIXES) and self._is_run(path):
                    count += 1
                    if count <= MOST_RUNS:
                        yield path

    def _is_run(self, path: Path) -> bool:
        """A regular file inside the folder: what a page could not open is not listed, and a pipe is not opened."""
        stamp = _stamp(path)
        with suppress(*ODD):
            inside = not path.is_symlink() or path.resolve().is_relative_to(self.root.resolve())
            return bool(stamp and inside) and (path.name == RUN_LOG or self._is_foreign_log(path, stamp))
        return False

    def _is_foreign_log(self, path: Path, stamp: Stamp | None) -> bool:
        kept = self._foreign.get(str(path))
        if stamp is not None and (kept is None or kept[0] != stamp):
            try:
                glance(path)
                kept = (stamp, True)
            except ODD:
                kept = (stamp, False)
            self._foreign[str(path)] = kept
        return kept is not None and kept[1]

    def _summary(self, path: Path) -> dict[str, Any] | None:
        stamp = _stamp(path)
        if stamp is None:
            return None
        kept = self._kept.get(str(path))
        if kept is None or kept[0] != stamp:
            try:
                kept = (stamp, {"id": self._id(path), **summarise(path)})
            except ODD:
                return None
            self._kept[str(path)] = kept
        now = status(kept[1], time.time(), _owner_lives(path))
        return kept[1] | {"status": now, "attention": self._attention(path, stamp, now)}

    def _attention(self, path: Path, stamp: Stamp, now: str) -> list[str]:
        """Asked again only when the log or the status changed. A log that cannot be read just now says nothing."""
        kept = self._looked_at.get(str(path))
        if kept is None or kept[0] != (stamp, now):
            try:
                run = glance(path)
                kept = ((stamp, now), needs_attention(run_facts(run), run.steps, now))
            except ODD:
                return []
            self._looked_at[str(path)] = kept
        return kept[1]

    def _id(self, path: Path) -> str:
        name = path.relative_to(self.root).as_posix()
        shown = name.encode("utf-8", errors="backslashreplace").decode()
        if shown != name:
            self._odd_names[shown] = path
        return shown


def differ_in_tokenizer(rows: list[dict[str, Any]]) -> bool:
    """Then losses per token cannot be compared, and bits per byte can; GPT-2's tokens alone need none."""
    return len({row["tokenizer"] for row in rows} - {None}) > 1


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name in TRACKER_FOLDERS


def _stamp(path: Path) -> Stamp | None:
    """None for what is no regular file: opening a pipe would wait for a writer for ever."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return (found.st_size, found.st_mtime_ns, found.st_ino) if stat.S_ISREG(found.st_mode) else None


def _owner_lives(path: Path) -> bool | None:
    """Whether the process that trains into this folder is alive; None where nothing says which it is."""
    try:
        with open(path.parent / LOCK, encoding="ascii") as file:
            return bool(psutil.pid_exists(int(file.read(20))))
    except (OSError, ValueError, OverflowError):
        return None


def summarise(path: Path) -> dict[str, Any]:
    """One row of the list."""
    run = glance(path)
    facts = run_facts(run)
    ms, step, wanted = usual_step_ms(run.steps[-50:]), run.last_step, run.planned_steps
    end = project_loss(facts, wanted) if wanted and step < wanted else None
    left = (wanted - step) * ms / 1000 if wanted and ms and wanted > step else None
    plan = planned_loss(facts)
    losses, bits = ([facts.validation(point, bpb) for point in facts.evals] for bpb in (False, True))
    return {
        "name": run.name,
        "kind": run.header.kind,
        "ours": path.name == RUN_LOG,
        "step": step,
        "max_iters": wanted,
        "loss": run.steps[-1].loss if run.steps else None,
        "val_loss": _last(losses),
        "tokenizer": facts.tokenizer,
        "bits_per_byte": _last(bits),
        "projected": end.as_json() if end else None,
        "planned": plan.as_json() if plan else None,
        "card": facts.gpu.name if facts.gpu else facts.device_name,
        "tokens_per_s": facts.tokens_per_s,
        "mfu": facts.mfu,
        "ms": ms,
        "seconds_left": left,
        "ended": run.end and (run.end.reason or "done"),
        "written": path.stat().st_mtime,
        "said": _last_said(run),
        "spark": _spark(run),
    }


def _last(values: list[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _last_said(run: RunLog) -> float | None:
    """When the newest event happened, by its own word: a copy of a log is new, what it says is not."""
    events: list[Event] = [*run.steps[-1:], *run.evals[-1:], *run.messages[-1:], run.header]
    return max((event.time for event in events if event.time is not None), default=None)


def status(row: dict[str, Any], now: float, owner_lives: bool | None = None) -> str:
    """What the log's end says; without one, what its age and the process that holds the folder say.

    A log of another program has neither an end line nor times, so its file's age must do. A clock that was set back makes
    a log look as if it came from the future: that is as old as one from the past.
    """
    if row["ended"]:
        return ENDINGS.get(row["ended"], f"ended: {row['ended']}")
    patience = max(ALIVE_SECONDS, ALIVE_STEPS * (row["ms"] or 0) / 1000)
    age = max(abs(now - when) for when in (row["written"], row["said"]) if when is not None)
    if row["ours"]:
        # The process may be another machine's, where the folder is shared: a log that grows is alive all the same.
        if age >= patience or (owner_lives is False and age > patience / 4):
            return "silent" if owner_lives else "crashed"
        return "running"
    if row["max_iters"] and row["step"] >= row["max_iters"] - 1:
        return "finished"
    return "running" if age < patience else "no longer written"


def _spark(run: RunLog) -> list[float]:
    """The loss in a few numbers at equal distances: of evals where there are enough, else of steps."""
    points = [(event.step, event.val_loss) for event in run.evals]
    if len(points) < FEWEST_EVALS:
        points = [(event.step, event.loss) for event in run.steps]
    known = [(step, loss) for step, loss in points if loss is not None]
    if len(known) <= SPARK_POINTS:
        return [loss for _, loss in known]
    first, last = known[0][0], known[-1][0]
    places = [first + (last - first) * i / (SPARK_POINTS - 1) for i in range(SPARK_POINTS)]
    return [known[min(bisect.bisect_left(known, (place, -math.inf)), len(known) - 1)][1] for place in places]
