"""A sign of life while something takes its time: what is being done and for how long, once a second, on stderr."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TextIO

from gptfit.units import duration
from gptfit.verbs.progress_line import bar_line

EVERY_SECONDS = 0.8  # never quiet for a whole one
LOOKING = "looking at the device"
MOST_SHARE = 0.99  # of a bar that moves by an estimate


@contextmanager
def waiting(doing: str, expected_s: float = 0.0) -> Iterator[Ticker]:
    """Says so on a screen until it is over, or until the ticker is cleared."""
    with Ticker(sys.stderr) as ticker:
        if sys.stderr.isatty():
            ticker.now(doing, expected_s)
        yield ticker


class Ticker:
    """`now(what)` says what is being done; on a screen the line is rewritten, in a file it is written once and dotted."""

    def __init__(self, stream: TextIO, every_seconds: float = EVERY_SECONDS) -> None:
        self._stream, self._every = stream, every_seconds
        self._is_screen = stream.isatty()
        self._doing, self._began, self._is_open = "", 0.0, False
        self._expected_s = 0.0  # that it will take in all; 0: nobody knows
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self.clear()

    def now(self, doing: str, expected_s: float = 0.0) -> None:
        self.clear()
        with self._lock:
            self._doing, self._began, self._expected_s = doing, time.monotonic(), expected_s

    def clear(self) -> None:
        """Before something is printed: the line, where one was begun, is over."""
        with self._lock:
            if self._is_open:
                self._write("\r\033[K" if self._is_screen else "\n")
            self._doing, self._is_open = "", False

    def _tick(self) -> None:
        while not self._over.wait(self._every):
            with self._lock:
                if not self._doing:
                    continue
                seconds = time.monotonic() - self._began
                if self._is_screen:
                    self._write(f"\r\033[K{self._line(seconds)}")
                else:
                    self._write("." if self._is_open else f"{self._doing} ..")
                self._is_open = True

    def _line(self, seconds: float) -> str:
        if not self._expected_s:
            return f"{self._doing}, {seconds:.0f} s"
        left = self._expected_s - seconds
        words = f"about {duration(left)} left" if left >= 1 else "any moment now"
        return bar_line(self._doing, min(MOST_SHARE, seconds / self._expected_s), words)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
