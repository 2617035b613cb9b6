"""The training loop: save, evaluate, step; it can stop, shrink, roll back and go on at any point."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from gptfit.checkpoint.extend import is_decay_start
from gptfit.config.start_model import is_pretrained
from gptfit.device.out_of_memory import is_out_of_memory
from gptfit.errors import DataError, RunError
from gptfit.logs.events import Eval
from gptfit.schedule import knobs
from gptfit.train.batches import Batch, EpochSampler, counted_share
from gptfit.train.climb import next_rung
from gptfit.train.clock import RunClock
from gptfit.train.engine import Update, collection_frozen
from gptfit.train.fast_products import verdict
from gptfit.train.faults import (
    STOP_SENTENCES,
    NonFiniteCount,
    SignalWatch,
    Stopped,
)
from gptfit.train.meter import Meter
from gptfit.train.out_of_memory import out_of_memory_advice, smaller_micro_batch
from gptfit.train.parallel import Passes
from gptfit.train.progress import Progress, StepStart
from gptfit.train.randomness import rng_state, seed_step, set_rng_state
from gptfit.train.restore import restore_from
from gptfit.train.samples import Sampling
from gptfit.train.saver import Saver
from gptfit.train.setup import Run
from gptfit.units import duration

T = TypeVar("T")


@dataclass
class Loop:
    """One run from its first step in this process to its last."""

    run: Run
    progress: Progress
    signals: SignalWatch
    meter: Meter
    saver: Saver
    clock: RunClock
    sampling: Sampling | None = None
    start: StepStart = field(default_factory=StepStart)
    bad: NonFiniteCount = field(default_factory=NonFiniteCount)

    def __post_init__(self) -> None:
        self.micro_batch = self.run.config.batch_size
        self.sampled_step = self.progress.step if self.run.config.init_from == "resume" else -1

    def train(self) -> str:
        """Returns why it ended; what can be resumed is on the disk by then."""
        with collection_frozen():
            try:
                reason = self._train()
            except Stopped as stopped:
                self._return_to_start()
                reason = str(stopped)
            except DataError:  # the data is gone or cut; what was learned from it is worth keeping
                self._return_to_start()
                self._save_what_there_is()
                raise
            if reason in STOP_SENTENCES:
                kind = "signal" if reason.startswith("SIG") else reason
                self.run.report.tell(kind, self.progress.step, STOP_SENTENCES[reason])
            if self.progress.step > 0 and reason != "eval_only":
                self.saver.save_last(self.start, is_end=True)
            return reason

    def _save_what_there_is(self) -> None:
        if self.progress.step > 0 and not self.run.config.eval_only and self.run.processes.is_alone:
            with suppress(RunError):  # the first failure is the one to tell
                self.saver.save_last(self.start, is_end=True)

    def _train(self) -> str:
        config, progress = self.run.config, self.progress
        self._mark_start()
        self._surviving_memory(self._warm_up)
        self._share_out()
        self._prefetch(progress.step, 0)
        while True:
            self._mark_start()
            if is_decay_start(config, progress.step) and not config.eval_only:
                self.saver.save_before_decay(self.start)
            if self._is_eval_due():
                if progress.step > 0 and not config.eval_only and not self.bad.in_a_row:
                    self.saver.save_last(self.start)
                reason = self._evaluate()
                self._mark_start()
                if reason:
                    return reason
            if self._is_sample_due():
                self._sample()
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

    def _is_sample_due(self) -> bool:
        """An untrained model has nothing to show; a resumed run showed it already."""
        step, config = self.progress.step, self.run.config
        if self.sampling is None or step == self.sampled_step or (step == 0 and not is_pretrained(config)):
            return False
        return step % config.sample_interval == 0 or step >= config.max_iters

    def _sample(self) -> None:
        assert self.sampling is not None
        self.sampled_step = self.progress.step
        poll = self.signals.poll if self.run.processes.is_alone else None
        for sample in self.sampling.samples(self.progress.step, poll):
            self.run.report.emit(sample)
        if self.sampling.problem:
            self.run.report.tell("note", self.progress.step, f"no more samples: {self.sampling.problem}")
            self.sampling = None

    def _mark_start(self) -> None:
        """Everything random about the coming step is fixed here, so that the step can be repeated."""
        if self.run.config.sampling == "epoch":
            seed_step(self.run.config.seed, self.progress.step, self.run.processes.rank, self.run.device)
        self.start = StepStart(rng_state(self.run.device), self.run.sampler.state())

    def _return_to_start(self) -> None:
        self.run.engine.forget_gradients()
        set_rng_state(self.start.rng, self.run.device)
        self.run.sampler.restore(self.start.drawn)

    def _warm_up(self) -> None:
        """Compile before the clock runs, and find out early whether the micro-batch fits."""
        run, config = self.run, self.run.config
        if not run.engine.compiled:
            self._meet()
            return
        began = self.clock.now()
        try:
            problem = run.engine.compile_now(self._any_batch(), with_backward=not config.eval_only)
            self._meet()
        finally:
            self._return_to_start()
        seconds = self.clock.now() - began
        told = f"not compiled: {problem}; training eagerly" if problem else f"compiled in {duration(seconds)}"
        run.report.tell("note" if problem else "compile", self.progress.step, told, seconds=seconds)

    def _any_batch(self) -> Batch:
        """As training's, drawing nothing."""
        feed = self.run.feeds["train"]
        return feed.to_device(feed.read(np.zeros(self.micro_batch, dtype=np.int64)))

    def _meet(self) -> None:
        """Two exchanges before the first real one: DDP settles its buckets, and gradients move into them for good."""
        run = self.run
        if run.processes.is_alone or run.config.eval_only:
            return
        batch = self._any_batch()
        for _ in range(2):
            run.engine.together(lambda: run.engine.whole_micro_step(batch), Passes(updates=1))
        self._return_to_start()

    def _share_out(self) -> None:
        """Unlike cards: time a micro-step on each, once per run; a resumed run keeps its shares."""
        run = self.run
        if not run.wants_paces:
            return
        run.take_paces(run.processes.gather(run.engine.seconds_per_micro_step(self._any_batch())))
        self._return_to_start()
        paces = ", ".join(f"{one * 1e3:.0f}" for one in run.paces)
        shares = " + ".join(map(str, run.shares_of(self.progress.step)))
        told = f"unlike devices: {paces} ms per micro-step, so they do {shares} of each update"
        run.report.tell("note", self.progress.step, told)

    def _prefetch(self, step: int, first: int) -> None:
        self.run.feeds["train"].prefetch(self.run.sampler.starts(step, first, self.micro_batch))

    def _step(self) -> None:
        """One update, timed alone, with its consequences."""
        run, progress = self.run, self.progress
        run.device.reset_peak_memory()
        was_watched = run.engine.products.is_watched
        update, seconds = self._surviving_memory(self._attempt_step)
        progress.seconds += seconds
        progress.tokens += run.tokens_of(progress.step)
        self.meter.count(run.tokens_of(progress.step), seconds)
        if not update.applied and not update.is_empty:
            what = f"loss {update.loss}, gradient norm {update.grad_norm}"
            run.report.tell("nonfinite", progress.step, f"{what}: update {progress.step} skipped, weights unchanged")
        if progress.step % run.config.log_interval == 0 and not update.is_empty:
            run.report.emit(self.meter.step_event(update, progress, seconds))
        progress.step += 1
        if isinstance(run.sampler, EpochSampler):
            progress.window = run.sampler.position(progress.step)
        if not self._is_scale_search(update) and self.bad.seen(update.applied or update.is_empty):
            self._roll_back()
        if was_watched and not run.engine.products.is_watched:
            self._judge_products()

    def _judge_products(self) -> None:
        """The first steps in a faster format are done: it stays, or bfloat16 takes its place."""
        run, products = self.run, self.run.engine.products
        mean = torch.tensor(list(products.differences.values())).mean().to(run.device.torch_device)
        stays, told = verdict(products.name, float(run.processes.average(mean)))
        run.report.tell("note", self.progress.step, told)
        if not stays:
            run.device = run.engine.leave_fast_products()
            self._mark_start()
            self._surviving_memory(self._warm_up)

    def _attempt_step(self) -> tuple[Update, float]:
        run, step = self.run, self.progress.step
        began = self.clock.now()
        passes = Passes(updates=run.windows_of(step) // self.micro_batch)
        loss_sum, counted = run.engine.together(self._micro_steps, passes)
        micro_steps = run.even_micro_steps(step, self.micro_batch)
        update = run.engine.update(loss_sum, micro_steps, knobs(run.config, step), counted)
        run.device.synchronize()
        return update, self.clock.now() - began

    def _micro_steps(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This process's share of an update: its gradients, exchanged with the last of them, and the sum of its losses.

        And the sum of the shares of tokens that count, where not all do.
        """
        run, step = self.run, self.progress.step
        micro_steps = run.windows_of(step) // self.micro_batch
        run.engine.begin_step(knobs(run.config, step))
        loss_sum = torch.zeros((), device=run.device.torch_device)
        counted = torch.zeros_like(loss_sum) if run.engine.model.loss_is_masked else None
        for micro_step in range(micro_steps):
            if run.processes.is_alone:
                self.signals.poll()
            is_last = micro_step == micro_steps - 1
            batch = run.feeds["train"].take()
            if micro_step == 0 and run.engine.products.is_watched:
                run.engine.products.watch(batch, step)
            loss = run.engine.forward_micro_step(batch, is_last)
            # After forward and before backward: where nanoGPT draws its next batch from the random stream.
            self._prefetch(*(step + 1, 0) if is_last else (step, (micro_step + 1) * self.micro_batch))
            run.engine.backward_micro_step(loss, run.even_micro_steps(step, self.micro_batch))
            loss_sum += loss.detach()
            if counted is not None:
                counted += counted_share(batch)
        run.engine.ready_optimizer()
        return loss_sum, counted

    def _surviving_memory(self, action: Callable[[], T]) -> T:
        """Do it; when memory runs out, again with half the micro-batch, from the beginning of the step."""
        while True:
            try:
                return action()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            # Outside the except block: the error holds the frames, and the frames hold the memory.
            self._save_memory()
            if self.run.engine.compiled and action != self._warm_up:
                self._surviving_memory(self._warm_up)  # here, so that no step's time has it
            self._prefetch(self.progress.step, 0)

    def _save_memory(self) -> None:
        """Measures that the config leaves open first, as long as they cost less speed than a smaller batch."""
        run = self.run
        self._return_to_start()
        gc.collect()  # it is off while training, and a failed call can leave cycles that hold tensors
        run.device.release_memory()
        # Unlike devices may take unlike measures; only when nobody has one left do all take a smaller batch.
        measures = run.processes.gather(next_rung(run.engine, self.micro_batch * run.config.block_size))
        measure = next(filter(None, measures), None)
        waits = run.windows_of(self.progress.step) > self.micro_batch
        if not measure and waits and run.engine.parallel.sum_in_every_micro_step():
            measure = "gradients are summed in every micro-step"
        if measure:
            told = f"out of memory: from here on {measure}"
            run.report.tell("oom", self.progress.step, told, batch_size=self.micro_batch, chunked_loss=run.is_chunked)
        else:
            self._shrink()
        run.engine.parallel.renew(run.engine.forward)

    def _shrink(self) -> None:
        run, step = self.run, self.progress.step
        smaller = smaller_micro_batch(self.micro_batch, run.common_windows)
        if smaller is None:
            raise RunError(out_of_memory_advice(run.setting(self.micro_batch)))
        self.micro_batch = smaller
        run.report.tell(
            "oom",
            self.progress.step,
            f"out of memory: batch_size is now {smaller}, gradient_accumulation_steps "
            f"{run.micro_steps_of(step) * run.config.batch_size // smaller}; still {run.tokens_of(step):,} tokens per step",
            batch_size=smaller,
        )
        if run.engine.compiled:
            torch.compiler.reset()

    def _evaluate(self) -> str | None:
        """Report both losses, keep the best model; the reason to stop, if this eval is one."""
        run, progress, config = self.run, self.progress, self.run.config
        began = self.clock.now()
        gc.collect()  # checkpointed blocks leave a few cyclic objects each, and the collector is off while training
        poll = self.signals.poll if run.processes.is_alone else None
        losses = self._surviving_memory(lambda: run.evaluator.losses(self.micro_batch, poll))
        is_best = progress.record_eval(losses.train, losses.val)
        run.report.emit(
            Eval(
                step=progress.step,
                train_loss=losses.train,
                val_loss=losses.val,
                tokens=progress.tokens,
                eval_tokens=losses.eval_tokens,
                ms=(self.clock.now() - began) * 1000,
                seconds=progress.seconds,
            )
        )
        if config.eval_only:
            return "eval_only"
        if is_best and (progress.step > 0 or is_pretrained(config)) and not self.bad.in_a_row:
            self._mark_start()
            self.saver.save_best(self.start)
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
        progress.wall_seconds = self.saver.wall_seconds()
        is_late = run.config.max_hours > 0 and progress.wall_seconds >= run.config.max_hours * 3600
        flags = [self.signals.received is not None, is_late, self.saver.is_due]
        signalled, is_late, save_due = run.processes.any_of(flags, run.device)
        if signalled:
            return self.signals.received or "SIGTERM"
        if is_late:
            return "max_hours"
        if save_due and not self.bad.in_a_row:
            self._mark_start()
            self.saver.save_last(self.start)
        return None

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
                "return to",
                fix="use a lower learning_rate or more warmup_iters",
            )
        self.bad.rolled_back(progress.step)
        bad_step, window = progress.step, progress.window
        restore_from(checkpoint, run.engine)
        progress.step = self.saver.saved_step = checkpoint.iter_num
        # What came after it is gone, also for who reads the log: it is due again.
        progress.evaluated_step = min(progress.evaluated_step, progress.step)
        self.sampled_step = min(self.sampled_step, progress.step)
        if isinstance(run.sampler, EpochSampler):
            run.sampler.base_step, run.sampler.base_window = progress.step, window
        run.report.tell(
            "rollback",
            progress.step,
            f"return number {self.bad.rollbacks} to the checkpoint of step {progress.step}: no finite loss "
            f"before step {bad_step}; the data goes on",
        )
        self._prefetch(progress.step, 0)
