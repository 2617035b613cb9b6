"""The comparison in plain sentences: the verdict, the arithmetic of the speed, and what cannot be read from these runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gptfit.plan.speed import A100_TFLOPS
from gptfit.units import count, duration, percent, si
from gptfit.view.axes import Duel
from gptfit.view.changes import MICRO_BATCH, Change, affects
from gptfit.view.compare import Comparison
from gptfit.view.facts import RunFacts, perplexity
from gptfit.view.rows import value_words
from gptfit.view.verdict import AXIS_WORDS, place, verdict
from gptfit.view.whatif import WhatIf, tune_command, what_if

# Two medians closer than this are the same speed: one card's day-to-day spread is 0.1 to 0.5 %.
EQUALLY_FAST = 1.01
MOST_NAMED = 8  # keys in one sentence


@dataclass(frozen=True)
class Explanation:
    """What a person can repeat. `what_if` is what plan predicts for each combination of the changed keys."""

    verdict: str
    sentences: tuple[str, ...]
    what_if: tuple[WhatIf, ...]
    settle: str | None


def explain(comparison: Comparison) -> Explanation:
    """Sentences in the order of the questions people ask: which, why so fast, where do they cross, what is unknown."""
    predictions = what_if(comparison)
    settle = tune_command(comparison)
    sentences: list[str] = []
    for i, run in enumerate(comparison.runs):
        sentences += _about(comparison, i, run)
    sentences += _changed(comparison)
    for other in range(1, len(comparison.runs)):
        sentences += _speed(comparison, other)
        sentences += _losses(comparison, other)
    sentences += _schedule(comparison)
    sentences += _cause(comparison, settle)
    sentences += _predicted(predictions)
    sentences += _projected(comparison)
    if comparison.not_comparable:
        sentences.append(_capital(comparison.not_comparable) + ".")
    return Explanation(verdict(comparison), tuple(sentences), predictions, settle)


def _about(comparison: Comparison, i: int, run: RunFacts) -> list[str]:
    parts = []
    if run.parameters:
        parts.append(f"{si(run.parameters)} parameters")
    if run.flops_per_token:
        parts.append(f"{si(run.flops_per_token)} FLOPs per token")
    if run.tokens_per_step:
        parts.append(f"{count(run.tokens_per_step)} tokens per step")
    if run.tokens_per_s:
        parts.append(f"{si(run.tokens_per_s)} tokens/s")
    if run.mfu is not None and run.gpu is not None:
        parts.append(f"{percent(run.mfu)} of the {run.gpu.name}'s own {run.peak_tflops:g} TFLOPS")
    elif run.mfu is not None:
        parts.append(f"{percent(run.mfu)} of its peak of {run.peak_tflops:.3g} TFLOPS")
    subject = f"{comparison.letter(i)} is {run.name}" if len(comparison.runs) > 1 else run.name
    return [f"{subject}: {', '.join(parts) or 'nothing but its losses is known'}."]


def _changed(comparison: Comparison) -> list[str]:
    if len(comparison.runs) == 1:
        return []
    found = comparison.differences
    lines = []
    if found.changed:
        lines.append("Changed: " + "; ".join(_change_words(change) for change in found.changed) + ".")
    else:
        lines.append("Nothing that is known about the runs differs.")
    kept = [
        _kept_words(key, found.same[key]) for key in ("tokens per step", "dataset", "seed", "GPU") if key in found.same
    ]
    if kept:
        lines.append("The same: " + ", ".join(kept) + ".")
    if found.unknown:
        shown, more = found.unknown[:MOST_NAMED], len(found.unknown) - MOST_NAMED
        rest = f" and {more} more" if more > 0 else ""
        lines.append(f"Not known for every run, so not compared: {', '.join(shown)}{rest}.")
    return lines


def _change_words(change: Change) -> str:
    return f"{change.key} {' -> '.join(value_words(value) for value in change.values)}"


def _kept_words(key: str, value: object) -> str:
    if key == "tokens per step" and isinstance(value, int):
        return f"{count(value)} tokens per step"
    return f"{key} {value}"


def _speed(comparison: Comparison, other: int) -> list[str]:
    """Tokens/s = achieved FLOP/s / FLOPs per token, so the ratio splits exactly into these two."""
    a, b = comparison.runs[0], comparison.runs[other]
    first, second = "A", comparison.letter(other)
    if not a.tokens_per_s or not b.tokens_per_s:
        return []
    fast, slow = (first, second) if a.tokens_per_s >= b.tokens_per_s else (second, first)
    ratio = max(a.tokens_per_s, b.tokens_per_s) / min(a.tokens_per_s, b.tokens_per_s)
    speeds = f"{si(a.tokens_per_s)} against {si(b.tokens_per_s)} tokens/s (measured, median of steps without an eval)"
    if ratio < EQUALLY_FAST:
        return [f"{first} and {second} are equally fast per token: {speeds}."]
    lines = [f"{fast} is {ratio:.2f}x faster per token than {slow}: {speeds}."]
    if a.flops_per_token and b.flops_per_token and a.tflops and b.tflops:
        work, time, rate = b.flops_per_token / a.flops_per_token, a.tokens_per_s / b.tokens_per_s, b.tflops / a.tflops
        lines.append(
            f"Exactly: {second} does {work:.2f}x the work per token in {time:.2f}x the time, so the device achieves "
            f"{rate:.2f}x the FLOP/s: {a.tflops:.3g} against {b.tflops:.3g} TFLOPS{_of_peak(a, b)}."
        )
    return lines


def _of_peak(a: RunFacts, b: RunFacts) -> str:
    """Against the card's own peak, and against nanoGPT's constant, the number people know."""
    if a.mfu is None or b.mfu is None or a.mfu_a100 is None or b.mfu_a100 is None:
        return "; name the card with --gpu for its own MFU"
    card = f"the {a.gpu.name}'s" if a.gpu and a.gpu == b.gpu else "their devices'"
    peaks = list(dict.fromkeys(f"{run.peak_tflops:.3g}" for run in (a, b)))
    return (
        f", {percent(a.mfu)} against {percent(b.mfu)} of {card} {' and '.join(peaks)} ({a.peak_basis}); nanoGPT, dividing by an "
        f"A100's {A100_TFLOPS:g}, prints {percent(a.mfu_a100, 1)} and {percent(b.mfu_a100, 1)}"
    )


def _losses(comparison: Comparison, other: int) -> list[str]:
    """The first common eval, then since when somebody is ahead, on steps and on the clock."""
    if not comparison.duels:
        return []
    duels, second = comparison.duels[other - 1], comparison.letter(other)
    a, b = comparison.runs[0], comparison.runs[other]
    lines = []
    if "step" in duels:
        lines.append(_first_point(duels["step"], second, a, b))
    for axis in AXIS_WORDS:
        if axis in duels and not (axis == "tokens" and a.tokens_per_step == b.tokens_per_step):
            lines.append(_course(comparison, duels[axis], other))
    return lines


def _first_point(duel: Duel, second: str, a: RunFacts, b: RunFacts) -> str:
    point = duel.points[0]
    if abs(point.difference) < 5e-5:
        return f"At step {count(round(point.at))} the validation losses are equal, {point.losses[0]:.4f}."
    lower = "lower" if point.difference < 0 else "higher"
    inside = ", inside the noise" if abs(point.difference) <= duel.noise else ""
    cost = f", at {b.ms_per_step / a.ms_per_step:.1f}x the time" if a.ms_per_step and b.ms_per_step else ""
    return (
        f"At step {count(round(point.at))} {second}'s validation is {lower} by {abs(point.difference):.3f} "
        f"({point.losses[1]:.4f} against {point.losses[0]:.4f}{inside}){cost}."
    )


def _course(comparison: Comparison, duel: Duel, other: int) -> str:
    """`At equal training time B is ahead beyond the noise from 10 h 19 min; the curves meet at 9 h 16 min.`"""
    where, last = f"At {AXIS_WORDS[duel.axis]}", place(duel.axis, duel.last.at)
    end = _both(comparison, duel, other)
    if duel.ahead is None or duel.ahead_from is None:
        return f"{where}, {last}, the runs are level within the noise of {duel.noise:.3f}: {end}."
    meet = f"; the curves last meet at {place(duel.axis, duel.crossings[-1])}" if duel.crossings else ""
    leader = comparison.letter(0 if duel.ahead == 0 else other)
    since = place(duel.axis, duel.ahead_from)
    span = f"from {since} to {last}" if since != last else f"only at the last common point, {last}"
    return f"{where} {leader} is ahead beyond the noise of {duel.noise:.3f} {span}: {end}{meet}."


def _both(comparison: Comparison, duel: Duel, other: int) -> str:
    a, b = duel.last.losses
    second = comparison.letter(other)
    if comparison.unit != "nats per token":
        return f"A {a:.4f}, {second} {b:.4f} {comparison.unit}"
    first, other_one = perplexity(a) or math.inf, perplexity(b) or math.inf
    return f"A {a:.3f} (perplexity {first:.1f}), {second} {b:.3f} ({other_one:.1f})"


def _cause(comparison: Comparison, settle: str | None) -> list[str]:
    """Attribute only where one thing changed."""
    if len(comparison.runs) < 2:
        return []
    changed = comparison.differences.changed
    on_speed = [change.key for change in changed if change.on_speed]
    on_loss = [change.key for change in changed if change.on_loss]
    hidden = [key for key in comparison.differences.unknown if affects(key) in ("speed", "both")]
    lines = []
    if comparison.confounded:
        subject = MICRO_BATCH if MICRO_BATCH in on_speed else on_speed[0]
        lines.append(
            f"Confounded: {_and(on_speed)} changed together, so the effect of the {subject} on speed cannot be read from "
            "these runs." + (f" To settle it, run `{settle}`." if settle else "")
        )
    elif hidden and not _equally_fast(comparison):
        lines.append(f"Why the speeds differ cannot be said; not known for every run: {_and(hidden[:MOST_NAMED])}.")
    elif len(on_speed) == 1 and not hidden:
        lines.append(
            f"Only {on_speed[0]} changed among what can affect speed, so the difference in speed is its doing."
        )
    if len(on_loss) > 1:
        lines.append(f"Nor can the difference in loss be credited to one thing: {_and(on_loss)} changed.")
    return lines


def _equally_fast(comparison: Comparison) -> bool:
    speeds = [run.tokens_per_s for run in comparison.runs if run.tokens_per_s]
    return bool(speeds) and max(speeds) / min(speeds) < EQUALLY_FAST


def _predicted(rows: tuple[WhatIf, ...]) -> list[str]:
    """Plan's word on each change alone, against the run it starts from."""
    alone = [row for row in rows if len(row.changes) == 1]
    if len(rows) < 3 or rows[0].changes:
        return []
    base = rows[0].predicted
    error = (base.high - base.low) / 2 / base.value
    parts = [f"{row.changes[0]} alone {row.predicted.value / base.value:.2f}x" for row in alone]
    return [f"Plan predicts for tokens/s ({base.basis}, each within {percent(error)}): {', '.join(parts)}."]


