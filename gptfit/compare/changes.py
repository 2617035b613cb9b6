"""What differs between runs and what does not: config keys, data, seed, device, versions; and what each can affect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gptfit.compare.facts import RunFacts
from gptfit.config.keys import KEYS

Affects = Literal["speed", "loss", "both", "neither"]

# The card's own name is compared instead.
_SAID_ELSEWHERE = ("device", "gpu")
MICRO_BATCH = "micro-batch"
_MICRO_KEYS = ("batch_size", "gradient_accumulation_steps")
MISSING = None


@dataclass(frozen=True)
class Change:
    """One thing that is not the same in all runs, with its value in each. `keys` are the config keys behind it."""

    key: str
    values: tuple[Any, ...]
    affects: Affects
    keys: tuple[str, ...] = ()

    @property
    def on_speed(self) -> bool:
        return self.affects in ("speed", "both")

    @property
    def on_loss(self) -> bool:
        return self.affects in ("loss", "both")


@dataclass(frozen=True)
class Differences:
    """`unknown` names keys that some logs tell and others do not, so nothing can be said about them."""

    changed: tuple[Change, ...]
    same: dict[str, Any]
    unknown: tuple[str, ...]


def _value(run: RunFacts, key: str) -> Any:
    """A log that says only `resume` does not tell what the run began from."""
    value = run.config.get(key, MISSING)
    return MISSING if key == "init_from" and value == "resume" else value


def differences(runs: Sequence[RunFacts]) -> Differences:
    """Config keys first, then what surrounds the config. A micro-batch that keeps tokens per step is one change."""
    changed: list[Change] = []
    same: dict[str, Any] = {}
    unknown: list[str] = []
    rows = {key: [_value(run, key) for run in runs] for key in _all_keys(runs)}
    rows |= _surroundings(runs)
    for key, values in rows.items():
        if key in _SAID_ELSEWHERE or affects(key) == "neither":
            continue
        if any(value is MISSING for value in values):
            if any(value is not MISSING for value in values):
                unknown.append(key)
        elif any(value != values[0] for value in values[1:]):
            changed.append(Change(key, tuple(values), affects(key), (key,) if key in runs[0].config else ()))
        else:
            same[key] = values[0]
    return Differences(tuple(_one_micro_batch(changed, runs)), same, tuple(unknown))


def _all_keys(runs: Sequence[RunFacts]) -> list[str]:
    keys: dict[str, None] = {}
    for run in runs:
        keys |= dict.fromkeys(run.config)
    return list(keys)


def _surroundings(runs: Sequence[RunFacts]) -> dict[str, list[Any]]:
    """A key the runs' configs share is not repeated here."""
    return {
        "tokens per step": [run.tokens_per_step for run in runs],
        "tokenizer": [run.tokenizer for run in runs],
        "GPU": [run.gpu.name if run.gpu else run.device_name for run in runs],
        "processes": [run.processes for run in runs],
        "torch": [run.versions.get("torch") for run in runs],
        "trainer": [run.kind for run in runs],
    }


def affects(key: str) -> Affects:
    """What a difference in this key can change: a step's time, the loss, or both."""
    if key in KEYS:
        reach = KEYS[key].affects
        speed, loss = "speed" in reach, "loss" in reach
        return "both" if speed and loss else "speed" if speed else "loss" if loss else "neither"
    if key in ("GPU", "processes"):
        return "speed"
    # What tokens per step do to speed, the micro-batch does.
    return "loss" if key in ("tokenizer", "tokens per step") else "both"  # torch, trainer


def _one_micro_batch(changed: list[Change], runs: Sequence[RunFacts]) -> list[Change]:
    """batch_size and accumulation move together when tokens per step stay; then neither says anything about the loss."""
    moved = [change for change in changed if change.key in _MICRO_KEYS]
    steps = {run.tokens_per_step for run in runs}
    if not moved:
        return changed
    values = tuple(f"{run.config.get('batch_size')} x {run.config.get('gradient_accumulation_steps')}" for run in runs)
    reach: Affects = "speed" if len(steps) == 1 and None not in steps else "both"
    merged = Change(MICRO_BATCH, values, reach, tuple(change.key for change in moved))
    first = next(i for i, change in enumerate(changed) if change.key in _MICRO_KEYS)
    rest = [change for change in changed if change.key not in _MICRO_KEYS]
    return [*rest[:first], merged, *rest[first:]]
