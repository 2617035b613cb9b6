"""What other programs take of the cores while something is timed: nothing timed beside them is a figure."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from types import TracebackType

import psutil

STAT = Path("/proc/stat")
EVERY_S = 0.5


class Neighbours:
    """Watches from `start` on; `share` is the part of all cores' time that went to programs other than our own.

    Also what the host of a virtual machine took away. Zero where the system does not say.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Neighbours:
        return self

    def start(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        began, busy, own = time.monotonic(), _busy_seconds(), _own_seconds()
        while not self._over.wait(EVERY_S):
            mine = _own_seconds() - own
            if mine < 0:
                break  # the program ended, and its time with it
            cores = (time.monotonic() - began) * (os.cpu_count() or 1)
            self.share = max(0.0, _busy_seconds() - busy - mine) / cores


def _busy_seconds() -> float:
    """Of all cores since the start: everything but waiting; the host's share (steal) too."""
    if not STAT.is_file():
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, STAT.read_text(encoding="ascii").split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    total, me = 0.0, psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total
