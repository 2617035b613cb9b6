"""open_run: a run folder, our run.jsonl, or the stdout of nanoGPT or nanochat, all as the same RunLog."""

from __future__ import annotations

import bisect
import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gptfit.errors import RunError
from gptfit.files import reading_remedy, reason_of
from gptfit.logs import nanochat, nanogpt
from gptfit.logs.events import Eval, Step
from gptfit.logs.infer_header import build_header
from gptfit.logs.parsed_log import ParsedLog, training_seconds, usual_ms
from gptfit.logs.runlog import RUN_LOG, RunLog, read_run
from gptfit.logs.sanitise import finite, positive
from gptfit.logs.terminal_text import clean_lines, read_log_text

# Other programs' logs, the first whose lines are found; a new one is its file and its name here.
FORMATS = (nanogpt.FORMAT, nanochat.FORMAT)
_EXAMPLES = ", ".join(f"{found.name}'s `{found.example}`" for found in FORMATS)
LOOKED_FOR = f"looked for {_EXAMPLES} and gptfit's run.jsonl"


def open_run(path: str | Path, config_path: str | Path | None = None) -> RunLog:
    """Whatever kind of log it is. `config_path` supplies the config of a log that does not echo it."""
    path = Path(path)
    if path.is_dir():
        if not (path / RUN_LOG).is_file():
            raise RunError(
                f"{path}: no {RUN_LOG} in this folder", fix="name the log file itself, or a folder `train` wrote"
            )
        return read_run(path)
    if not path.exists():
        raise RunError(
            f"{path}: no such file", fix=f"name a run folder, a {RUN_LOG}, or the text that training printed"
        )
    if not path.is_file():
        raise RunError(f"{path}: is a pipe or a device, not a log", fix="write it to a file first")
    if _is_run_jsonl(path):
        return read_run(path)
    return run_from_text(path, read_log_text(path), config_path)


def run_from_text(path: Path, text: str, config_path: str | Path | None = None) -> RunLog:
    """The run in text that a trainer printed; `path` names it."""
    with _collector_paused():
        parsed = _parse_lines(path, clean_lines(text))
        return _as_run(path, parsed, Path(config_path) if config_path else None)


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
        raise RunError(f"{path}: cannot be read ({reason_of(error)})", fix=reading_remedy(error)) from None
    return start.startswith(b"{") and b'"event"' in start


def _parse_lines(path: Path, lines: list[str]) -> ParsedLog:
    found = next((one for one in FORMATS if any(map(one.is_line, lines))), None)
    if found is None:
        raise RunError(f"{path}: no training line in {len(lines):,} lines", fix=LOOKED_FOR)
    parsed = found.read(lines)
    if not parsed.steps and not parsed.evals:
        raise RunError(f"{path}: training lines begin but none is whole", fix=LOOKED_FOR)
    return parsed


def _as_run(path: Path, parsed: ParsedLog, config_path: Path | None) -> RunLog:
    header = build_header(path, parsed, config_path)
    per_step = header.tokens_per_step
    seconds = training_seconds(parsed.steps)
    if parsed.steps and parsed.steps[0].step > 1 and seconds[0] is not None:
        parsed.notes.append(
            f"the log starts at step {parsed.steps[0].step:,}; the time before it is taken at the usual step time"
        )
    if parsed.steps and usual_ms(parsed.steps) is not None and not any(line.clean for line in parsed.steps):
        parsed.notes.append("every logged step holds an eval or the compile, so the times here include them")
    return RunLog(
        path=path,
        header=header,
        steps=_step_events(parsed, seconds, per_step),
        evals=_eval_events(parsed, seconds, per_step),
        messages=parsed.messages,
        samples=parsed.samples,
        notes=tuple(parsed.notes),
    )


def _step_events(parsed: ParsedLog, seconds: list[float | None], per_step: int | None) -> list[Step]:
    """`ms` only where the line timed a step and nothing else; the printed MFU is left out, as it is an average."""
    return [
        Step(
            step=line.step,
            loss=finite(line.loss),
            lr=finite(line.lr),
            ms=positive(line.ms) if line.clean else None,
            tokens=line.step * per_step if per_step else None,
            grad_norm=finite(line.grad_norm),
            memory_gib=positive(line.memory_gib),
            seconds=finite(at),
        )
        for line, at in zip(parsed.steps, seconds, strict=True)
    ]


def _eval_events(parsed: ParsedLog, seconds: list[float | None], per_step: int | None) -> list[Eval]:
    """An eval at step s is taken before update s, so its time is that of the end of step s - 1."""
    ends = [(-1, 0.0)] + [(line.step, at) for line, at in zip(parsed.steps, seconds, strict=True) if at is not None]
    cost = _eval_ms(parsed)
    return [
        Eval(
            step=line.step,
            train_loss=finite(line.train_loss),
            val_loss=finite(line.val_loss),
            val_bpb=finite(line.val_bpb),
            tokens=line.step * per_step if per_step else None,
            ms=cost.get(line.step),
            seconds=finite(_seconds_after(ends, line.step - 1)),
        )
        for line in parsed.evals
    ]


def _eval_ms(parsed: ParsedLog) -> dict[int, float]:
    """What the lines that hold an eval took beyond a usual step. The first line holds the compile too: it says nothing."""
    usual = usual_ms(parsed.steps)
    if usual is None or parsed.kind != "nanogpt":
        return {}
    timed = {line.step: line.ms for line in parsed.steps[1:] if not line.clean and line.ms is not None}
    return {step: max(0.0, ms - usual) for step, ms in timed.items()}


def _seconds_after(ends: list[tuple[int, float]], step: int) -> float | None:
    """Training seconds at the end of `step`, on the straight lines between the logged ends."""
    if len(ends) < 2:
        return None
    i = min(max(1, bisect.bisect_left(ends, (step, -math.inf))), len(ends) - 1)
    (low, before), (high, after) = ends[i - 1], ends[i]
    return before + (after - before) * (step - low) / (high - low)
