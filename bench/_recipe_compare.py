"""What bench/recipe.py found beside stock nanoGPT: the ratios at its final loss, printed and kept for docs/recipe.md."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from _recipe_runs import REPO, Curve, Setup, curve_of

from gptfit.config.recipe import MATRIX_RATE, matrix_rate
from gptfit.units import si

FOUND = REPO / "bench" / "recipe_found.json"
EDITION = 2  # of the recipe that is run now
OWN_BATCH = "modern, its own batch"
TIMES = ("ms_per_step", "other_seconds")
SECONDS_TARGET, STEP_TARGET = 6.0, 1.10  # the tokens' is the setup's share


@dataclass(frozen=True)
class Comparison:
    """One setup, all seeds."""

    setup: Setup
    rate: float  # nanoGPT's best
    theirs: list[Curve]
    ours: list[Curve]
    ms_per_step: dict[str, float]  # nanoGPT; our gpt2 path and modern, in turns; with nanoGPT's batch
    other_seconds: dict[str, float]  # of nanoGPT's and modern's first start, with nothing compiled before
    edition: int = 1  # of our recipe
    matrix_rate: float = MATRIX_RATE  # Muon's in our runs

    @property
    def rate_now(self) -> float:
        """What the recipe gives Muon for such a batch by now."""
        return matrix_rate(self.setup.ours.tokens_per_step)

    @property
    def is_timed(self) -> bool:
        """Losses may be had beside other work, times may not."""
        return bool(self.ms_per_step)

    @property
    def target(self) -> float:
        """The final loss of nanoGPT, the mean of its seeds."""
        return statistics.fmean(curve.final for curve in self.theirs)

    @property
    def is_reached(self) -> bool:
        return all(curve.reach(self.target) is not None for curve in self.ours)

    @property
    def tokens_ratios(self) -> list[float]:
        """How many times fewer tokens each of our runs needed for nanoGPT's final loss."""
        return [self.setup.tokens / reached for curve in self.ours if (reached := curve.reach(self.target))]

    @property
    def speed(self) -> float:
        """How many times faster a token is, with the batch ours is trained with."""
        times = self.setup.ours.steps / self.setup.steps
        return self.ms_per_step["nanoGPT"] / (times * self.ms_per_step.get(OWN_BATCH, self.ms_per_step["modern"]))

    @property
    def seconds_ratios(self) -> list[float]:
        return [ratio * self.speed for ratio in self.tokens_ratios]

    @property
    def first_start_ratios(self) -> list[float]:
        """The same with all that a first start does beside; the next start of ours finds its compiled code."""
        theirs, other = self.setup.steps * self.ms_per_step["nanoGPT"] / 1000, self.other_seconds
        return [(theirs + other["nanoGPT"]) / (theirs / ratio + other["modern"]) for ratio in self.seconds_ratios]


def report(found: Comparison) -> None:
    setup, ms = found.setup, found.ms_per_step or dict.fromkeys(("nanoGPT", "modern", "gpt2"), math.nan)
    print(
        f"{setup.name}: {setup.n_layer} x {setup.n_embd}, {setup.tokenizer}, {setup.tokens_per_step:,} tokens per step"
    )
    best = f"lr {found.rate:g}, the best of {len(setup.rates)}"
    show_curve(f"nanoGPT, {how(found.theirs)}, {best}", found.theirs, setup, ms["nanoGPT"])
    own = ms.get(OWN_BATCH, ms["modern"])
    show_curve(f"modern, {how(found.ours)}, horizon 1/{setup.share:g}", found.ours, setup.ours, own)
    if not found.is_reached:
        print(f"only {len(found.tokens_ratios)} of {len(found.ours)} modern runs reached {found.target:.4f}")
        return
    print(
        f"nanoGPT's final loss {found.target:.4f} with 1/{spread(found.tokens_ratios)} of the tokens "
        f"(target 1/{setup.share:g})"
    )
    if not found.is_timed:
        return
    print(
        f"  and 1/{spread(found.seconds_ratios)} of the training seconds (target 1/{SECONDS_TARGET:g}), "
        f"with a first start and its compilation 1/{spread(found.first_start_ratios)}"
    )
    report_step_times(setup, ms)


