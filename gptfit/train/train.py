"""Train a model: from a config to checkpoints, a log and a result; prints nothing."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptfit.checkpoint.extend import before_decay_of
from gptfit.checkpoint.format import (
    BEFORE_DECAY,
    BEST,
    LAST,
    Checkpoint,
    load_checkpoint,
    load_weights,
    newest_readable,
)
from gptfit.checkpoint.pretrained import adopt_model, load_pretrained
from gptfit.checkpoint.resume import check_resume
from gptfit.checkpoint.store import CheckpointStore, lock_run_folder, make_run_folder
from gptfit.config.keys import TrainConfig, find_warnings
from gptfit.config.optimizer_facts import facts_of
from gptfit.config.start_model import is_pretrained
from gptfit.device.device import find_device
from gptfit.device.formats import check_formats
from gptfit.device.out_of_memory import is_out_of_memory
from gptfit.device.processes import (
    LOST_PEER,
    Processes,
    find_processes,
    is_lost_peer,
    is_restart,
    join,
    leave,
    this_start,
)
from gptfit.errors import GptfitError, RunError
from gptfit.logs.events import End
from gptfit.notify import check_target
from gptfit.train.climb import config_that_fits_all
from gptfit.train.clock import RunClock
from gptfit.train.faults import SignalWatch
from gptfit.train.header import run_header
from gptfit.train.loop import Loop
from gptfit.train.meter import Meter
from gptfit.train.progress import NANOGPT_NO_LOSS, Progress
from gptfit.train.restore import restore_from, resume_position
from gptfit.train.samples import Sampling
from gptfit.train.saver import Saver
from gptfit.train.setup import Data, Run, build_run, check_processes, open_data
from gptfit.train.sinks import Report, Reporter, ignore
from gptfit.train.trackers import check_trackers


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. `reason`: max_iters, max_hours, early_stop, eval_only, SIGINT, SIGTERM or SIGHUP."""

    reason: str
    step: int
    out_dir: Path
    best_val_loss: float | None
    train_loss: float | None
    val_loss: float | None
    tokens: int
    seconds: float
    tokens_per_s: float | None
    mfu: float | None
    peak_bytes: int
    micro_batch: int
    is_master: bool = True

    @property
    def was_stopped(self) -> bool:
        """By a signal or the clock: there is more to do, `--init_from=resume` does it."""
        return self.reason in ("SIGINT", "SIGTERM", "SIGHUP", "max_hours")


def train(config: TrainConfig, reporter: Reporter = ignore) -> TrainResult:
    """Run until max_iters or a reason to stop. Every event goes to `reporter` as it goes to run.jsonl."""
    processes = find_processes()
    config = adopt_model(config) if is_pretrained(config) else config
    check_processes(config, processes)
    check_trackers(config)
    check_target(config.notify)
    device = find_device(config, processes.local_rank)
    check_formats(config, device)
    data = open_data(config)
    folder = make_run_folder(config.out_dir)
    lock = lock_run_folder(folder) if processes.is_master else None
    join(processes, config.backend, device)
    report = Report(reporter, processes.is_master)
    try:
        with SignalWatch() as signals:
            config = _resuming_if_restarted(config, processes)
            store = CheckpointStore(folder, config.keep_checkpoints, processes.is_master)
            config, measures = config_that_fits_all(config, data.shape, device, processes)
            run = _build(config, data, device, processes, store, report)
            try:
                return _train(run, data, signals, measures)
            finally:
                run.close()
    except RuntimeError as error:
        if processes.is_alone or not is_lost_peer(error):
            raise
        raise RunError(LOST_PEER, fix="the last checkpoint stands: resume with --init_from=resume") from None
    finally:
        report.close()
        leave(processes)
        if lock:
            lock.release()


def _build(*parts: Any) -> Run:
    try:
        return build_run(*parts)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        shape = parts[1].shape
        raise RunError(
            f"{shape.n_weights:,} weights do not fit in this machine's memory (vocab_size {shape.vocab_size:,}, "
            f"n_layer {shape.n_layer}, n_embd {shape.n_embd})",
            fix="`gptfit plan` says which model does",
        ) from None


def _resuming_if_restarted(config: TrainConfig, processes: Processes) -> TrainConfig:
    """torchrun starts killed processes again with the same words; what this start saved is gone on from.

    One on a machine that took a lost one's place does not know that there was a start before: the others say so.
    """
    if config.init_from == "resume" or not any(processes.gather(is_restart())):
        return config
    is_ours = processes.gather(processes.is_master and _is_of_this_start(Path(config.out_dir)))[0]
    return dataclasses.replace(config, init_from="resume") if is_ours else config


def _is_of_this_start(folder: Path) -> bool:
    if not (folder / LAST).is_file():
        return False
    checkpoint, _ = newest_readable(folder, lazy=True)
    return bool(checkpoint.progress.get("start") == this_start())


def _train(run: Run, data: Data, signals: SignalWatch, measures: str | None) -> TrainResult:
    config, report = run.config, run.report
    if run.processes.is_master and not config.eval_only:
        run.store.check_first_room(_checkpoint_bytes(run))
    progress, notes = _starting_point(run)
    notes += [("note", measures)] if measures else []
    report.open_sinks(run.store.folder, config)
    peak = (run.peak_tflops, run.peak_basis)
    begun = dataclasses.replace(config, init_from=run.origin)
    report.emit(run_header(begun, run.shape, data.info, run.device, run.processes.count, peak, run.is_chunked))
    warnings = [("warning", problem.line) for problem in find_warnings(config.as_dict(), run.processes.count)]
    for kind, note in [*warnings, *notes, *_device_notes(run)]:
        report.tell(kind, progress.step, note)
    saved_step = progress.step if config.init_from == "resume" else -1
    clock = RunClock().start()
    loop = Loop(
        run, progress, signals, Meter(run), Saver(run, progress, clock, saved_step), clock, _sampling(run, data)
    )
    try:
        reason = loop.train()
    finally:
        clock.stop()
    result = _result(loop, reason)
    report.emit(End(reason, result.step, result.seconds, result.best_val_loss))
    return result


