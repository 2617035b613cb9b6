"""A sign of life while something takes its time: what is being done and for how long, once a second, on stderr."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import TextIO

EVERY_SECONDS = 0.8  # never quiet for a whole one


class Ticker:
    """`now(what)` says what is being done; on a screen the line is rewritten, in a file it is written once and dotted."""

    def __init__(self, stream: TextIO, every_seconds: float = EVERY_SECONDS) -> None:
        self._stream, self._every = stream, every_seconds
        self._is_screen = stream.isatty()
        self._doing, self._began, self._is_open = "", 0.0, False
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

    def now(self, doing: str) -> None:
        self.clear()
        with self._lock:
            self._doing, self._began = doing, time.monotonic()

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
                    self._write(f"\r\033[K{self._doing}, {seconds:.0f} s")
                else:
                    self._write("." if self._is_open else f"{self._doing} ..")
                self._is_open = True

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
