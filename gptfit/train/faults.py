"""What can go wrong while training: signals, numbers that are not finite, memory that runs out."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from gptfit.errors import RunError
from gptfit.plan.memory import predict
from gptfit.plan.setting import Setting
from gptfit.units import gib

BAD_STEPS_BEFORE_ROLLBACK = 5
ROLLBACKS_BEFORE_GIVING_UP = 3
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


def smaller_micro_batch(micro_batch: int, share: int) -> int | None:
    """At most half, and still a divisor of the windows per update, so that the step stays the same. None below 1."""
    return next((size for size in range(micro_batch // 2, 0, -1) if share % size == 0), None)


def out_of_memory_advice(setting: Setting) -> str:
    """One line: what was tried, what the plan says is needed, and the change that saves most."""
    shape, micro_batch = setting.shape, setting.micro_batch
    needed = predict(setting).allocated.value
    line = f"out of memory with a micro-batch of {micro_batch}: about {gib(needed)} are needed"
    block_size, n_layer = max(1, shape.block_size // 2), max(1, shape.n_layer // 2)
    ways = {
        "--checkpoint_activations=True": replace(setting, checkpoint_activations=True),
        "--chunked_loss=True": replace(setting, chunked_loss=True),
        f"--block_size={block_size}": replace(setting, shape=replace(shape, block_size=block_size)),
        f"--n_layer={n_layer}": replace(setting, shape=replace(shape, n_layer=n_layer)),
    }
    if micro_batch > 1:
        ways[f"--batch_size={micro_batch // 2}"] = replace(setting, micro_batch=micro_batch // 2)
    ways = {words: changed for words, changed in ways.items() if changed != setting}  # what is on already saves nothing
    best = min(ways, key=lambda way: predict(ways[way]).allocated.value)
    return f"{line}; {best} brings it to about {gib(predict(ways[best]).allocated.value)}"
