"""Saver: when checkpoints are written, and what becomes of one that the disk does not take."""

from __future__ import annotations

from collections.abc import Callable

from gptfit.checkpoint.format import Checkpoint, copied_to_memory
from gptfit.errors import RunError
from gptfit.train.clock import RunClock
from gptfit.train.progress import Progress, StepStart
from gptfit.train.setup import Run

SAVE_EVERY_SECONDS = 15 * 60  # a power cut costs at most this, however rare the evals are


class Saver:
    """Writes the run's checkpoints. `saved_step` is the step ckpt.pt stands at."""

    def __init__(self, run: Run, progress: Progress, clock: RunClock, saved_step: int) -> None:
        self.run, self.progress, self.clock, self.saved_step = run, progress, clock, saved_step
        self.saved_at = clock.now()
        self.began = self.saved_at - progress.wall_seconds
        self._waiting_best: Checkpoint | None = None  # could not be written when it was found

    @property
    def is_due(self) -> bool:
        return self.clock.now() - self.saved_at >= SAVE_EVERY_SECONDS

    def wall_seconds(self) -> float:
        """Of the whole run, with everything, however often it was resumed."""
        return self.clock.now() - self.began

    def save_last(self, start: StepStart, is_end: bool = False) -> None:
        """Once per step: a later call at the same step finds the same state on the disk, or tries again.

        Inside a row of skipped updates only the end of the run saves: a rollback needs what was before the row.
        """
        if self.saved_step != self.progress.step:
            is_saved = self._save(self.run.store.save_last, start, is_end)
            # Only the first process knows whether the disk took it, and all must agree on when to save again.
            [has_failed] = self.run.processes.any_of([not is_saved], self.run.device)
            self.saved_step = self.saved_step if has_failed else self.progress.step
            self.saved_at = self.clock.now()
        self._save_waiting_best(is_end)

    def save_before_decay(self, start: StepStart) -> None:
        self._save(self.run.store.save_before_decay, start)

    def save_best(self, start: StepStart) -> None:
        """A best model that the disk does not take is kept in memory and tried again at every later save."""
        self._waiting_best = None
        checkpoint = self._checkpoint(start, is_end=False)
        if checkpoint is None:
            return
        if self.run.processes.is_master and not self._write(self.run.store.save_best, checkpoint, is_end=False):
            # Tensors in a folder are nobody's until a checkpoint names it, and are not kept.
            self._waiting_best = None if checkpoint.parts else copied_to_memory(checkpoint)

    def _save_waiting_best(self, is_end: bool) -> None:
        if self._waiting_best is not None and self._write(self.run.store.save_best, self._waiting_best, is_end):
            self._waiting_best = None

    def _save(self, write: Callable[[Checkpoint, bool], None], start: StepStart, is_end: bool = False) -> bool:
        checkpoint = self._checkpoint(start, is_end)
        if checkpoint is None:
            return False
        return self._write(write, checkpoint, is_end) if self.run.processes.is_master else True

    def _checkpoint(self, start: StepStart, is_end: bool) -> Checkpoint | None:
        """The run as it stands; with several processes all of them must call this, as all may have to write."""
        self.progress.wall_seconds = self.wall_seconds()
        try:
            return self.run.checkpoint(self.progress, start)
        except RunError as error:
            self._failed(error, is_end)
            return None

    def _write(self, write: Callable[[Checkpoint, bool], None], checkpoint: Checkpoint, is_end: bool) -> bool:
        """The first process writes. A disk that cannot take it is reported and the run goes on, except at its end."""
        report, step = self.run.report, self.progress.step
        try:
            write(checkpoint, is_end)
        except RunError as error:
            self._failed(error, is_end)
            return False
        if write == self.run.store.save_last:  # once per save, as nanoGPT says it; the others are made beside it
            report.tell("checkpoint", step, f"saving checkpoint to {self.run.config.out_dir}")
        return True

    def _failed(self, error: RunError, is_end: bool) -> None:
        if is_end:
            raise error
        told = f"{error}; it is tried again at the next save"
        self.run.report.tell("checkpoint_failed", self.progress.step, told)
