"""Comparison: runs side by side, what changed, validation at equal steps, tokens, time and FLOPs, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gptfit.errors import RunError
from gptfit.plan.loss import GPT2_BYTES_PER_TOKEN
from gptfit.runlog import RunLog
from gptfit.view.axes import AXES, Axis, Curve, Duel, curve, duel
from gptfit.view.changes import Differences, differences
from gptfit.view.facts import RunFacts, run_facts
from gptfit.view.noise import noise_band
from gptfit.view.project import Projection, project_runs

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Comparison:
    """Everything the table, the page and the JSON show. `duels` sets each later run against the first."""

    runs: tuple[RunFacts, ...]
    differences: Differences
    duels: tuple[dict[Axis, Duel], ...]
    unit: str  # nats per token, or bits per byte where tokenizers differ
    not_comparable: str | None
    projections: tuple[Projection, ...]

    @property
    def confounded(self) -> bool:
        """Whether more than one thing that can change the speed was changed."""
        return sum(change.on_speed for change in self.differences.changed) > 1

    def letter(self, index: int) -> str:
        return LETTERS[index] if index < len(LETTERS) else f"run {index + 1}"


def compare_runs(logs: Sequence[RunLog], gpu_name: str | None = None) -> Comparison:
    """One run alone is described; the first of several is what the others are held against."""
    if not logs:
        raise RunError("nothing to compare: name one or more runs")
    runs = tuple(run_facts(log, gpu_name) for log in logs)
    bpb, trouble = _common_unit(runs)
    duels = tuple(_duels(runs[0], other, bpb) for other in runs[1:]) if trouble is None else ()
    return Comparison(
        runs=runs,
        differences=differences(runs),
        duels=duels,
        unit="bits per byte" if bpb else "nats per token",
        not_comparable=trouble,
        projections=project_runs(runs),
    )


def loss_curve(run: RunFacts, axis: Axis, bpb: bool) -> Curve:
    """Validation in the unit of the comparison; nats become bits per byte through the data's own bytes per token."""
    if not bpb or any(point.val_bpb is not None for point in run.evals):
        return curve(run, axis, bpb)
    scale = run.bits_per_byte_per_nat or math.nan
    return [(x, y * scale) for x, y in curve(run, axis)]


def _duels(first: RunFacts, other: RunFacts, bpb: bool) -> dict[Axis, Duel]:
    noise = noise_band(first, other)
    if bpb:
        noise /= math.log(2) * (first.bytes_per_token or other.bytes_per_token or GPT2_BYTES_PER_TOKEN)
    found = {axis: duel(loss_curve(first, axis, bpb), loss_curve(other, axis, bpb), axis, noise) for axis in AXES}
    return {axis: result for axis, result in found.items() if result is not None}


def _common_unit(runs: tuple[RunFacts, ...]) -> tuple[bool, str | None]:
    """(bits per byte?, why the losses cannot be compared): a loss per token means nothing across tokenizers."""
    known = {run.tokenizer for run in runs if run.tokenizer is not None}
    if len(known) <= 1 and not any(run.is_bpb for run in runs):
        return False, None
    if all(_has_bpb(run) for run in runs):
        return True, None
    if len(runs) == 1:
        return runs[0].is_bpb, None
    tokenizers = "; ".join(f"{run.name}: {run.tokenizer or 'unknown'}" for run in runs)
    lacking = ", ".join(run.name for run in runs if not _has_bpb(run))
    return False, (
        f"losses per token are not comparable across tokenizers ({tokenizers}); bits per byte would be, "
        f"but bytes per token of {lacking} are not known"
    )


def _has_bpb(run: RunFacts) -> bool:
    return run.is_bpb or run.bytes_per_token is not None
