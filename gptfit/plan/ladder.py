"""The memory ladder: which measures make a model fit a card, and which set of them costs least time.

Each rung is one config key. Rungs that change no number come first; those that round (16-bit gradients, 8-bit state) are
taken only where the others do not suffice. Bytes are plan/memory.py's and seconds plan/speed.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, product
from typing import Any

from gptfit.estimate import Estimate
from gptfit.gpus import GPU
from gptfit.plan import memory, several, speed
from gptfit.plan.host import host_problem
from gptfit.plan.resolve import Place, decided
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


Rate = Callable[[Setting], float | None]

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
# Several processes take neither 16-bit gradients nor tables in host memory (config/check.py), but can divide the model.
ALONE_ONLY = ("gradient_dtype", "embedding_device")
DIVIDED = Rung("parallel", "fsdp", True)


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
    device: Estimate  # bytes
    usable_bytes: float
    host_bytes: float  # of a machine
    tokens_per_s: float | None

    @property
    def is_sure(self) -> bool:
        """It fits at the upper end of what it may need."""
        return self.device.high <= self.usable_bytes

    @property
    def fit_chance(self) -> float:
        return memory.fit_chance(self.device, self.usable_bytes)

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
        least = _summing(_climbed(replace(self.setting, micro_batch=1), _all_rungs(self.setting)))[-1]
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
        found = way and {"keys": way.keys, "device_gib": way.device.value / GIB,
                         "fit_chance": way.fit_chance, "host_gib": way.host_bytes / GIB,
                         "tokens_per_s": way.tokens_per_s}  # fmt: skip
        return {"rungs": steps, "way": found, "missing_gib": 0.0 if way else self.missing_bytes / GIB}


def climb(
    setting: Setting,
    gpu: GPU | None,
    usable_bytes: float,
    host_free_bytes: float | None = None,
    cards: Sequence[GPU] = (),
    loss_is_open: bool = False,
) -> Ladder:
    """Every combination of rungs with the largest micro-batches that fit, the fastest exact one first.

    `cards`: one per process, where they are unlike; `gpu` is the one with the least memory.
    `loss_is_open`: the config leaves chunked_loss to 'auto', so that logits are whole again where a smaller micro-batch,
    or another rung, makes room for them.
    """
    rate = _rate_on(gpu, cards)
    whole = replace(setting, chunked_loss=False) if loss_is_open else setting
    steps = tuple(
        _step(whole if rung.key == "chunked_loss" else setting, rung, rate, usable_bytes) for rung in _rungs(setting)
    )
    best = _best(whole, rate, usable_bytes, host_free_bytes, loss_is_open)
    return Ladder(setting, gpu, usable_bytes, steps, best, host_free_bytes)


def _rate_on(gpu: GPU | None, cards: Sequence[GPU]) -> Rate:
    """Tokens per second of all cards together."""

    def rate(setting: Setting) -> float | None:
        if len(set(cards)) > 1:
            found = several.unlike(setting, cards)
            return found[0].tokens_per_s.value if found else None
        predicted = speed.predict(setting, gpu) if gpu else None
        return predicted.tokens_per_s.value if predicted else None

    return rate


def _best(
    setting: Setting, rate: Rate, usable_bytes: float, host_free_bytes: float | None, loss_is_open: bool
) -> Way | None:
    """What surely fits with as little rounding as possible; more of it is not even tried where less suffices."""
    likely: Way | None = None
    for _, chosen in groupby(sorted(_sets(setting), key=_rounding), key=_rounding):
        ways = (way for rungs in chosen for way in _ways(setting, rungs, rate, usable_bytes, loss_is_open))
        fitting = [way for way in ways if not host_problem(way.setting, host_free_bytes)]
        best = min(fitting, key=_preference, default=None)
        if best and best.is_sure:
            return best
        likely = likely or best
    return likely


def _rounding(rungs: tuple[Rung, ...]) -> int:
    return sum(not rung.is_exact for rung in rungs)


def _preference(way: Way) -> tuple[bool, float, int]:
    """What surely fits, then speed, then as few keys as possible."""
    return not way.is_sure, -(way.tokens_per_s or way.setting.micro_batch), len(way.rungs)


def _sets(setting: Setting) -> Iterator[tuple[Rung, ...]]:
    """Every combination of rungs that are not taken yet."""
    options: dict[str, list[Rung | None]] = {}
    for rung in _rungs(setting):
        if getattr(setting, rung.key) != rung.value:
            options.setdefault(rung.key, [None]).append(rung)
    for chosen in product(*options.values()):
        yield tuple(rung for rung in chosen if rung is not None)


def _summing(setting: Setting) -> tuple[Setting, ...]:
    """A divided model sums its gradients late, where there is room for whole ones, or early: a run finds out itself."""
    return tuple(replace(setting, sums_late=late) for late in ((True, False) if setting.is_sharded else (True,)))


def _ways(
    setting: Setting, rungs: tuple[Rung, ...], rate: Rate, usable_bytes: float, loss_is_open: bool
) -> Iterator[Way]:
    """With micro-batches that fit and divide the step, down from the one asked for to the first that surely does.

    Each as its config would be read; one that makes do with less room than others is no reason to stop.
    """
    climbed, place = _climbed(setting, rungs), Place(free_bytes=usable_bytes - memory.FITTED.context_bytes)
    loss = "auto" if loss_is_open and not climbed.chunked_loss else climbed.chunked_loss
    rows = setting.micro_batch * setting.accumulation
    for batch in (b for b in range(setting.micro_batch, 0, -1) if rows % b == 0):
        tried = decided(replace(climbed, micro_batch=batch, accumulation=rows // batch), loss, place)
        needed = memory.predict(tried).device
        if needed.value <= usable_bytes:
            yield Way(rungs, tried, needed, usable_bytes, memory.machine_host_bytes(tried), rate(tried))
        if needed.high <= usable_bytes and tried.sums_late and tried.chunked_loss == climbed.chunked_loss:
            return


def _step(setting: Setting, rung: Rung, rate: Rate, usable_bytes: float) -> RungEffect:
    ways = {memory.predict(climbed).device.value: climbed for climbed in _summing(_climbed(setting, (rung,)))}
    before, after = memory.predict(setting).device.value, next((n for n in ways if n <= usable_bytes), min(ways))
    climbed = ways[after]
    plain, slowed = rate(setting), rate(climbed)
    cost = plain / slowed - 1 if plain and slowed else None
    return RungEffect(rung, before - after, cost, after <= usable_bytes)


def _climbed(setting: Setting, rungs: tuple[Rung, ...]) -> Setting:
    values: Mapping[str, Any] = {rung.key: rung.value for rung in rungs}
    return replace(setting, **values)


def _rungs(setting: Setting) -> tuple[Rung, ...]:
    """nanoGPT has none. What looks ahead needs its state in every step, as it is."""
    if setting.logits == "returned":
        return ()
    rungs = RUNGS
    if setting.processes > 1:
        together = () if setting.matmul == "fp8" else (DIVIDED,)
        rungs = (*(rung for rung in RUNGS if rung.key not in ALONE_ONLY), *together)
    return tuple(rung for rung in rungs if not setting.lookahead or not rung.key.startswith("optimizer_"))


def _all_rungs(setting: Setting) -> tuple[Rung, ...]:
    """The strongest of each key."""
    return tuple({rung.key: rung for rung in _rungs(setting)}.values())