def _schedule(comparison: Comparison) -> list[str]:
    """A cosine not yet at its end has loss in hand; comparing at unequal shares of it flatters the shorter one."""
    if len(comparison.runs) != 2 or not comparison.duels or "seconds" not in comparison.duels[0]:
        return []
    at = comparison.duels[0]["seconds"].last.at
    shares = [at / run.total_seconds for run in comparison.runs if run.total_seconds and _decays(run)]
    if len(shares) != 2 or abs(shares[0] - shares[1]) < 0.05:
        return []
    line = (
        f"At {duration(at)} A is {percent(min(shares[0], 1))} and B {percent(min(shares[1], 1))} through its own learning-rate "
        "schedule, so the later one has had more of its decay."
    )
    return [line]


def _decays(run: RunFacts) -> bool:
    return bool(run.config.get("decay_lr", True)) and run.config.get("schedule") != "constant"


def _and(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _projected(comparison: Comparison) -> list[str]:
    lines = []
    for found in comparison.projections:
        when = f", {duration(found.seconds)} of training" if found.seconds is not None else ""
        verb = "reached" if found.loss.basis == "measured" else "is heading for"
        subject = comparison.letter(found.run) if len(comparison.runs) > 1 else "It"
        lines.append(
            f"{subject} {verb} {found.loss.value:.2f} ({found.loss.low:.2f} to {found.loss.high:.2f}, "
            f"{found.loss.basis}) at {found.target} (step {count(round(found.step))}{when})."
        )
    return lines


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
