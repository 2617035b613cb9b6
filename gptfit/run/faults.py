"""What can go wrong while training: signals, numbers that are not finite, memory that runs out."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Any

from gptfit.errors import RunError

BAD_STEPS_BEFORE_ROLLBACK = 5
ROLLBACKS_BEFORE_GIVING_UP = 3
STOP_SENTENCES = {
    "SIGINT": "interrupted; saving",
    "SIGTERM": "asked to end; saving",
    "max_hours": "max_hours is reached; saving",
    "early_stop": "val loss has not improved for early_stop_evals evals; stopping",
}


class Stopped(Exception):
    """A signal asked the run to end; raised between micro-steps, never inside one."""


class SignalWatch:
    """First SIGINT or SIGTERM: remember it. Second: end at once, as if nobody was listening."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalWatch:
        # Python delivers signals to the main thread only; a run in another thread keeps the program's own handlers.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def poll(self) -> None:
        if self.received:
            raise Stopped(self.received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = signal.Signals(number).name


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
                f"checkpoint; resume with a lower learning_rate or more warmup_iters"
            )


def smaller_micro_batch(micro_batch: int, share: int) -> int | None:
    """At most half, and still a divisor of the windows per update, so that the step stays the same. None below 1."""
    return next((size for size in range(micro_batch // 2, 0, -1) if share % size == 0), None)
