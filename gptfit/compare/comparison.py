"""Comparison: runs side by side, what changed, validation at equal steps, tokens, time and FLOPs, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gptfit.compare.axes import AXES, Axis, Duel, curve, duel
from gptfit.compare.changes import Differences, differences
from gptfit.compare.facts import RunFacts, run_facts, run_letter
from gptfit.compare.noise import noise_between
from gptfit.compare.projection import Projection, project_runs
from gptfit.errors import RunError
from gptfit.logs.runlog import RunLog
from gptfit.plan.loss import GPT2_BYTES_PER_TOKEN


@dataclass(frozen=True)
class Comparison:
    """Everything the table, the page and the JSON show. `duels` sets each later run against the first."""

    runs: tuple[RunFacts, ...]
    differences: Differences
    duels: tuple[dict[Axis, Duel], ...]
    bpb: bool  # losses are in bits per byte, as where tokenizers differ; else in nats per token
    not_comparable: str | None
    projections: tuple[Projection, ...]

    @property
    def confounded(self) -> bool:
        """Whether more than one thing that can change the speed was changed."""
        return sum(change.on_speed for change in self.differences.changed) > 1

    @property
    def unit(self) -> str:
        return "bits per byte" if self.bpb else "nats per token"

    def letter(self, index: int) -> str:
        return run_letter(index)


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
        bpb=bpb,
        not_comparable=trouble,
        projections=project_runs(runs, bpb),
    )


def _duels(first: RunFacts, other: RunFacts, bpb: bool) -> dict[Axis, Duel]:
    noise = noise_between(first, other)
    if bpb:
        noise = noise.scaled(1 / math.log(2) / (first.bytes_per_token or other.bytes_per_token or GPT2_BYTES_PER_TOKEN))
    found = {axis: duel(curve(first, axis, bpb), curve(other, axis, bpb), axis, noise) for axis in AXES}
    return {axis: result for axis, result in found.items() if result is not None}


def _common_unit(runs: tuple[RunFacts, ...]) -> tuple[bool, str | None]:
    """(bits per byte?, why the losses cannot be compared): a loss per token means nothing across tokenizers,
    nor one over answers beside one over text."""
    if len({bool(run.chat) for run in runs}) > 1:
        talking, reading = (
            ", ".join(run.name for run in runs if bool(run.chat) is is_chat) for is_chat in (True, False)
        )
        return (
            False,
            f"the losses of {talking} are over the assistant's words alone, those of {reading} over all of a text",
        )
    if len(runs) == 1:
        return runs[0].is_in_bits, None
    known = {run.tokenizer for run in runs if run.tokenizer is not None}
    if len(known) <= 1 and not any(run.is_bpb for run in runs):
        return False, None
    if all(_has_bpb(run) for run in runs):
        return True, None
    tokenizers = "; ".join(f"{run.name}: {run.tokenizer or 'unknown'}" for run in runs)
    lacking = ", ".join(run.name for run in runs if not _has_bpb(run))
    return False, (
        f"losses per token are not comparable across tokenizers ({tokenizers}); bits per byte would be, "
        f"but bytes per token of {lacking} are not known"
    )


def _has_bpb(run: RunFacts) -> bool:
    return run.is_bpb or run.bytes_per_token is not None
