"""Trials: what `tune` may vary, what it measured once, and the machine it measured on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from gptfit.config.keys import TUNABLE

Outcome = Literal["ok", "oom", "timeout", "crash"]


@dataclass(frozen=True)
class Variant:
    """Everything but the micro-batch that a trial may change: any key that config/keys.py calls tunable."""

    threads: int  # of a CPU; 0 on a card
    keys: tuple[tuple[str, object], ...]

    @classmethod
    def of(cls, threads: int, values: Mapping[str, object]) -> Variant:
        return cls(threads, tuple((name, values[name]) for name in TUNABLE))

    def __getitem__(self, name: str) -> object:
        return self.as_dict()[name]

    def as_dict(self) -> dict[str, object]:
        return {"threads": self.threads, **dict(self.keys)}

    def having(self, name: str, value: object) -> Variant:
        if name == "threads":
            assert isinstance(value, int)
            return replace(self, threads=value)
        return Variant.of(self.threads, {**self.as_dict(), name: value})


@dataclass(frozen=True)
class Candidate:
    micro_batch: int
    variant: Variant


@dataclass(frozen=True)
class Workload:
    """What every trial shares: the tokens of one update on one device."""

    rows: int  # windows per update
    block_size: int

    @property
    def tokens_per_step(self) -> int:
        return self.rows * self.block_size

    def accumulation(self, micro_batch: int) -> int:
        assert self.rows % micro_batch == 0, "only sizes that divide the step are tried"
        return self.rows // micro_batch


@dataclass(frozen=True)
class Timing:
    """What one trial that finished measured. Times are medians; memory is the peak after the first update."""

    device: str  # as device/device.py names it, with the threads of a CPU
    chunked_loss: bool  # as resolved for this size
    compiled: bool
    ms_per_micro_step: float
    ms_low: float  # quartiles of the micro-steps
    ms_high: float
    samples: int
    ms_per_update: float
    ms_per_eval: float | None = None  # one batch; repeats of a trial leave it out
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    device_gib: float | None = None  # the whole process: what nvidia-smi shows, resident memory on a CPU
    peak_tflops: float | None = None
    peak_basis: str = ""
    # On a CPU: processor time of the main thread per micro-step, and as a share of the elapsed time. On quiet cores
    # the main thread computes or spins all the time, so the share is one and both times are the same.
    cpu_ms: float | None = None
    cpu_share: float | None = None

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        return (self.ms_high - self.ms_low) / 2 / self.ms_per_micro_step

    @property
    def memory_gib(self) -> float | None:
        return self.device_gib if self.device_gib is not None else self.reserved_gib or self.allocated_gib


@dataclass(frozen=True)
class Trial:
    """One process that ran one candidate, and how that ended."""

    candidate: Candidate
    outcome: Outcome
    started_s: float  # since the session began
    duration_s: float
    message: str = ""  # why it is not ok
    timing: Timing | None = None  # only when ok


@dataclass(frozen=True)
class Machine:
    """The device as a fresh process sees it before a model is on it."""

    device: str
    kind: str  # cpu | cuda | mps
    dtype: str
    has_bf16: bool
    torch: str
    threads: int
    cores: int
    total_bytes: int
    free_bytes: int
    gpu: str | None = None  # the row's name in gpus.csv
    compile_problem: str | None = None
    notes: tuple[str, ...] = ()


def timing_from_json(values: dict[str, Any]) -> Timing:
    return Timing(**{field.name: values[field.name] for field in fields(Timing) if field.name in values})


def machine_from_json(values: dict[str, Any]) -> Machine:
    known = {field.name: values[field.name] for field in fields(Machine) if field.name in values}
    return Machine(**{**known, "notes": tuple(known.get("notes", ()))})


def trial_as_json(trial: Trial) -> dict[str, Any]:
    values = asdict(trial)
    values["candidate"]["variant"] = trial.candidate.variant.as_dict()
    return values
