"""The training loop: save, evaluate, step; it can stop, shrink, roll back and go on at any point."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from gptfit.errors import RunError
from gptfit.run.batches import EpochSampler
from gptfit.run.checkpoint import Checkpoint
from gptfit.run.device import is_out_of_memory
from gptfit.run.engine import Update
from gptfit.run.extend import is_decay_start
from gptfit.run.faults import STOP_SENTENCES, NonFiniteCount, SignalWatch, Stopped, smaller_micro_batch
from gptfit.run.garbage import collection_frozen
from gptfit.run.memoryadvice import out_of_memory_advice
from gptfit.run.meter import Meter
from gptfit.run.progress import Progress, StepStart
from gptfit.run.randomness import rng_state, seed_step, set_rng_state
from gptfit.run.restore import restore_from
from gptfit.run.setup import Run
from gptfit.schedule import learning_rate
from gptfit.startmodel import is_pretrained
from gptfit.units import duration

SAVE_EVERY_SECONDS = 15 * 60  # a power cut costs at most this, however rare the evals are
T = TypeVar("T")


@dataclass
class Loop:
    """One run from its first step in this process to its last. `saved_step` is the step ckpt.pt stands at."""

    run: Run
    progress: Progress
    signals: SignalWatch
    meter: Meter
    saved_step: int = -1
    start: StepStart = field(default_factory=StepStart)
    bad: NonFiniteCount = field(default_factory=NonFiniteCount)

    def __post_init__(self) -> None:
        self.micro_batch = self.run.config.batch_size
        self.saved_at = time.perf_counter()
        self.began = self.saved_at - self.progress.wall_seconds

    def train(self) -> str:
        """Returns why it ended; what can be resumed is on the disk by then."""
        with collection_frozen():
            try:
                reason = self._train()
            except Stopped as stopped:
                self._return_to_start()
                reason = str(stopped)
            if reason in STOP_SENTENCES:
                kind = "signal" if reason.startswith("SIG") else reason
                self.run.report.tell(kind, self.progress.step, STOP_SENTENCES[reason])
            if self.progress.step > 0 and reason != "eval_only":
                self._save_last(is_end=True)
            return reason

    def _train(self) -> str:
        config, progress = self.run.config, self.progress
        self._mark_start()
        self._surviving_memory(self._warm_up)
        self._prefetch(progress.step, 0)
        while True:
            self._mark_start()
            if is_decay_start(config, progress.step) and not config.eval_only:
                self._save(self.run.store.save_before_decay)
            if self._is_eval_due():
                if progress.step > 0 and not config.eval_only and not self.bad.in_a_row:
                    self._save_last()
                reason = self._evaluate()
                self._mark_start()
                if reason:
                    return reason
            if progress.step >= config.max_iters:
                return "max_iters"
            self._step()
            if reason := self._reason_to_stop():
                self._mark_start()
                return reason

    def _is_eval_due(self) -> bool:
        step, config = self.progress.step, self.run.config
        if config.eval_only:
            return True
        is_scheduled = step % config.eval_interval == 0 or step >= config.max_iters
        return is_scheduled and self.progress.evaluated_step != step

    def _mark_start(self) -> None:
        """Everything random about the coming step is fixed here, so that the step can be repeated."""
        if self.run.config.sampling == "epoch":
            seed_step(self.run.config.seed, self.progress.step, self.run.processes.rank)
        self.start = StepStart(rng_state(self.run.device), self.run.sampler.state())

    def _return_to_start(self) -> None:
        self.run.engine.forget_gradients()
        set_rng_state(self.start.rng, self.run.device)
        self.run.sampler.restore(self.start.drawn)

    def _warm_up(self) -> None:
        """Compile before the clock runs, and find out early whether the micro-batch fits."""
        run, config = self.run, self.run.config
        if not run.engine.compiled:
            return
        began = time.perf_counter()
        ids = torch.zeros(self.micro_batch, config.block_size, dtype=torch.int64, device=run.device.torch_device)
        try:
            problem = run.engine.compile_now(ids, with_backward=not config.eval_only)
        finally:
            self._return_to_start()
        seconds = time.perf_counter() - began
        told = f"not compiled: {problem}; training eagerly" if problem else f"compiled in {duration(seconds)}"
        run.report.tell("note" if problem else "compile", self.progress.step, told, seconds=seconds)

    def _prefetch(self, step: int, first: int) -> None:
        self.run.feeds["train"].prefetch(self.run.sampler.starts(step, first, self.micro_batch))

    def _step(self) -> None:
        """One update, timed alone, with its consequences."""
        run, progress = self.run, self.progress
        run.device.reset_peak_memory()
        update, seconds = self._surviving_memory(self._attempt_step)
        progress.seconds += seconds
        progress.tokens += run.tokens_per_step
        self.meter.count(seconds)
        if not update.applied:
            what = f"loss {update.loss}, gradient norm {update.grad_norm}"
            run.report.tell("nonfinite", progress.step, f"{what}: update {progress.step} skipped, weights unchanged")
        if progress.step % run.config.log_interval == 0:
            run.report.emit("step", **self.meter.step_fields(update, progress, seconds))
        progress.step += 1
        if isinstance(run.sampler, EpochSampler):
            progress.window = run.sampler.position(progress.step)
        if not self._is_scale_search(update) and self.bad.seen(update.applied):
            self._roll_back()

    def _attempt_step(self) -> tuple[Update, float]:
        run, step = self.run, self.progress.step
        began = time.perf_counter()
        micro_steps = run.windows_per_process // self.micro_batch
        loss_sum = torch.zeros((), device=run.device.torch_device)
        for micro_step in range(micro_steps):
            if run.processes.is_alone:
                self.signals.poll()
            is_last = micro_step == micro_steps - 1
            loss = run.engine.forward_micro_step(run.feeds["train"].take(), is_last)
            # After forward and before backward: where nanoGPT draws its next batch from the random stream.
            self._prefetch(*(step + 1, 0) if is_last else (step, (micro_step + 1) * self.micro_batch))
            run.engine.backward_micro_step(loss, micro_steps)
            loss_sum += loss.detach()
        update = run.engine.update(loss_sum, micro_steps, learning_rate(run.config, step))
        run.device.synchronize()
        return update, time.perf_counter() - began

    def _surviving_memory(self, action: Callable[[], T]) -> T:
        """Do it; when memory runs out, again with half the micro-batch, from the beginning of the step."""
        while True:
            try:
                return action()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            # Outside the except block: the error holds the frames, and the frames hold the memory.
            self._shrink()
            if self.run.engine.compiled and action != self._warm_up:
                self._surviving_memory(self._warm_up)  # here, so that no step's time has it
            self._prefetch(self.progress.step, 0)

    def _shrink(self) -> None:
        run, smaller = self.run, smaller_micro_batch(self.micro_batch, self.run.windows_per_process)
        if smaller is None or not run.processes.is_alone:
            raise RunError(out_of_memory_advice(run.config, run.shape, run.device, self.micro_batch))
        self._return_to_start()
        gc.collect()  # it is off while training, and a failed call can leave cycles that hold tensors
        run.device.release_memory()
        self.micro_batch = smaller
        run.report.tell(
            "oom",
            self.progress.step,
            f"out of memory: batch_size is now {smaller}, gradient_accumulation_steps "
            f"{run.windows_per_process // smaller}; still {run.tokens_per_step:,} tokens per step",
            batch_size=smaller,
        )
        if run.engine.compiled:
            torch.compiler.reset()

    def _evaluate(self) -> str | None:
        """Report both losses, keep the best model; the reason to stop, if this eval is one."""
        run, progress, config = self.run, self.progress, self.run.config
        began = time.perf_counter()
        poll = self.signals.poll if run.processes.is_alone else None
        losses = self._surviving_memory(lambda: run.evaluator.losses(self.micro_batch, poll))
        is_best = progress.record_eval(losses.train, losses.val)
        run.report.emit(
            "eval",
            step=progress.step,
            train_loss=losses.train,
            val_loss=losses.val,
            tokens=progress.tokens,
            eval_tokens=losses.eval_tokens,
            ms=(time.perf_counter() - began) * 1000,
            seconds=progress.seconds,
        )
        if config.eval_only:
            return "eval_only"
        if is_best and (progress.step > 0 or is_pretrained(config)) and not self.bad.in_a_row:
            self._mark_start()
            self._save(run.store.save_best)
        if progress.starts_overfitting:
            run.report.tell(
                "overfit",
                progress.step,
                f"overfitting: val loss rises while train loss falls (best {progress.best_val_loss:.4f} at step "
                f"{progress.best_step}); use dropout, fewer epochs or more data",
            )
        if config.early_stop_evals and progress.evals_without_gain >= config.early_stop_evals:
            return "early_stop"
        return None

    def _reason_to_stop(self) -> str | None:
        """All processes stop, and save for time's sake, at the same step."""
        run, progress = self.run, self.progress
        progress.wall_seconds = time.perf_counter() - self.began
        is_late = run.config.max_hours > 0 and progress.wall_seconds >= run.config.max_hours * 3600
        save_due = time.perf_counter() - self.saved_at >= SAVE_EVERY_SECONDS
        flags = [self.signals.received is not None, is_late, save_due]
        signalled, is_late, save_due = run.processes.any_of(flags, run.device)
        if signalled:
            return self.signals.received or "SIGTERM"
        if is_late:
            return "max_hours"
        if save_due and not self.bad.in_a_row:
            self._mark_start()
            self._save_last()
        return None

    def _save_last(self, is_end: bool = False) -> None:
        """Once per step: a later call at the same step finds the same state on the disk, or tries again.

        Inside a row of skipped updates only the end of the run saves: a rollback needs what was before the row.
        """
        if self.saved_step != self.progress.step:
            is_saved = self._save(self.run.store.save_last, is_end)
            # Only the first process knows, and all must agree on when to save.
            self.saved_step = self.progress.step if is_saved or not self.run.processes.is_alone else self.saved_step
            self.saved_at = time.perf_counter()

    def _save(self, write: Callable[[Checkpoint], None], is_end: bool = False) -> bool:
        """The first process writes. A disk that cannot take it is reported and the run goes on, except at its end."""
        run, progress = self.run, self.progress
        progress.wall_seconds = time.perf_counter() - self.began
        checkpoint = run.checkpoint(progress, self.start)
        if run.processes.is_master:
            try:
                write(checkpoint)
            except RunError as error:
                run.report.tell("checkpoint_failed", progress.step, str(error))
                if is_end or progress.step >= run.config.max_iters:
                    raise
                return False
            run.report.tell("checkpoint", progress.step, f"saving checkpoint to {run.config.out_dir}")
        return True

    def _is_scale_search(self, update: Update) -> bool:
        """float16's scaler overflows on purpose now and then to find the largest scale; that is no fault."""
        scaler = self.run.engine.scaler
        return scaler.is_enabled() and not update.applied and math.isfinite(update.loss) and scaler.get_scale() >= 1.0

    def _roll_back(self) -> None:
        """Back to the last good weights but on with new data: the same batches would end the same way."""
        run, progress = self.run, self.progress
        checkpoint = run.store.load_last()
        if checkpoint is None:
            raise RunError(
                f"the loss is not finite since step {progress.step - self.bad.in_a_row} and there is no checkpoint to "
                f"return to; use a lower learning_rate or more warmup_iters"
            )
        self.bad.rolled_back(progress.step)
        bad_step, window = progress.step, progress.window
        restore_from(checkpoint, run.engine)
        progress.step = self.saved_step = checkpoint.iter_num
        if isinstance(run.sampler, EpochSampler):
            run.sampler.base_step, run.sampler.base_window = progress.step, window
        run.report.tell(
            "rollback",
            progress.step,
            f"return number {self.bad.rollbacks} to the checkpoint of step {progress.step}: no finite loss "
            f"before step {bad_step}; the data goes on",
        )
        self._prefetch(progress.step, 0)
