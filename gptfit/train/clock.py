"""RunClock: the seconds a run really ran, without those in which the whole process was stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

BEAT_SECONDS = 1.0
# A process that did not get to run its simplest thread for this long was stopped (Ctrl-Z, SIGSTOP) or the machine slept.
STOOD_STILL_SECONDS = 30.0


class RunClock:
    """Only goes forward, also when somebody sets the time of day; an hour of SIGSTOP or of a laptop's sleep is left out."""

    def __init__(self, source: Callable[[], float] = time.perf_counter) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._last_beat = source()
        self._still = 0.0
        self._ended = threading.Event()

    def start(self) -> RunClock:
        with suppress(RuntimeError):  # where no more threads may be started, a long step counts as standing still
            threading.Thread(target=self._beat_on, name="gptfit-clock", daemon=True).start()
        return self

    def now(self) -> float:
        """Seconds from an unknown beginning; differences count."""
        with self._lock:
            return self._moment() - self._still

    def beat(self) -> None:
        """Called every BEAT_SECONDS while the process runs."""
        with self._lock:  # once, so that a stop between two looks at the source is not lost
            self._last_beat = self._moment()

    def _moment(self) -> float:
        moment = self._source()
        gap = moment - self._last_beat
        if gap > STOOD_STILL_SECONDS:  # noticed here before the next beat
            self._still += gap - BEAT_SECONDS
            self._last_beat = moment
        return moment

    def stop(self) -> None:
        self._ended.set()

    def _beat_on(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            self.beat()
