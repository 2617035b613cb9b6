"""What another program's log said, line by line: stitched across restarts, with evals kept out of the step times."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gptfit.logs.events import Message, Sample


class ParsedStep(NamedTuple):
    """One training line. `clean` is False when its time holds an eval, a compile or a restart too."""

    step: int
    loss: float
    ms: float | None
    clean: bool
    mfu: float | None = None  # a fraction, as printed; what it is a fraction of is the log's business
    lr: float | None = None
    grad_norm: float | None = None
    memory_gib: float | None = None
    tokens_per_s: float | None = None


class ParsedEval(NamedTuple):
    """One evaluation line, in nats per token or in bits per byte, whichever the trainer prints."""

    step: int
    train_loss: float | None
    val_loss: float | None
    val_bpb: float | None = None


@dataclass
class ParsedLog:
    """A log being read. Facts printed before a step belong to it; facts after the last step to a run that never began."""

    kind: str
    steps: list[ParsedStep] = field(default_factory=list)
    evals: list[ParsedEval] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _facts_ahead: dict[str, Any] = field(default_factory=dict)
    _config_ahead: dict[str, Any] = field(default_factory=dict)
    _restarted: bool = True  # the first line after a start holds compile time
    _last_step: int = -1
    _last_eval: int = -1

    def learn(self, **facts: Any) -> None:
        self._facts_ahead.update(facts)

    def learn_config(self, values: dict[str, Any]) -> None:
        self._config_ahead.update(values)

    def add_step(self, line: ParsedStep) -> None:
        if self._facts_ahead or self._config_ahead:
            self._settle_facts()
        step = line[0]
        if step <= self._last_step:
            self._go_back(step)
        if self._restarted or step == self._last_eval:
            line = line._replace(clean=False)
            self._restarted = False
        self.steps.append(line)
        self._last_step = step

    def add_eval(self, line: ParsedEval) -> None:
        self._settle_facts()
        if line.step < self._last_step:
            self._go_back(line.step)
        while self.evals and self.evals[-1].step >= line.step:
            self.evals.pop()
        self.evals.append(line)
        self._last_eval = line.step

    def add_message(self, kind: str, message: str, value: float | None = None) -> None:
        self.messages.append(Message(kind, message, self._newest_step(), value=value))

    def add_sample(self, text: str) -> None:
        self.samples.append(Sample(self._newest_step(), text=text))

    def _newest_step(self) -> int:
        return self.steps[-1].step if self.steps else 0

    def restarted(self) -> None:
        """A new process begins: its first line holds compile time."""
        self._restarted = True

    def _settle_facts(self) -> None:
        if self._facts_ahead or self._config_ahead:
            self.facts.update(self._facts_ahead)
            self.config.update(self._config_ahead)
            self._facts_ahead, self._config_ahead = {}, {}

    def _go_back(self, step: int) -> None:
        """To a checkpoint, or by one line that was printed twice; what came after `step` is not part of the run."""
        if step < self._last_step:
            message = f"went back from step {self._last_step} to {step}; the repeated steps replace the earlier ones"
            self.add_message("resume", message)
            self._restarted = True
            while self.evals and self.evals[-1].step > step:
                self.evals.pop()
        while self.steps and self.steps[-1].step >= step:
            self.steps.pop()
        self._last_step = self.steps[-1].step if self.steps else -1


@dataclass(frozen=True)
class LogFormat:
    """What another program prints: an example for people, how to know its lines, and the reader of all of them."""

    name: str
    example: str
    is_line: Callable[[str], bool]
    read: Callable[[list[str]], ParsedLog]
    rare_words: tuple[bytes, ...]  # of lines that are few among many steps: kept when only a part of a log is read


def usual_ms(steps: list[ParsedStep]) -> float | None:
    """The median time of a step that did nothing but train; of all timed steps when none is known to be clean."""
    clean = [line.ms for line in steps if line.clean and line.ms is not None]
    timed = clean or [line.ms for line in steps if line.ms is not None]
    return statistics.median(timed) if timed else None


def training_seconds(steps: list[ParsedStep]) -> list[float | None]:
    """Seconds of pure training at the end of each line's step: each gap at its own clean time, else at the median.

    Logs print one line in many and start anywhere, so the steps between two lines are taken to cost what the line says.
    """
    usual = usual_ms(steps)
    if usual is None:
        return [None] * len(steps)
    seconds: list[float | None] = []
    total, before = 0.0, -1
    for line in steps:
        ms = line.ms if line.clean and line.ms is not None else usual
        total += (line.step - before) * ms / 1000
        before = line.step
        seconds.append(total)
    return seconds
