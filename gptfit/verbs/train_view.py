"""What a person sees while training: nanoGPT's lines, and on a terminal a live line under them."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from gptfit.config.keys import TrainConfig
from gptfit.logs.events import DataSaid, Eval, Event, Header, Message, Sample, Step
from gptfit.shell import command
from gptfit.units import count, duration, gib, percent, perplexity, si
from gptfit.verbs.common import console, wrapped
from gptfit.verbs.next_commands import after_train, to_compare

if TYPE_CHECKING:
    from rich.progress import Progress

    from gptfit.train.train import TrainResult


NARROW = 100  # columns; below this the bar is short
SAMPLE_WIDTH = 100  # characters of a sample that the terminal shows; the log and the page have all
UNKNOWN_DATA = DataSaid()


class PlainView:
    """One line per event, as nanoGPT prints them; for files, pipes and old terminals."""

    def __init__(self, config: TrainConfig, is_master: bool = True) -> None:
        self.config = config
        self.is_master = is_master
        self.data = UNKNOWN_DATA

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def say(self, line: str) -> None:
        if self.is_master:
            print(line, flush=True)

    def report(self, event: Event) -> None:
        if isinstance(event, Header):
            self.data = event.dataset
        for line in event_lines(event, self.data):
            self.say(line)


class LiveView(PlainView):
    """The same lines scrolling by, and a bar with the figures that change all the time."""

    def __enter__(self) -> LiveView:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        screen = console()
        bar = BarColumn(bar_width=24 if screen.width > NARROW else 8)
        columns = (bar, MofNCompleteColumn(), TextColumn("{task.fields[figures]}", markup=False))
        self._bar: Progress = Progress(*columns, console=screen, refresh_per_second=4, transient=True)
        self._bar.start()
        self._task = self._bar.add_task("train", total=self.config.max_iters or None, figures="starting")
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, line: str) -> None:
        self._bar.console.print(wrapped(line, 4), highlight=False, markup=False, soft_wrap=True)

    def report(self, event: Event) -> None:
        if isinstance(event, Step):
            figures = live_figures(event, self.config.max_iters, self._room())
            self._bar.update(self._task, completed=event.step + 1, figures=figures)
        super().report(event)

    def _room(self) -> int:
        """Columns left for the figures beside the bar and `600000/600000`; the terminal may have been resized."""
        width = self._bar.console.width
        return width - (24 if width > NARROW else 8) - 2 * len(str(self.config.max_iters)) - 4


def make_view(config: TrainConfig, is_master: bool) -> PlainView:
    return LiveView(config) if is_master and sys.stdout.isatty() else PlainView(config, is_master)


def event_lines(event: Event, data: DataSaid = UNKNOWN_DATA) -> list[str]:
    """nanoGPT's own lines for steps and evals, so that what reads its output reads ours."""
    match event:
        case Header():
            return header_lines(event)
        case Step():
            mfu = f"{100 * event.mfu:.2f}%" if event.mfu is not None else "unknown"
            return [f"iter {event.step}: loss {event.loss:.4f}, time {event.ms:.2f}ms, mfu {mfu}"]
        case Eval():
            losses = f"step {event.step}: train loss {event.train_loss:.4f}, val loss {event.val_loss:.4f}"
            bits = _bits_per_byte(event.val_loss, data)
            per_byte = f"{bits:.4f} bits per byte, " if bits is not None else ""
            return [f"{losses} ({per_byte}{count(event.eval_tokens or 0)} val tokens)"]
        case Sample():
            return [f"sample at step {event.step}: {sample_line(event)}"]
        case Message():
            return [event.message]
    return []


def sample_line(sample: Sample) -> str:
    """Prompt and beginning of what follows on one line, without what a terminal would take for commands."""
    whole = " ".join(f"{sample.prompt} ... {sample.text}".split())
    shown = "".join(character if character.isprintable() else "?" for character in whole)
    return shown if len(shown) <= SAMPLE_WIDTH else f"{shown[:SAMPLE_WIDTH]} ..."


