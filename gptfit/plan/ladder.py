"""The memory ladder: which measures make a model fit a card, and which set of them costs least time.

Each rung is one config key. Rungs that change no number come first; those that round (16-bit gradients, 8-bit state) are
taken only where the others do not suffice. Bytes are plan/memory.py's and seconds plan/speed.py's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from gptfit.gpus import GPU
from gptfit.plan import memory, speed
from gptfit.plan.host import host_problem
from gptfit.plan.setting import Setting
from gptfit.units import GIB, gib


@dataclass(frozen=True)
class Rung:
    """One measure: the key, its value, and whether training computes the same numbers with it."""

    key: str
    value: Any
    is_exact: bool

    @property
    def words(self) -> str:
        return f"{self.key}={self.value}"


# In the order of what they cost.
RUNGS = (
    Rung("chunked_loss", True, True),
    Rung("checkpoint_activations", "wide", True),
    Rung("checkpoint_activations", True, True),
    Rung("gradient_dtype", "bfloat16", False),
    Rung("optimizer_state", "8bit", False),
    Rung("optimizer_device", "cpu", True),
    Rung("embedding_device", "cpu", True),
)


@dataclass(frozen=True)
class RungEffect:
    """A rung taken alone, at the same micro-batch: bytes saved, share of time it costs, and whether it alone is enough."""

    rung: Rung
    saves_bytes: float
    costs_share: float | None  # None where the card's speed is unknown
    fits: bool


@dataclass(frozen=True)
class Way:
    """A set of rungs with the micro-batch to use with it."""

    rungs: tuple[Rung, ...]
    setting: Setting
    device_bytes: float
    host_bytes: float
    tokens_per_s: float | None

    @property
    def keys(self) -> dict[str, Any]:
        """What a config must say; the accumulation follows from the tokens per step."""
        return {**{rung.key: rung.value for rung in self.rungs}, "batch_size": self.setting.micro_batch}


@dataclass(frozen=True)
class Ladder:
    """What was asked about, each rung alone, and the cheapest way that fits; None when nothing does."""

    setting: Setting
    gpu: GPU | None  # None: a device whose speed nobody knows
    usable_bytes: float
    steps: tuple[RungEffect, ...]
    way: Way | None
    host_free_bytes: float | None = None  # of main memory; None: taken as enough

    @cached_property
    def missing_bytes(self) -> float:
        """What is short with every rung and a micro-batch of 1."""
        least = _climbed(replace(self.setting, micro_batch=1), _all_rungs(self.setting))
        return max(0.0, memory.predict(least).device.value - self.usable_bytes)

    @property
    def missing(self) -> str:
        """What is short, in words: of the card's memory, or of the host's where that alone is in the way."""
        if self.missing_bytes:
            return f"{gib(self.missing_bytes)} are missing with every measure"
        free = gib(self.host_free_bytes or 0.0)
        return f"what must leave the card does not fit into the {free} of main memory that are free"

    def as_json(self) -> dict[str, Any]:
        steps = [
            {"rung": s.rung.words, "saves_gib": s.saves_bytes / GIB, "costs_share": s.costs_share, "fits": s.fits}
            for s in self.steps
        ]
        way = self.way
        found = way and {"keys": way.keys, "device_gib": way.device_bytes / GIB, "host_gib": way.host_bytes / GIB,
                         "tokens_per_s": way.tokens_per_s}  # fmt: skip
        return {"rungs": steps, "way": found, "missing_gib": 0.0 if way else self.missing_bytes / GIB}


def climb(setting: Setting, gpu: GPU | None, usable_bytes: float, host_free_bytes: float | None = None) -> Ladder:
    """Every combination of rungs with the largest micro-batches that fit, the fastest exact one first."""
    steps = tuple(_step(setting, rung, gpu, usable_bytes) for rung in _rungs(setting))
    ways = [way for way in _ways(setting, gpu, usable_bytes) if not host_problem(way.setting, host_free_bytes)]
    best = min(ways, key=_preference) if ways else None
    return Ladder(setting, gpu, usable_bytes, steps, best, host_free_bytes)


def _preference(way: Way) -> tuple[int, float, int]:
    """As little rounding as possible, then speed, then as few keys as possible."""
    rounding = sum(not rung.is_exact for rung in way.rungs)
    return rounding, -(way.tokens_per_s or way.setting.micro_batch), len(way.rungs)


def _ways(setting: Setting, gpu: GPU | None, usable_bytes: float) -> Iterator[Way]:
    options: dict[str, list[Rung | None]] = {}
    for rung in _rungs(setting):
        if getattr(setting, rung.key) != rung.value:
            options.setdefault(rung.key, [None]).append(rung)
    for chosen in product(*options.values()):
        rungs = tuple(rung for rung in chosen if rung is not None)
        way = _way(_climbed(setting, rungs), rungs, gpu, usable_bytes)
        if way is not None:
            yield way


def _way(setting: Setting, rungs: tuple[Rung, ...], gpu: GPU | None, usable_bytes: float) -> Way | None:
    """With the largest micro-batch that fits and divides the step; beyond the one asked for nothing is gained."""
    rows = setting.micro_batch * setting.accumulation
    for batch in (b for b in range(setting.micro_batch, 0, -1) if rows % b == 0):
        tried = replace(setting, micro_batch=batch, accumulation=rows // batch)
        needed = memory.predict(tried).device.value
        if needed <= usable_bytes:
            found = speed.predict(tried, gpu) if gpu else None
            return Way(rungs, tried, needed, memory.host_bytes(tried), found.tokens_per_s.value if found else None)
    return None


def _step(setting: Setting, rung: Rung, gpu: GPU | None, usable_bytes: float) -> RungEffect:
    climbed = _climbed(setting, (rung,))
    before, after = memory.predict(setting).device.value, memory.predict(climbed).device.value
    plain, slowed = (speed.predict(s, gpu) if gpu else None for s in (setting, climbed))
    cost = slowed.ms_per_step.value / plain.ms_per_step.value - 1 if plain and slowed else None
    return RungEffect(rung, before - after, cost, after <= usable_bytes)


def _climbed(setting: Setting, rungs: tuple[Rung, ...]) -> Setting:
    values: Mapping[str, Any] = {rung.key: rung.value for rung in rungs}
    return replace(setting, **values)


def _rungs(setting: Setting) -> tuple[Rung, ...]:
    """What looks ahead needs its state in every step, as it is."""
    return tuple(rung for rung in RUNGS if not setting.lookahead or not rung.key.startswith("optimizer_"))


def _all_rungs(setting: Setting) -> tuple[Rung, ...]:
    """The strongest of each key."""
    return tuple({rung.key: rung for rung in _rungs(setting)}.values())
