"""open_run: a run folder, our run.jsonl, or the stdout of nanoGPT or nanochat, all as the same RunLog."""

from __future__ import annotations

import bisect
import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gptfit.errors import RunError
from gptfit.foreignheader import build_header
from gptfit.heard import Heard, training_seconds, usual_ms
from gptfit.logtext import clean_lines, read_log_text
from gptfit.nanochatlog import looks_like_nanochat, read_nanochat
from gptfit.nanogptlog import looks_like_nanogpt, read_nanogpt
from gptfit.runlog import RUN_LOG, Event, RunLog, read_run

LOOKED_FOR = (
    "looked for nanoGPT's `iter 10: loss 3.4410, time 52.31ms, mfu 12.34%`, "
    "nanochat's `step 00010/21400 | loss: 3.44 | dt: 52.31ms | tok/sec: 1,234` and gptfit's run.jsonl"
)


def open_run(path: str | Path, config_path: str | Path | None = None) -> RunLog:
    """Whatever kind of log it is. `config_path` supplies the config of a log that does not echo it."""
    path = Path(path)
    if path.is_dir():
        if not (path / RUN_LOG).is_file():
            raise RunError(f"{path}: no {RUN_LOG} in this folder; name the log file itself, or a folder `train` wrote")
        return read_run(path)
    if not path.exists():
        raise RunError(f"{path}: no such file; name a run folder, a {RUN_LOG}, or the text that training printed")
    if _is_run_jsonl(path):
        return read_run(path)
    return run_from_text(path, read_log_text(path), config_path)


def run_from_text(path: Path, text: str, config_path: str | Path | None = None) -> RunLog:
    """The run in text that a trainer printed; `path` names it."""
    with _collector_paused():
        heard = _hear(path, clean_lines(text))
        return _as_run(path, heard, Path(config_path) if config_path else None)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """A million small objects, none in a cycle: the garbage collector would walk them again and again for nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _is_run_jsonl(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            start = file.read(4096).lstrip()
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror or error}") from error
    return start.startswith(b"{") and b'"event"' in start


def _hear(path: Path, lines: list[str]) -> Heard:
    if any(map(looks_like_nanogpt, lines)):
        heard = read_nanogpt(lines)
    elif any(map(looks_like_nanochat, lines)):
        heard = read_nanochat(lines)
    else:
        raise RunError(f"{path}: no training line in {len(lines):,} lines; {LOOKED_FOR}")
    if not heard.steps and not heard.evals:
        raise RunError(f"{path}: training lines begin but none is whole; {LOOKED_FOR}")
    return heard


def _as_run(path: Path, heard: Heard, config_path: Path | None) -> RunLog:
    header = build_header(path, heard, config_path)
    per_step = header["tokens_per_step"]
    seconds = training_seconds(heard.steps)
    if heard.steps and heard.steps[0].step > 1 and seconds[0] is not None:
        heard.notes.append(
            f"the log starts at step {heard.steps[0].step:,}; the time before it is taken at the usual step time"
        )
    if heard.steps and usual_ms(heard.steps) is not None and not any(line.clean for line in heard.steps):
        heard.notes.append("every logged step holds an eval or the compile, so the times here include them")
    return RunLog(
        path=path,
        header=header,
        steps=_step_events(heard, seconds, per_step),
        evals=_eval_events(heard, seconds, per_step),
        events=tuple(heard.events),
        notes=tuple(heard.notes),
    )


def _step_events(heard: Heard, seconds: list[float | None], per_step: int | None) -> tuple[Event, ...]:
    """`ms` only where the line timed a step and nothing else; the printed MFU is left out, as it is an average."""
    events: list[Event] = []
    for (step, loss, ms, clean, _, lr, grad_norm, memory_gib, _), at in zip(heard.steps, seconds, strict=True):
        event: Event = {"event": "step", "step": step, "loss": loss, "seconds": at, "ms": ms if clean else None}
        if lr is not None:
            event["lr"] = lr
        if grad_norm is not None:
            event["grad_norm"] = grad_norm
        if memory_gib is not None:
            event["memory_gib"] = memory_gib
        if per_step:
            event["tokens"] = step * per_step
        events.append(event)
    return tuple(events)


def _eval_events(heard: Heard, seconds: list[float | None], per_step: int | None) -> tuple[Event, ...]:
    """An eval at step s is taken before update s, so its time is that of the end of step s - 1."""
    ends = [(-1, 0.0)] + [(line.step, at) for line, at in zip(heard.steps, seconds, strict=True) if at is not None]
    usual = usual_ms(heard.steps)
    held = {line.step: line.ms for line in heard.steps if not line.clean and line.ms is not None}
    first = heard.steps[0].step if heard.steps else None
    events: list[Event] = []
    for line in heard.evals:
        event: Event = {"event": "eval", "step": line.step, "seconds": _seconds_after(ends, line.step - 1)}
        for key in ("train_loss", "val_loss", "val_bpb"):
            value = getattr(line, key)
            if value is not None:
                event[key] = value
        # The first line's time holds the compile as well, so it says nothing about the eval.
        if usual is not None and line.step in held and line.step != first and heard.kind == "nanogpt":
            event["ms"] = max(0.0, held[line.step] - usual)
        if per_step:
            event["tokens"] = line.step * per_step
        events.append(event)
    return tuple(events)


def _seconds_after(ends: list[tuple[int, float]], step: int) -> float | None:
    """Training seconds at the end of `step`, on the straight lines between the logged ends."""
    if len(ends) < 2:
        return None
    i = min(max(1, bisect.bisect_left(ends, (step, -math.inf))), len(ends) - 1)
    (low, before), (high, after) = ends[i - 1], ends[i]
    return before + (after - before) * (step - low) / (high - low)
