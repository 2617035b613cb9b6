"""A bar in one line on stderr: how much is done of what is known beforehand, and how long the rest will take."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from gptfit.units import duration

BAR = 24  # columns
EVERY_SECONDS = 0.1  # between two drawings


def bar_line(what: str, share: float, left: str) -> str:
    """No wider than the screen: a line that wraps cannot be drawn over."""
    full = round(BAR * share)
    line = f"{what} {'━' * full}{' ' * (BAR - full)} {int(100 * share):>3} %{', ' if left else ''}{left}"
    return line[: shutil.get_terminal_size().columns - 1]


class ProgressLine:
    """Called with (done, total); draws on a terminal only, and leaves the line empty when all is done."""

    def __init__(self, what: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._stream, self._clock = what, stream or sys.stderr, clock
        self._began = self._drawn = clock()
        self._is_shown = False

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        """Also where it was broken off: what is then said gets a line of its own."""
        if self._is_shown:
            self._write("")

    def __call__(self, done: int, total: int) -> None:
        if not self._stream.isatty():
            return
        now = self._clock()
        if done >= total:
            self._write("")
        elif now - self._drawn >= EVERY_SECONDS:
            self._drawn = now
            self._write(self._line(done, total, now - self._began))

    def _line(self, done: int, total: int, seconds: float) -> str:
        left = f"{duration(seconds * (total - done) / done)} left" if done else ""
        return bar_line(self._what, done / total, left)

    def _write(self, text: str) -> None:
        self._is_shown = bool(text)
        self._stream.write(f"\r\033[K{text}")
        self._stream.flush()
