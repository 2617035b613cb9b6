"""The comparison in plain sentences: the verdict, the arithmetic of the speed, and what cannot be read from these runs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from gptfit.compare.axes import Duel
from gptfit.compare.changes import MICRO_BATCH, Change, affects
from gptfit.compare.comparison import Comparison
from gptfit.compare.facts import RunFacts
from gptfit.compare.table import value_words
from gptfit.compare.verdict import AXIS_WORDS, place, verdict
from gptfit.compare.what_if import WhatIf, tune_command, what_if
from gptfit.plan.speed import A100_TFLOPS
from gptfit.units import count, duration, percent, perplexity, si

# Two medians closer than this are the same speed: one card's day-to-day spread is 0.1 to 0.5 %.
EQUALLY_FAST = 1.01
MOST_NAMED = 8  # keys in one sentence


MAIN_SENTENCES = 3


@dataclass(frozen=True)
class Explanation:
    """What a person can repeat, the weightiest first. `what_if` is what plan predicts for each combination of the
    changed keys."""

    verdict: str
    sentences: tuple[str, ...]
    what_if: tuple[WhatIf, ...]
    settle: str | None

    @property
    def first(self) -> tuple[str, ...]:
        """The ones that matter, for those who read no further."""
        return self.sentences[:MAIN_SENTENCES]


def explain(comparison: Comparison) -> Explanation:
    """How much faster, since when ahead on the clock, what that is owed to; then the rest, from findings to figures."""
    predictions, settle = what_if(comparison), tune_command(comparison)
    others = range(1, len(comparison.runs))
    speeds = [_speed(comparison, other) for other in others]
    courses = [_courses(comparison, other) for other in others]
    ranked: list[list[str]] = [
        [_capital(comparison.not_comparable) + "."] if comparison.not_comparable else [],
        *(lines[:1] for lines in speeds),
        *(lines[:1] for lines in courses),
        _cause(comparison, settle),
        _projected(comparison),
        _schedule(comparison),
        *(lines[1:] for lines in courses),
        *(_first_point(comparison, other) for other in others),
        *(lines[1:] for lines in speeds),
        _changed(comparison),
        _predicted(predictions),
        *(_about(comparison, i, run) for i, run in enumerate(comparison.runs)),
    ]
    return Explanation(verdict(comparison), tuple(itertools.chain.from_iterable(ranked)), predictions, settle)


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
    speeds = f"{si(a.tokens_per_s)} against {si(b.tokens_per_s)} tokens/s"
    if a.is_busy or b.is_busy:
        return [_unsteady(f"{fast} looks {ratio:.1f}x faster per token than {slow} ({speeds})", {first: a, second: b})]
    few = [letter for letter, run in ((first, a), (second, b)) if run.has_few_times]
    if few and ratio >= EQUALLY_FAST:
        finding = f"{fast} looks {ratio:.1f}x faster per token than {slow} ({speeds})"
        return [f"{finding}, but {_and(few)} timed too few steps to tell: run longer, or with log_interval = 1."]
    measured = f"{speeds} (measured, median of steps without an eval)"
    if ratio < EQUALLY_FAST:
        return [f"{first} and {second} are equally fast per token: {measured}."]
    lines = [f"{fast} is {ratio:.2f}x faster per token than {slow}: {measured}."]
    if a.flops_per_token and b.flops_per_token and a.tflops and b.tflops:
        work, time, rate = b.flops_per_token / a.flops_per_token, a.tokens_per_s / b.tokens_per_s, b.tflops / a.tflops
        lines.append(
            f"Exactly: {second} does {work:.2f}x the work per token in {time:.2f}x the time, so the device achieves "
            f"{rate:.2f}x the FLOP/s: {a.tflops:.3g} against {b.tflops:.3g} TFLOPS{_of_peak(a, b)}."
        )
    return lines


def _unsteady(finding: str, runs: dict[str, RunFacts]) -> str:
    """A machine that did other work was not measured, whatever the medians say."""
    busy = [
        f"{letter}'s step times vary by {percent(run.ms_spread or 0)}" for letter, run in runs.items() if run.is_busy
    ]
    return (
        f"{finding}, but {_and(busy)} between their quartiles, as on a machine that does other work too: "
        "time them again on a quiet one, or with `gptfit tune`."
    )


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


def _courses(comparison: Comparison, other: int) -> list[str]:
    """Since when somebody is ahead: on the clock, which is what people pay, then on the other axes."""
    if not comparison.duels:
        return []
    duels = comparison.duels[other - 1]
    a, b = comparison.runs[0], comparison.runs[other]
    same_tokens = a.tokens_per_step == b.tokens_per_step
    axes = sorted(AXIS_WORDS, key=lambda axis: axis != "seconds")
    return [
        _course(comparison, duels[axis], other)
        for axis in axes
        if axis in duels and not (axis == "tokens" and same_tokens)
    ]


def _first_point(comparison: Comparison, other: int) -> list[str]:
    """The first common eval, and what a step costs."""
    if not comparison.duels or "step" not in comparison.duels[other - 1]:
        return []
    point, second = comparison.duels[other - 1]["step"].points[0], comparison.letter(other)
    a, b = comparison.runs[0], comparison.runs[other]
    where = f"At step {count(round(point.at))}"
    if abs(point.difference) < 5e-5:
        return [f"{where} the validation losses are equal, {point.losses[0]:.4f}."]
    lower = "lower" if point.difference < 0 else "higher"
    inside = ", inside the noise" if abs(point.difference) <= point.noise else ""
    cost = f", at {b.ms_per_step / a.ms_per_step:.1f}x the time" if a.ms_per_step and b.ms_per_step else ""
    losses = f"{point.losses[1]:.4f} against {point.losses[0]:.4f}{inside}"
    return [f"{where} {second}'s validation is {lower} by {abs(point.difference):.3f} ({losses}){cost}."]


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
    if comparison.bpb:
        return f"A {a:.4f}, {second} {b:.4f} {comparison.unit}"
    first, other_one = perplexity(a), perplexity(b)
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
    """What plan predicts for each change alone, against the run it starts from."""
    alone = [row for row in rows if len(row.changes) == 1]
    if len(rows) < 3 or rows[0].changes:
        return []
    base = rows[0].predicted
    error = (base.high - base.low) / 2 / base.value
    parts = [f"{row.changes[0]} alone {row.predicted.value / base.value:.2f}x" for row in alone]
    return [f"Plan predicts for tokens/s ({base.basis}, each within {percent(error)}): {', '.join(parts)}."]


def _schedule(comparison: Comparison) -> list[str]:
    """A cosine schedule lowers the loss most near its end, so comparing two at unequal shares favours the shorter one."""
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
        loss, unit = found.loss, " bits per byte" if comparison.bpb else ""
        subject = comparison.letter(found.run) if len(comparison.runs) > 1 else "It"
        if loss.basis == "measured":
            said = f"reached {loss.value:.3f}{unit}"
        else:
            heads = "would be at, made longer," if comparison.runs[found.run].is_over else "is heading for"
            said = f"{heads} {loss.value:.2f}{unit} ({loss.low:.2f} to {loss.high:.2f}, {loss.basis})"
        lines.append(f"{subject} {said} at {found.target} (step {count(round(found.step))}{when}).")
    return lines


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
