"""Plan: everything said about one config on one GPU, each estimate with its range and basis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gptfit.config.keys import TrainConfig
from gptfit.errors import Problem
from gptfit.estimate import Estimate
from gptfit.gpus import GPU
from gptfit.plan.loss import Loss, perplexity
from gptfit.plan.memory import Memory, fit_chance
from gptfit.plan.setting import Setting
from gptfit.plan.speed import Speed
from gptfit.shape import ModelShape
from gptfit.units import GIB

if TYPE_CHECKING:  # imported by the plans that have one
    from gptfit.plan.ladder import Ladder
    from gptfit.plan.several import Several


@dataclass(frozen=True)
class DataFacts:
    """What a plan needs to know of the data, from a prepared folder or measured in a Parquet file."""

    name: str
    tokens: Estimate  # of the training split
    vocab_size: int | None = None  # of the model; None: GPT-2's, padded
    tokenizer: str | None = None  # None: unknown, taken as GPT-2's
    bytes_per_token: float | None = None
    gpt2_bytes_per_token: float | None = None  # of the same text, where it is in another vocabulary
    rows: int | None = None
    text_bytes: int | None = None
    is_chat: bool = False  # only the assistant's tokens count

    @property
    def has_documents(self) -> bool:
        """Whether there are several, and the tokens mark where one ends: every tokenizer but characters does."""
        return self.tokenizer not in (None, "chars") and self.rows != 1

    @property
    def is_gpt2(self) -> bool:
        return self.tokenizer in (None, "gpt2")


@dataclass(frozen=True)
class Plan:
    """None means unknown, and a problem or note says why."""

    config: TrainConfig
    shape: ModelShape
    gpu: GPU | None
    data: DataFacts | None
    processes: int
    setting: Setting | None  # None when sizes make no sense
    starts: bool
    tokens_per_step: int
    tokens: int
    memory: Memory | None = None
    usable_bytes: float | None = None
    fits: bool | None = None
    largest_micro_batch: int | None = None
    speed: Speed | None = None
    seconds: Estimate | None = None  # training and evaluations
    eval_share: float | None = None
    kwh: Estimate | None = None
    epochs: Estimate | None = None
    loss: Loss | None = None
    several: Several | None = None  # of more than one GPU
    ladder: Ladder | None = None  # where it does not fit as it is
    host_free_bytes: float | None = None  # of main memory, where it is known
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def errors(self) -> tuple[Problem, ...]:
        return tuple(problem for problem in self.problems if problem.level == "error")

    @property
    def runs(self) -> bool:
        """It starts, and nothing known says that it does not fit."""
        return not self.errors

    @property
    def fit_chance(self) -> float | None:
        """How likely the memory is enough."""
        if self.memory is None or self.usable_bytes is None:
            return None
        return fit_chance(self.memory.device, self.usable_bytes)

    @property
    def is_tight(self) -> bool:
        """The limit lies inside the range of what it may need."""
        needs = self.memory.device if self.memory else None
        return needs is not None and self.usable_bytes is not None and needs.low < self.usable_bytes < needs.high

    @property
    def is_in_bits(self) -> bool:
        """Whether bits per byte come first: nats per token of a vocabulary of one's own say nothing to anybody else."""
        return bool(self.data and not self.data.is_gpt2 and self.loss and self.loss.bits_per_byte)

    @property
    def hours(self) -> Estimate | None:
        return self.seconds.map(1 / 3600) if self.seconds else None

    def as_json(self) -> dict[str, Any]:
        """Stable names; a number that is only estimated is {value, low, high, basis}, an unknown one null."""
        sized = self.setting is not None
        return {
            "gpu": self.gpu.name if self.gpu else None,
            "gpus": self.processes,
            "parameters": self.shape.parameters if sized else None,
            "weights": self.shape.n_weights if sized else None,
            "flops_per_token": self.shape.flops_per_token if sized else None,
            "tokens_per_step": self.tokens_per_step if sized else None,
            "micro_batch": self.config.batch_size,
            "accumulation": self.setting.accumulation if self.setting else None,
            "memory": self._memory_json(),
            "starts": self.starts,
            "fits": self.fits,
            "fit_chance": self.fit_chance,
            "largest_micro_batch": self.largest_micro_batch,
            "ladder": self.ladder.as_json() if self.ladder else None,
            "tokens_per_s": _json(self.speed.tokens_per_s if self.speed else None),
            "ms_per_step": _json(self.speed.ms_per_step if self.speed else None),
            "ms_per_micro_step": _json(self.speed.ms_per_micro_step if self.speed else None),
            "mfu": _scaled(self.speed, self.speed.mfu if self.speed else None),
            "mfu_a100": _scaled(self.speed, self.speed.mfu_a100 if self.speed else None),
            "several": self.several.as_json() if self.several else None,
            "hours": _json(self.hours),
            "kwh": _json(self.kwh),
            "tokens": self.tokens if sized else None,
            "data_tokens": _json(self.data.tokens if self.data else None),
            "bytes_per_token": self.data.bytes_per_token if self.data else None,
            "epochs": _json(self.epochs),
            "loss": _json(self.loss.loss if self.loss else None),
            "bits_per_byte": _json(self.loss.bits_per_byte if self.loss else None),
            "perplexity": _json(perplexity(self.loss.loss) if self.loss else None),
            "problems": [problem.as_json() for problem in self.problems],
            "notes": list(self.notes),
        }

    def _memory_json(self) -> dict[str, Any] | None:
        if self.memory is None:
            return None
        return {
            "allocated_gib": _json(self.memory.allocated.map(1 / GIB)),
            "device_gib": _json(self.memory.device.map(1 / GIB)),
            "usable_gib": self.usable_bytes / GIB if self.usable_bytes is not None else None,
            "parts": {name: size / GIB for name, size in self.memory.parts.items()},
        }


def _json(estimate: Estimate | None) -> dict[str, float | str] | None:
    return estimate.as_json() if estimate else None


def _scaled(speed: Speed | None, value: float | None) -> dict[str, float | str] | None:
    """A fraction of peak is known as well as the speed it is computed from."""
    if speed is None or value is None:
        return None
    return speed.tokens_per_s.map(value / speed.tokens_per_s.value).as_json()
