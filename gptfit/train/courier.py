"""A tracker in a thread of its own, so that one that is slow or hangs does not slow down training."""

from __future__ import annotations

import queue
import threading

from gptfit.logs.events import Event
from gptfit.train.trackers import Sink

MOST_WAITING = 10_000  # events; a tracker that is further behind than this misses some
LAST_SECONDS = 60.0  # what a tracker gets at the end of a run to send the rest


class Courier:
    """Hands events to `sink` in order, in its thread. What the sink raises is raised by the next `append`."""

    def __init__(self, sink: Sink, last_seconds: float = LAST_SECONDS) -> None:
        self._sink = sink
        self._last_seconds = last_seconds
        self._waiting: queue.Queue[Event | None] = queue.Queue(MOST_WAITING)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._deliver, name="gptfit-tracker", daemon=True)
        self._thread.start()

    def append(self, event: Event) -> None:
        if self._error:
            raise self._error
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            return

    def close(self) -> None:
        """Waits a while for the rest; the program does not wait for ever for a tracker that hangs."""
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            raise TimeoutError(f"{MOST_WAITING:,} events were never sent") from None
        self._thread.join(self._last_seconds)
        if self._error:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError(f"not done {self._last_seconds:g} s after the end")

    def _deliver(self) -> None:
        try:
            while (event := self._waiting.get()) is not None:
                self._sink.append(event)
            self._sink.close()
        # Other people's code may raise anything, and sys.exit in a thread would end only the thread.
        except BaseException as error:  # noqa: BLE001
            self._error = error
