"""What the second edition was to reach, beside what the kept runs say; what has not been measured is said so."""

from __future__ import annotations

import json
import statistics

import _losses
from _recipe_compare import STEP_TARGET, Comparison, seeds, spread
from _recipe_epochs import CASES, gains_of
from _recipe_epochs import TARGET as EPOCHS_TARGET
from _recipe_groups import HORIZONS, SHARE, WHOLE, read_curves, read_groups, shorter_line
from _recipe_groups import KEPT as GROUPS_KEPT
from _recipe_own import TARGET as OWN_TARGET
from _recipe_own import own_found
from _recipe_runs import REPO, Kept

TRIED = REPO / "bench" / "recipe_tried.jsonl"
NOT_YET = "not measured yet"
EARLIER_ERROR, EARLIER_WIDTH = 0.098, 0.25  # of the law for nanochat's points before it knew their recipe (e77022c)
SHARES = {"5M": 10.0, "30M": 6.5}  # of nanoGPT's tokens


def aim_lines(comparisons: list[Comparison]) -> list[str]:
    lines = ["| aim of the second edition | found |", "|---|---|"]
    second = {found.setup.name: found for found in comparisons if found.edition == 2}
    first = {found.setup.name: found for found in comparisons if found.edition == 1}
    for name, share in SHARES.items():
        before = f"the first edition: 1/{spread(first[name].tokens_ratios, 1)}" if name in first else ""
        lines.append(
            f"| {name}: nanoGPT's final loss with 1/{share:g} of the tokens | {_tokens(second.get(name))}; {before} |"
        )
    steps = [_step(found) for found in second.values() if found.is_timed]
    lines.append(f"| a step at most {STEP_TARGET:.2f} times gpt2's | {', '.join(steps) or NOT_YET} |")
    lines.append(f"| the first edition's loss with {SHARE} of its tokens | {_groups()} |")
    lines.append(f"| own vocabulary: 1/{OWN_TARGET:g} of nanoGPT's seconds at 30M | {_own()} |")
    lines.append(f"| 16 epochs of 1M tokens: {EPOCHS_TARGET} nats below the plain recipe | {_epochs()} |")
    lines.append(f"| loss law: every given point inside its range by recipe, the range narrower | {_law()} |")
    return [*lines, ""]


def _tokens(found: Comparison | None) -> str:
    if found is None:
        return NOT_YET
    finals = spread([curve.final for curve in found.ours], 3)
    ended = f"{finals} after 1/{found.setup.share:g} of the tokens instead of {found.target:.3f}, {seeds(found.ours)}"
    return f"1/{spread(found.tokens_ratios, 1)}: {ended}" if found.is_reached else f"missed: {ended}"


def _step(found: Comparison) -> str:
    times = found.ms_per_step["modern"] / found.ms_per_step["gpt2"]
    missed = f", missed by {times - STEP_TARGET:.2f}" if times > STEP_TARGET else ""
    return f"{found.setup.name} {times:.2f}{missed}"


def _groups() -> str:
    kept, said = Kept(GROUPS_KEPT), []
    for steps in HORIZONS:
        for row in read_groups(kept, steps):
            if row.group is WHOLE and row.tokens_share:
                said.append(f"{row.tokens_share:.2f} on the way to {steps:,} steps, {len(row.curves)} seeds")
        if first := read_curves(kept, steps, {}):
            line = shorter_line(kept, steps, statistics.fmean(curve.final for curve in first))
            said += [line] if line else []
    return ", ".join(said) or NOT_YET


def _own() -> str:
    said = [
        f"{facts.setup.n_layer} x {facts.setup.n_embd} {facts.said(curves)}, {seeds(curves)}"
        for facts, curves in own_found()
    ]
    return "; ".join(said) or NOT_YET


def _epochs() -> str:
    said = [
        f"{case.setup.name[7:]} tokens: ends {spread(gains, 3)} below, {seeds(gains)}"
        for case in CASES
        if (gains := gains_of(case))
    ]
    return ", ".join(said) or NOT_YET


def _law() -> str:
    tables = _losses.read_nanochat()
    points = [*(point for point in _losses.read() if point.use != "no"), *tables, *_losses.read_iso_flop()]
    inside = sum(point.inside for point in points)
    width = statistics.fmean(point.predicted.high - point.predicted.low for point in tables)
    largest = max(abs(point.val_loss - point.predicted.value) for point in tables)
    return (
        f"{inside} of {len(points)} inside; nanochat's {len(tables)} within {largest:.3f} (before: {EARLIER_ERROR}), "
        f"their range {width:.2f} wide on average (before: {EARLIER_WIDTH})"
    )


def tried_lines() -> list[str]:
    """Runs made to find out why, or what might help: one seed unless it says otherwise, so no more than hints."""
    lines = ["Tried on the way, each a hint of one seed and no figure:", "", "| run | val loss |", "|---|---|"]
    for line in TRIED.read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        lines.append(f"| {found['run']} | {found['val_loss']} |")
    return [*lines, ""]