def report_step_times(setup: Setup, ms: dict[str, float]) -> None:
    print(
        f"{setup.name} step: modern {ms['modern']:.0f} ms, gpt2 {ms['gpt2']:.0f} ms, "
        f"{ms['modern'] / ms['gpt2']:.2f} times (target {STEP_TARGET:g})"
    )


def show_curve(name: str, curves: list[Curve], setup: Setup, ms_per_step: float) -> None:
    finals = [curve.final for curve in curves]
    print(f"{name}: final {spread(finals, 4)} over {len(curves)} seeds, {ms_per_step:.0f} ms per step")
    losses = [{point.tokens: point.val_loss for point in curve.points} for curve in curves]
    for tokens in sorted(set.intersection(*map(set, losses))):
        seconds = tokens / setup.tokens_per_step * ms_per_step / 1000
        print(f"  {si(tokens):>8} tokens {seconds:8.1f} s  {spread([loss[tokens] for loss in losses], 4)}")


def how(curves: list[Curve]) -> str:
    return " or ".join(sorted({curve.how for curve in curves}))


def seeds(each: Sequence[object]) -> str:
    return f"{len(each)} seed{'s' * (len(each) > 1)}"


def spread(values: list[float], digits: int = 2) -> str:
    """Mean and range, e.g. 1.53 (1.51 to 1.55)."""
    middle = f"{statistics.fmean(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def save_found(found: Comparison) -> None:
    """One entry per model; a newer comparison of the same model replaces it, all but its times where it has none."""
    entries = json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else {}
    entry = json.loads(json.dumps(asdict(found)))
    earlier = entries.get(_entry(found), {})
    if not found.is_timed and earlier.get("setup") == entry["setup"]:
        entry |= {name: earlier[name] for name in TIMES}
    FOUND.write_text(json.dumps(entries | {_entry(found): entry}, indent=1) + "\n", encoding="utf-8")


def _entry(found: Comparison) -> str:
    return found.setup.name if found.edition == 1 else f"{found.setup.name}, edition {found.edition}"


def read_found() -> list[Comparison]:
    entries = json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else {}
    return [_comparison(entry) for entry in entries.values()]


def _comparison(entry: dict[str, Any]) -> Comparison:
    curves = {name: [curve_of(curve) for curve in entry[name]] for name in ("theirs", "ours")}
    setup = Setup(**{**entry["setup"], "rates": tuple(entry["setup"]["rates"])})
    times = {name: entry[name] for name in TIMES}
    return Comparison(
        setup,
        entry["rate"],
        curves["theirs"],
        curves["ours"],
        **times,
        edition=entry.get("edition", 1),
        matrix_rate=entry.get("matrix_rate", MATRIX_RATE),
    )


def table(comparisons: list[Comparison]) -> list[str]:
    """The rows of docs/recipe.md."""
    lines = [
        "| model | nanoGPT's loss | modern's | tokens | seconds | with a first start | step against gpt2's |",
        "|---|---|---|---|---|---|---|",
    ]
    for found in comparisons:
        setup, ms = found.setup, found.ms_per_step
        tokens = si(setup.tokens)
        missed = f"reached by {len(found.tokens_ratios)} of {len(found.ours)}"
        timed = (found.seconds_ratios, found.first_start_ratios) if found.is_reached and found.is_timed else ()
        cells = [f"1/{spread(ratio, 1)}" for ratio in (found.tokens_ratios, *timed)] if found.is_reached else [missed]
        cells += ["not timed yet" if found.is_reached else missed] * (3 - len(cells))
        step = f"{ms['modern'] / ms['gpt2']:.2f}" if found.is_timed else "not timed yet"
        lines.append(
            f"| {setup.name}: {setup.n_layer} x {setup.n_embd}, {setup.tokenizer} "
            f"| {spread([c.final for c in found.theirs], 3)} after {tokens} tokens, lr {found.rate:g}, "
            f"{how(found.theirs)}, {si(setup.parameters('gpt2'))} parameters, {seeds(found.theirs)} "
            f"| {spread([c.final for c in found.ours], 3)} after 1/{setup.share:g} of them, {setup.ours.tokens_per_step:,} per step, {how(found.ours)}, "
            f"edition {found.edition}, {si(setup.parameters('modern', found.edition))} parameters, {seeds(found.ours)} "
            f"| {' | '.join(cells)} | {step} |"
        )
    return lines
