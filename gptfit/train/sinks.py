"""Events of a run go to every sink: run.jsonl, the screen, a tracker. Whatever fails of these, the run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gptfit.config.keys import TrainConfig
from gptfit.errors import RunError
from gptfit.files import reason_of
from gptfit.logs.events import Event, Message
from gptfit.logs.runlog import RUN_LOG, RunLogWriter
from gptfit.train.courier import Courier
from gptfit.train.messenger import Messenger
from gptfit.train.trackers import Sink, open_tracker, overruled, wanted_trackers

Reporter = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The reporter of a caller who only wants the result."""


class Report:
    """Sends each event to the caller's reporter and to the sinks; silent on all processes but the first."""

    def __init__(self, reporter: Reporter, is_master: bool) -> None:
        self._reporter = reporter
        self._is_master = is_master
        self._sinks: dict[str, Sink] = {}
        self._in_trouble: set[str] = set()

    def open_sinks(self, folder: Path, config: TrainConfig) -> None:
        """run.jsonl always; a tracker when the config names one. Called once the folder is ours."""
        if not self._is_master:
            return
        self._sinks[RUN_LOG] = RunLogWriter(folder / RUN_LOG)
        for name in wanted_trackers(config):
            self._guarded(name, partial(self._open_tracker, name, config, folder))
        for line in overruled(config):
            self._say(line)
        if config.notify:
            self._sinks["notify"] = Courier(Messenger(config.notify, folder.name or str(folder)))

    def _open_tracker(self, name: str, config: TrainConfig, folder: Path) -> None:
        self._sinks[name] = Courier(open_tracker(name, config, folder))

    def emit(self, event: Event) -> None:
        if not self._is_master:
            return
        timed = replace(event, time=time.time())
        for name, sink in list(self._sinks.items()):
            self._guarded(name, partial(sink.append, timed))
        self._reporter(timed)

    def tell(self, kind: str, step: int, message: str, **fields: Any) -> None:
        """Something happened that a person should know; `fields` are further ones of Message."""
        self.emit(Message(kind, message, step, **fields))

    def close(self) -> None:
        for name, sink in list(self._sinks.items()):
            self._guarded(name, sink.close)
        self._sinks.clear()

    def _guarded(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except RunError as error:  # our own log: its lines wait for a disk that takes them
            if name not in self._in_trouble:
                self._say(f"{error}; what could not be written is tried again")
            self._in_trouble.add(name)
        # A tracker is other people's code over a network: whatever it raises, days of training must not end for it.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            self._sinks.pop(name, None)
            self._say(f"{name} failed and is off: {reason_of(error)}")
        else:
            self._in_trouble.discard(name)

    def _say(self, message: str) -> None:
        self._reporter(Message("sink", message, time=time.time()))
