"""The screen may go away (a closed pipe, a lost terminal, a full disk behind it) while the work must not."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO


def make_streams_safe() -> None:
    """Before anything prints: closed streams become the empty device, and a character that the terminal cannot show is replaced."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # closed; the next file opened would get its number and be written into by mistake
            _open_nothing(number)
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace" if name == "stderr" else "replace")


def _open_nothing(number: int) -> None:
    with suppress(OSError):
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)


def let_go_of_stdout() -> None:
    """Python would complain again when it flushes at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Unbreakable(io.TextIOBase):
    """Writes to `stream` as long as that works; from the first failure on nothing is written and nothing is raised."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_gone = False

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        if self.is_gone:
            return
        try:
            action()
        except (OSError, ValueError):  # ValueError: somebody has closed it
            self.is_gone = True
            let_go_of_stdout()

    def isatty(self) -> bool:
        return not self.is_gone and self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding or "utf-8"

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._stream.errors


@contextmanager
def unbreakable_stdout() -> Iterator[None]:
    """For work that is worth more than its output: training, preparing, tuning."""
    before = sys.stdout
    sys.stdout = Unbreakable(before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = before