def _bits_per_byte(loss: float | None, data: DataSaid) -> float | None:
    """A loss in a vocabulary of one's own can be compared in bits per byte only; none for GPT-2's tokens."""
    if loss is None or not data.bytes_per_token or data.tokenizer in (None, "gpt2"):
        return None
    return loss / math.log(2) / data.bytes_per_token


def header_lines(header: Header) -> list[str]:
    """What is trained on what; the line with the peak says what mfu is measured against."""
    device, data = header.device, header.dataset
    card = f" ({device.gpu})" if device.gpu else ""
    vocabulary = header.shape.vocab_size if header.shape else 0
    return [
        f"tokens per iteration will be: {count(header.tokens_per_step or 0)}",
        f"number of parameters: {(header.parameters or 0) / 1e6:.2f}M",
        f"data: {data.folder}, {si(data.train_tokens or 0)} train tokens, vocabulary {vocabulary:,}",
        f"device: {device.name}{card}, {device.dtype}",
        f"mfu is against {device.peak_tflops or 0:.3g} TFLOPS, the {device.peak_basis}",
    ]


def live_figures(step: Step, max_iters: int, room: int = 200) -> str:
    """As many as fit into `room` columns, the weightiest first: a line that wraps cannot be drawn over."""
    remaining = max(0, max_iters - step.step - 1) * (step.ms or 0) / 1000
    parts = [
        f"loss {step.loss:.4f}",
        f"left {duration(remaining)}",
        f"{si(step.tokens_per_s or 0)} tok/s",
        f"mfu {percent(step.mfu or 0)}",
        f"{step.memory_gib or 0:.1f} GiB",
    ]
    if step.epoch is not None:
        parts.append(f"epoch {step.epoch:.2f}")
    if step.power_w is not None and step.temperature_c is not None:
        parts.append(f"{step.power_w:.0f} W {step.temperature_c:.0f} °C")
    while len(parts) > 1 and len("  ".join(parts)) > room:
        parts.pop()
    return "  ".join(parts)


def summary_lines(config: TrainConfig, result: TrainResult, data: DataSaid = UNKNOWN_DATA) -> list[str]:
    """How it went, and the next command."""
    lines = [f"{_ending(config, result)} after {duration(result.seconds)} of training, {si(result.tokens)} tokens"]
    if result.tokens_per_s and result.mfu is not None:
        speed = f"{si(result.tokens_per_s)} tokens/s, mfu {percent(result.mfu)}, peak memory {gib(result.peak_bytes)}"
        lines.append(speed)
    if result.best_val_loss is not None:
        best = result.out_dir / "best.pt"  # the untrained model is not kept, nor one the disk had no room for
        where = f" in {best}" if best.is_file() else ""
        lines.append(f"{_best(result.best_val_loss, data)}{where}")
    return [*lines, *to_compare(config), _next_line(config, result)]


def _best(loss: float, data: DataSaid) -> str:
    bits = _bits_per_byte(loss, data)
    if bits is not None:
        return f"best validation {bits:.4f} bits per byte (val loss {loss:.4f})"
    return f"best val loss {loss:.4f} (perplexity {si(perplexity(loss))})"


def _ending(config: TrainConfig, result: TrainResult) -> str:
    reasons: dict[str, str] = {
        "max_iters": f"done: step {result.step}",
        "max_hours": f"max_hours = {config.max_hours:g} reached at step {result.step}",
        "early_stop": f"stopped at step {result.step}: val loss did not improve for {config.early_stop_evals} evals",
        "eval_only": f"evaluated at step {result.step}",
    }
    return reasons.get(result.reason, f"stopped by {result.reason} at step {result.step}")


def _next_line(config: TrainConfig, result: TrainResult) -> str:
    """What to type, and nothing behind it that the shell would take for a word."""
    if result.was_stopped and result.step > 0:
        # The hours count the whole run, so the same limit would end it again after one step.
        hours = [f"--max_hours={2 * config.max_hours:g}"] if result.reason == "max_hours" else []
        words = ["gptfit", "train", "--init_from=resume", f"--out_dir={config.out_dir}", *hours]
        return f"to go on at step {result.step}: {command(words)}"
    if result.reason == "eval_only":
        return "next: the same command without --eval_only=True"
    if result.step == 0:
        return "nothing was trained yet; to begin: the same command again"
    return after_train(config)
