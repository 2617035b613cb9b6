"""The runs in a folder: found, and each summed up from a few lines of its log; status, ETA, sparkline."""

from __future__ import annotations

import bisect
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptfit.errors import GptfitError, RunError
from gptfit.runlog import RUN_LOG, RunLog
from gptfit.view.bigrun import glance, quick_run
from gptfit.view.door import finite
from gptfit.view.facts import usual_step_ms

DEEPEST = 4  # folders below the watched one
MOST_RUNS = 2000
LOG_SUFFIXES = (".txt", ".log")
SPARK_POINTS = 40
FEWEST_EVALS = 5  # below this the steps say more
# A run is taken to be alive while its log was written within this many of its usual steps, or this many seconds.
ALIVE_STEPS = 20
ALIVE_SECONDS = 60


@dataclass
class Listing:
    """A watched folder. Summaries are kept until a log's size or time changes."""

    root: Path
    _kept: dict[str, tuple[tuple[int, int], dict[str, Any]]] = field(default_factory=dict)
    _foreign: dict[str, tuple[tuple[int, int], bool]] = field(default_factory=dict)

    def runs(self) -> list[dict[str, Any]]:
        """Newest first."""
        found = [self._summary(path) for path in self._paths()]
        return sorted((row for row in found if row), key=lambda row: -row["written"])

    def path_of(self, run_id: str) -> Path:
        """The log a page names, or RunError: nothing outside the folder, nothing that is no log."""
        refused = RunError("no such run in this folder")
        if "\0" in run_id:
            raise refused
        path = (self.root / run_id).resolve()
        is_log = path.name == RUN_LOG or path.suffix in LOG_SUFFIXES
        if not path.is_relative_to(self.root.resolve()) or not is_log or not path.is_file():
            raise refused
        return path

    def open(self, run_id: str) -> RunLog:
        return quick_run(self.path_of(run_id))

    def _paths(self) -> Iterator[Path]:
        count = 0
        for folder, folders, files in os.walk(self.root):
            depth = len(Path(folder).relative_to(self.root).parts)
            folders[:] = sorted(name for name in folders if not name.startswith(".")) if depth < DEEPEST else []
            for name in sorted(files):
                path = Path(folder, name)
                if path.is_symlink() and not path.resolve().is_relative_to(self.root.resolve()):
                    continue  # what a page could not open is not listed
                if name == RUN_LOG or (path.suffix in LOG_SUFFIXES and self._is_foreign_log(path)):
                    count += 1
                    if count <= MOST_RUNS:
                        yield path

    def _is_foreign_log(self, path: Path) -> bool:
        stamp = _stamp(path)
        if stamp is None:
            return False
        kept = self._foreign.get(str(path))
        if kept is None or kept[0] != stamp:
            try:
                glance(path)
                kept = (stamp, True)
            except GptfitError:
                kept = (stamp, False)
            self._foreign[str(path)] = kept
        return kept[1]

    def _summary(self, path: Path) -> dict[str, Any] | None:
        stamp = _stamp(path)
        if stamp is None:
            return None
        kept = self._kept.get(str(path))
        if kept is None or kept[0] != stamp:
            try:
                kept = (stamp, summarise(path, self.root))
            except GptfitError:
                return None
            self._kept[str(path)] = kept
        return kept[1] | {"status": status(kept[1], time.time())}


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def summarise(path: Path, root: Path) -> dict[str, Any]:
    """One row of the list."""
    run = glance(path)
    last = run.steps[-1] if run.steps else {}
    max_iters = run.config.get("max_iters")
    ms = usual_step_ms(run.steps[-50:])
    step = max((events[-1]["step"] for events in (run.steps, run.evals) if events), default=0)
    left = (max_iters - step) * ms / 1000 if isinstance(max_iters, int) and ms and max_iters > step else None
    validations = [value for event in run.evals if (value := finite(event.get("val_loss"))) is not None]
    return {
        "id": path.relative_to(root).as_posix(),
        "name": run.name,
        "kind": run.header.get("kind", "gptfit"),
        "step": step,
        "max_iters": max_iters if isinstance(max_iters, int) else None,
        "loss": finite(last.get("loss")),
        "val_loss": validations[-1] if validations else None,
        "ms": ms,
        "seconds_left": left,
        "ended": (run.end or {}).get("reason"),
        "written": path.stat().st_mtime,
        "spark": _spark(run),
    }


def status(row: dict[str, Any], now: float) -> str:
    """ended, running or quiet; a log of another program has no end line, so its age must do."""
    if row["ended"]:
        return f"ended: {row['ended']}"
    patience = max(ALIVE_SECONDS, ALIVE_STEPS * (row["ms"] or 0) / 1000)
    return "running" if now - row["written"] < patience else "quiet"


def _spark(run: RunLog) -> list[float]:
    """The loss in a few numbers at equal distances: of evals where there are enough, else of steps."""
    points = [(event["step"], finite(event.get("val_loss"))) for event in run.evals]
    if len(points) < FEWEST_EVALS:
        points = [(event["step"], finite(event.get("loss"))) for event in run.steps]
    known = [(step, loss) for step, loss in points if loss is not None]
    if len(known) <= SPARK_POINTS:
        return [loss for _, loss in known]
    first, last = known[0][0], known[-1][0]
    places = [first + (last - first) * i / (SPARK_POINTS - 1) for i in range(SPARK_POINTS)]
    return [known[min(bisect.bisect_left(known, (place, -math.inf)), len(known) - 1)][1] for place in places]
