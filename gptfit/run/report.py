"""Events of a run go to every sink: run.jsonl, the screen, a tracker. A sink that fails is dropped, the run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from gptfit.config import TrainConfig
from gptfit.runlog import RUN_LOG, Event, RunLogWriter

Reporter = Callable[[Event], None]


class Sink(Protocol):
    """Somewhere events go."""

    def append(self, event: Event) -> None: ...

    def close(self) -> None: ...


def ignore(event: Event) -> None:
    """The reporter of a caller who only wants the result."""


class Report:
    """Sends each event to the caller's reporter and to the sinks; silent on all processes but the first."""

    def __init__(self, reporter: Reporter, is_master: bool) -> None:
        self._reporter = reporter
        self._is_master = is_master
        self._sinks: dict[str, Sink] = {}

    def open_sinks(self, folder: Path, config: TrainConfig) -> None:
        """run.jsonl always; a tracker when the config names one. Called once the folder is ours."""
        if not self._is_master:
            return
        self._sinks[RUN_LOG] = RunLogWriter(folder / RUN_LOG)
        names = {config.track} | ({"wandb"} if config.wandb_log else set())
        for name in sorted(names - {"none"}):
            self._guarded(name, partial(self._open_tracker, name, config, folder))

    def _open_tracker(self, name: str, config: TrainConfig, folder: Path) -> None:
        from gptfit.run.trackers import open_tracker

        self._sinks[name] = open_tracker(name, config, folder)

    def emit(self, event: str, **fields: Any) -> None:
        if not self._is_master:
            return
        whole = {"event": event, **fields, "time": time.time()}
        for name, sink in list(self._sinks.items()):
            self._guarded(name, partial(sink.append, whole))
        self._reporter(whole)

    def tell(self, kind: str, step: int, message: str, **fields: Any) -> None:
        """Something happened that a person should know."""
        self.emit("event", kind=kind, step=step, message=message, **fields)

    def close(self) -> None:
        for name, sink in list(self._sinks.items()):
            self._guarded(name, sink.close)
        self._sinks.clear()

    def _guarded(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        # A tracker is other people's code over a network: whatever it raises, days of training must not end for it.
        except Exception as error:  # noqa: BLE001
            self._sinks.pop(name, None)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
            self._reporter(
                {
                    "event": "event",
                    "kind": "sink",
                    "message": f"{name} failed and is off: {reason}",
                    "time": time.time(),
                }
            )