def _sampling(run: Run, data: Data) -> Sampling | None:
    """In one process, which must have the whole model to write anything."""
    config = run.config
    if not config.sample_interval or config.eval_only or not run.processes.is_master:
        return None
    if run.engine.parallel.is_sharded:
        run.report.tell("note", 0, "no samples: the model is divided among the processes")
        return None
    return Sampling(data.info, config.sample_prompts, data.files["val"], run.engine)


def _checkpoint_bytes(run: Run) -> int:
    """At least this much: the weights and what the optimizer keeps for each."""
    weights = sum(tensor.nbytes for tensor in run.engine.model.state_dict().values())
    facts = facts_of(run.config.optimizer)
    return int(weights * (1 + min(facts.matrix_numbers, facts.other_numbers)))


def _starting_point(run: Run) -> tuple[Progress, list[tuple[str, str]]]:
    """Fresh or from the checkpoint, and what a person should know about it."""
    if run.config.init_from != "resume":
        notes = [_start_from_weights(run)] if is_pretrained(run.config) else []
        aside = run.store.set_aside_earlier_run() if run.processes.is_master and not run.config.eval_only else None
        if aside:
            notes.append(("note", f"the checkpoints of an earlier run were moved to {aside}"))
        return Progress(), notes
    last, damaged = newest_readable(run.store.folder)
    earlier = before_decay_of(run.store, last, run.config)
    checkpoint = earlier or last
    run.processes.wait()  # from here on the first process moves and removes files that the others had to read
    if earlier and run.processes.is_master:
        run.store.go_back_to(run.store.folder / BEFORE_DECAY, earlier.iter_num, last.iter_num)
    notes = [("damaged", f"{line} (done automatically)") for line in damaged]
    known = checkpoint.config.get("init_from", "resume")
    run.origin = "scratch" if known == "resume" else known  # a nanoGPT checkpoint may say only that it was resumed
    changed = check_resume(checkpoint, run.config, run.shape)
    progress = restore_from(checkpoint, run.engine)
    if checkpoint.progress:
        _believe_the_disk(progress, run.store, went_back=earlier is not None)
    resume_position(checkpoint, run.engine, run.sampler)
    if run.wants_paces and len(paces := checkpoint.progress.get("paces", [])) == run.processes.count:
        run.take_paces(paces)
    if checkpoint.path == run.store.folder / LAST:
        run.store.last_step = checkpoint.iter_num
        if run.processes.is_master and not run.config.eval_only:
            run.store.remove_surplus()  # what a kill right after the last save left; its copies may be all there is else
    notes.append(("resume", _resume_sentence(checkpoint, changed)))
    return progress, notes


def _believe_the_disk(progress: Progress, store: CheckpointStore, went_back: bool) -> None:
    """The best loss is that of the model in best.pt: one that could not be written does not count.

    One that is better than the checkpoint knows came from an evaluation that the resumed run repeats, except where it
    went back to an earlier step: there it must not be replaced by a worse model.
    """
    if progress.best_step == 0 and not went_back:
        return  # the untrained model is not kept
    try:
        kept = load_checkpoint(store.folder / BEST, lazy=True)
    except GptfitError:
        progress.best_val_loss = NANOGPT_NO_LOSS
        return
    if went_back or kept.best_val_loss > progress.best_val_loss:
        progress.best_val_loss, progress.best_step = kept.best_val_loss, kept.iter_num


def _start_from_weights(run: Run) -> tuple[str, str]:
    checkpoint, shape = load_pretrained(run.config), run.shape
    load_weights(run.engine.model, checkpoint)
    return "note", (
        f"starting from the weights of {checkpoint.path}: {shape.n_layer} layers x {shape.n_embd}, {shape.n_head} heads, "
        f"vocabulary {shape.vocab_size:,}; the model's keys are theirs"
    )


def _resume_sentence(checkpoint: Checkpoint, changed: list[str]) -> str:
    changes = f"; changed: {', '.join(changed)}" if changed else ""
    return f"resuming {checkpoint.path} at step {checkpoint.iter_num}{changes}"


def _device_notes(run: Run) -> list[tuple[str, str]]:
    notes = [("note", note) for note in run.device.notes]
    if run.engine.compile_problem:
        notes.append(("note", f"not compiled: {run.engine.compile_problem}; training eagerly"))
    return notes


def _result(loop: Loop, reason: str) -> TrainResult:
    run, progress = loop.run, loop.progress
    is_known = math.isfinite(progress.best_val_loss) and progress.best_val_loss < NANOGPT_NO_LOSS
    return TrainResult(
        reason=reason,
        step=progress.step,
        out_dir=run.store.folder,
        best_val_loss=progress.best_val_loss if is_known else None,
        train_loss=progress.last_train_loss,
        val_loss=progress.last_val_loss,
        tokens=progress.tokens,
        seconds=progress.seconds,
        tokens_per_s=loop.meter.mean_tokens_per_s,
        mfu=loop.meter.mfu,
        peak_bytes=loop.meter.peak_bytes,
        micro_batch=loop.micro_batch,
        is_master=run.processes.is_master,
    )
