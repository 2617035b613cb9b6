"""The curve in a sentence: where fixed costs rule, where it is flat, where it falls, where memory ends."""

from __future__ import annotations

from collections.abc import Sequence

from gptfit.tune.rank import Score
from gptfit.tune.trials import Trial, Variant
from gptfit.units import duration

FLAT = 0.03  # within this of the best, sizes count as equally fast
# Fixed costs explain a slow small batch when they are at least this share of its micro-step.
RULES = 0.15


def explain(scores: Sequence[Score], trials: Sequence[Trial], variant: Variant, kind: str) -> str:
    """About the micro-batch alone: the other settings are those of `variant`."""
    curve = sorted((s for s in scores if s.candidate.variant == variant), key=lambda s: s.candidate.micro_batch)
    failures = [t for t in trials if t.candidate.variant == variant and t.timing is None]
    if not curve:
        return _limit(failures) or "nothing was measured"
    if len(curve) == 1:
        only = f"only micro-batch {curve[0].candidate.micro_batch} was measured"
        return _sentence([only, _limit(failures)])
    best = max(score.tokens_per_s for score in curve)
    flat = [score for score in curve if score.tokens_per_s >= (1 - FLAT) * best]
    low, high = flat[0].candidate.micro_batch, flat[-1].candidate.micro_batch
    below = [score for score in curve if score.candidate.micro_batch < low]
    above = [score for score in curve if score.candidate.micro_batch > high]
    flatness = f"flat from {low} to {high} (within {100 * FLAT:.0f} %)" if low != high else f"fastest at {low}"
    return _sentence([_small(below, curve, best, kind), flatness, _large(above, best), _limit(failures)])


def chunk_note(scores: Sequence[Score], variant: Variant) -> str | None:
    """`chunked_loss='auto'` may answer differently from one size to the next; then two things changed, not one."""
    own = [score for score in scores if score.candidate.variant == variant]
    whole = [score.candidate.micro_batch for score in own if not score.timing.chunked_loss]
    chunked = [score.candidate.micro_batch for score in own if score.timing.chunked_loss]
    if not whole or not chunked:
        return None
    return f"chunked_loss = 'auto' took whole logits up to micro-batch {max(whole)} and chunks from {min(chunked)}"


def failure_notes(trials: Sequence[Trial], base: Variant) -> list[str]:
    """Settings besides the config's own that ran nowhere, and why: the first reason that came."""
    finished = {trial.candidate.variant for trial in trials if trial.timing is not None} | {base}
    failed: dict[Variant, str] = {}
    for trial in trials:
        if trial.candidate.variant not in finished:
            failed.setdefault(trial.candidate.variant, trial.message or trial.outcome)
    own = base.as_dict()
    return [
        f"{' '.join(f'{k}={v}' for k, v in variant.as_dict().items() if v != own[k])} did not run: {why}"
        for variant, why in failed.items()
    ]


def fixed_ms(curve: Sequence[Score]) -> float:
    """Milliseconds of a micro-step that do not grow with its rows: the intercept of a least-squares line, not
    below zero. Each point counts relative to its own size, so that the largest does not decide alone.
    """
    rows = [float(score.candidate.micro_batch) for score in curve]
    ms = [score.ms_per_micro_step for score in curve]
    weights = [1 / (time * time) for time in ms]
    total = sum(weights)
    mean_rows = sum(w * r for w, r in zip(weights, rows, strict=True)) / total
    mean_ms = sum(w * m for w, m in zip(weights, ms, strict=True)) / total
    spread = sum(w * (r - mean_rows) ** 2 for w, r in zip(weights, rows, strict=True))
    if spread == 0:
        return 0.0
    slope = sum(w * (r - mean_rows) * (m - mean_ms) for w, r, m in zip(weights, rows, ms, strict=True)) / spread
    return max(0.0, mean_ms - slope * mean_rows)


def _small(below: Sequence[Score], curve: Sequence[Score], best: float, kind: str) -> str:
    if not below:
        return ""
    smallest, top = below[0], below[-1].candidate.micro_batch
    size = smallest.candidate.micro_batch
    loss = f"{100 * (1 - smallest.tokens_per_s / best):.0f} % slower"
    fixed = fixed_ms(curve)
    if fixed < RULES * smallest.ms_per_micro_step:
        return f"{loss} at {size}" if top == size else f"slower up to {top} ({loss} at {size})"
    name = "launch-bound" if kind != "cpu" else "bound by fixed costs"
    cost = f"{fixed:.0f} ms" if fixed < 1e3 else duration(fixed / 1e3)
    share = f"{loss} at {size}: about {cost} of every micro-step do not shrink with it"
    return f"{name} at {size} ({share})" if top == size else f"{name} up to {top} ({share})"


def _large(above: Sequence[Score], best: float) -> str:
    if not above:
        return ""
    slowest = min(above, key=lambda score: score.tokens_per_s)
    return (
        f"slower from {above[0].candidate.micro_batch} "
        f"({100 * (1 - slowest.tokens_per_s / best):.0f} % at {slowest.candidate.micro_batch})"
    )


def _limit(failures: Sequence[Trial]) -> str:
    words = []
    for outcome, spoken in (
        ("oom", "out of memory from {}"),
        ("timeout", "too slow to time at {}"),
        ("crash", "crashed at {}"),
    ):
        sizes = [trial.candidate.micro_batch for trial in failures if trial.outcome == outcome]
        if sizes:
            words.append(spoken.format(min(sizes)))
    return ", ".join(words)


def _sentence(parts: Sequence[str]) -> str:
    return "; ".join(part for part in parts if part)
