"""What can go wrong while training: signals and numbers that are not finite; memory is in out_of_memory.py."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from gptfit.errors import RunError

BAD_STEPS_BEFORE_ROLLBACK = 5
ROLLBACKS_BEFORE_GIVING_UP = 3
HEARD = "\r\nstopping after this step, and saving; Ctrl-C again ends it at once, unsaved\r\n"
STOP_SENTENCES = {
    "SIGINT": "interrupted; saving",
    "SIGTERM": "asked to end; saving",
    "SIGHUP": "the terminal is gone; saving",
    "max_hours": "max_hours is reached; saving",
    "early_stop": "val loss has not improved for early_stop_evals evals; stopping",
}


class Stopped(Exception):
    """A signal asked the run to end; raised between micro-steps, never inside one."""


class SignalWatch:
    """First SIGINT, SIGTERM or SIGHUP: remember it. Second: end at once, as a program without a handler would.

    SIGHUP comes when the terminal or the connection is lost, often twice, and never hurries. `nohup` keeps it off.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalWatch:
        # Python delivers signals to the main thread only; a run in another thread keeps the program's own handlers.
        if threading.current_thread() is threading.main_thread():
            for number in _watched():
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def poll(self) -> None:
        if self.received:
            raise Stopped(self.received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received and name != "SIGHUP":
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not self.received and name == "SIGINT" and sys.stderr is not None and sys.stderr.isatty():
            # At once and past Python's buffers, which may be in use: a step or a compilation can take minutes.
            with suppress(OSError):
                os.write(sys.stderr.fileno(), HEARD.encode())
        self.received = self.received or name


def _watched() -> list[signal.Signals]:
    """Windows has no SIGHUP; `nohup` has it ignored already, and ignored it stays."""
    found = [signal.SIGINT, signal.SIGTERM]
    hang_up = getattr(signal, "SIGHUP", None)
    if hang_up is not None and signal.getsignal(hang_up) is not signal.SIG_IGN:
        found.append(hang_up)
    return found


def exit_code(reason: str) -> int:
    """As a shell has it: 128 and the signal's number for a run that was stopped, else 0."""
    return 128 + getattr(signal, reason) if reason in ("SIGINT", "SIGTERM", "SIGHUP") else 0


@dataclass
class NonFiniteCount:
    """Counts updates that were skipped; says when to go back to a checkpoint and when to give up."""

    in_a_row: int = 0
    total: int = 0
    rollbacks: int = 0

    def seen(self, applied: bool) -> bool:
        """Whether it is time to roll back."""
        self.in_a_row = 0 if applied else self.in_a_row + 1
        self.total += not applied
        return self.in_a_row >= BAD_STEPS_BEFORE_ROLLBACK

    def rolled_back(self, step: int) -> None:
        self.in_a_row = 0
        self.rollbacks += 1
        if self.rollbacks > ROLLBACKS_BEFORE_GIVING_UP:
            raise RunError(
                f"the loss stopped being finite again at step {step} after {ROLLBACKS_BEFORE_GIVING_UP} returns to a "
                "checkpoint",
                fix="resume with a lower learning_rate or more warmup_iters",
            )
