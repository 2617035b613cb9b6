"""A comparison as JSON: the names scripts rely on, NaN-free."""

from __future__ import annotations

import math
from typing import Any

from gptfit.compare.axes import AXES, Axis, Duel
from gptfit.compare.comparison import Comparison
from gptfit.compare.facts import RunFacts
from gptfit.compare.noise import eval_error
from gptfit.compare.sentences import Explanation
from gptfit.units import perplexity


def comparison_json(comparison: Comparison, explanation: Explanation) -> dict[str, Any]:
    return {
        "verdict": explanation.verdict,
        "runs": [run_json(run) for run in comparison.runs],
        "changed": [
            {"key": change.key, "values": list(change.values), "affects": change.affects, "keys": list(change.keys)}
            for change in comparison.differences.changed
        ],
        "same": comparison.differences.same,
        "unknown": list(comparison.differences.unknown),
        "confounded": comparison.confounded,
        "unit": comparison.unit,
        "not_comparable": comparison.not_comparable,
        "at_equal": at_equal_json(comparison),
        "projections": [
            {
                "run": found.run,
                "target": found.target,
                "step": found.step,
                "seconds": found.seconds,
                "val_loss": found.loss.as_json(),
            }
            for found in comparison.projections
        ],
        "what_if": [
            {
                "changes": list(row.changes),
                "tokens_per_s": row.predicted.as_json(),
                "mfu": row.mfu,
                "measured_tokens_per_s": row.measured,
            }
            for row in explanation.what_if
        ],
        "settle": explanation.settle,
        "sentences": list(explanation.sentences),
    }


def at_equal_json(comparison: Comparison) -> dict[Axis, dict[str, Any] | None]:
    return {axis: _axis_json(comparison, axis) for axis in AXES}


def run_json(run: RunFacts) -> dict[str, Any]:
    return {
        "name": run.name,
        "path": str(run.path),
        "kind": run.kind,
        "parameters": run.parameters,
        "flops_per_token": run.flops_per_token,
        "tokens_per_step": run.tokens_per_step,
        "micro_steps": run.micro_steps,
        "processes": run.processes,
        "ms_per_step": run.ms_per_step,
        "ms_spread": run.ms_spread,
        "ms_per_micro_step": run.ms_per_micro_step,
        "tokens_per_s": run.tokens_per_s,
        "tflops": run.tflops,
        "peak_tflops": run.peak_tflops,
        "peak_basis": run.peak_basis or None,
        "gpu": run.gpu.name if run.gpu else run.device_name,
        "mfu": run.mfu,
        "mfu_a100": run.mfu_a100,
        "memory_gib": run.memory_gib,
        "last_step": run.last_step,
        "max_iters": run.max_iters,
        "seconds": run.seconds,
        "total_seconds": run.total_seconds,
        "eval_error": eval_error(run).nats,
        "evals": [
            {
                "step": point.step,
                "tokens": point.tokens,
                "seconds": point.seconds,
                "flops": point.flops,
                "train_loss": point.train_loss,
                "val_loss": point.val_loss,
                "val_bpb": point.val_bpb,
                "perplexity": _perplexity(point.val_loss),
            }
            for point in run.evals
        ],
        "notes": list(run.notes),
    }


def _axis_json(comparison: Comparison, axis: Axis) -> dict[str, Any] | None:
    """Of the first two runs at the top level; each later run against the first under `pairs`."""
    pairs = [
        {"runs": [0, j], **_duel_json(duels[axis], j, comparison.bpb)}
        for j, duels in enumerate(comparison.duels, 1)
        if axis in duels
    ]
    if not pairs:
        return None
    top = {key: value for key, value in pairs[0].items() if key != "runs"}
    return top if len(comparison.runs) == 2 else {**top, "pairs": pairs}


def _duel_json(duel: Duel, other: int, bpb: bool) -> dict[str, Any]:
    return {
        "at": duel.last.at,
        "losses": list(duel.last.losses),
        "perplexities": [_perplexity(loss) for loss in duel.last.losses] if not bpb else None,
        "difference": duel.last.difference,
        "noise": duel.noise,
        "ahead": None if duel.ahead is None else (0 if duel.ahead == 0 else other),
        "ahead_from": duel.ahead_from,
        "crossings": list(duel.crossings),
        "points": [
            {"at": point.at, "losses": list(point.losses), "difference": point.difference, "noise": point.noise}
            for point in duel.points
        ],
    }


def _perplexity(loss: float | None) -> float | None:
    """JSON has no infinity."""
    value = math.inf if loss is None else perplexity(loss)
    return value if math.isfinite(value) else None
