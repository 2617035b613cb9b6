"""Train a model: from a config to checkpoints, a log and a result; prints nothing."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from gptfit.config import TrainConfig
from gptfit.run.checkpoint import LAST, Checkpoint, load_weights, newest_readable
from gptfit.run.device import find_device
from gptfit.run.extend import checkpoint_for_horizon
from gptfit.run.faults import SignalWatch
from gptfit.run.files import FolderLock, make_run_folder
from gptfit.run.header import header_fields
from gptfit.run.loop import Loop
from gptfit.run.meter import Meter
from gptfit.run.pretrained import adopt_model, load_pretrained
from gptfit.run.processes import find_processes, join, leave
from gptfit.run.progress import NANOGPT_NO_LOSS, Progress
from gptfit.run.report import Report, Reporter, ignore
from gptfit.run.restore import restore_from, resume_position
from gptfit.run.resume import check_resume
from gptfit.run.setup import Data, Run, build_run, check_processes, open_data
from gptfit.run.store import CheckpointStore
from gptfit.startmodel import is_pretrained


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. `reason`: max_iters, max_hours, early_stop, eval_only, SIGINT or SIGTERM."""

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
        return self.reason in ("SIGINT", "SIGTERM", "max_hours")


def train(config: TrainConfig, reporter: Reporter = ignore) -> TrainResult:
    """Run until max_iters or a reason to stop. Every event goes to `reporter` as it goes to run.jsonl."""
    processes = find_processes()
    config = adopt_model(config) if is_pretrained(config) else config
    check_processes(config, processes)
    device = find_device(config, processes.local_rank)
    data = open_data(config)
    folder = make_run_folder(config.out_dir)
    lock = FolderLock(folder) if processes.is_master else None
    join(processes, config.backend, device)
    report = Report(reporter, processes.is_master)
    try:
        with SignalWatch() as signals:
            store = CheckpointStore(folder, config.keep_checkpoints, processes.is_master)
            run = build_run(config, data, device, processes, store, report)
            try:
                return _train(run, data, signals)
            finally:
                run.close()
    finally:
        report.close()
        leave(processes)
        if lock:
            lock.release()


def _train(run: Run, data: Data, signals: SignalWatch) -> TrainResult:
    config, report = run.config, run.report
    progress, notes = _starting_point(run)
    report.open_sinks(run.store.folder, config)
    peak = (run.peak_tflops, run.peak_basis)
    begun = dataclasses.replace(config, init_from=run.origin)
    report.emit("header", **header_fields(begun, run.shape, data.info, run.device, run.processes.count, peak))
    for kind, note in [*notes, *_device_notes(run)]:
        report.tell(kind, progress.step, note)
    saved_step = progress.step if config.init_from == "resume" else -1
    loop = Loop(run, progress, signals, Meter(run), saved_step)
    reason = loop.train()
    result = _result(loop, reason)
    report.emit("end", reason=reason, step=result.step, seconds=result.seconds, best_val_loss=result.best_val_loss)
    return result


def _starting_point(run: Run) -> tuple[Progress, list[tuple[str, str]]]:
    """Fresh or from the checkpoint, and what a person should know about it."""
    if run.config.init_from != "resume":
        notes = [_start_from_weights(run)] if is_pretrained(run.config) else []
        aside = run.store.set_aside_earlier_run() if run.processes.is_master and not run.config.eval_only else None
        if aside:
            notes.append(("note", f"the checkpoints of an earlier run were moved to {aside}"))
        return Progress(), notes
    checkpoint, damaged = newest_readable(run.store.folder)
    checkpoint = checkpoint_for_horizon(run.store, checkpoint, run.config, run.processes.is_master)
    notes = [("damaged", f"{line} (done automatically)") for line in damaged]
    known = checkpoint.config.get("init_from", "resume")
    run.origin = "scratch" if known == "resume" else known  # a nanoGPT checkpoint may say only that it was resumed
    changed = check_resume(checkpoint, run.config, run.shape)
    progress = restore_from(checkpoint, run.engine)
    resume_position(checkpoint, run.engine, run.sampler)
    run.store.last_step = checkpoint.iter_num if checkpoint.path == run.store.folder / LAST else None
    notes.append(("resume", _resume_sentence(checkpoint, changed)))
    return progress, notes


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
