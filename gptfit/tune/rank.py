"""Ranking of trials: medians over repeats, a drifting machine taken out, and the winner with head-room."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from gptfit.tune.trials import Candidate, Timing, Trial, Workload

# Within this much of the fastest a smaller memory counts for more than speed.
AS_GOOD = 0.01
# A drift is believed when it is at least this large and this many times its own uncertainty.
DRIFT_WORTH_SAYING = 0.03
DRIFT_CERTAINTY = 3.0
# Repeats of one candidate that differ by more than this mean other load on the machine.
NOISE_WORTH_SAYING = 0.05
# Below this share of the processor time it wanted, a CPU trial shared its cores with something else.
FAIR_CPU_SHARE = 0.9


@dataclass(frozen=True)
class Score:
    """A candidate after all its trials."""

    candidate: Candidate
    trials: int
    ms_per_micro_step: float
    tokens_per_s: float  # of whole steps: micro-steps and one update
    spread: float  # relative; between trials where there are several, inside the trial otherwise
    memory_gib: float | None
    timing: Timing  # of the trial in the middle

    def fits(self, limit_gib: float | None) -> bool:
        return limit_gib is None or self.memory_gib is None or self.memory_gib <= limit_gib


@dataclass(frozen=True)
class Drift:
    """How much slower (positive) the machine was at the end than at the beginning, all candidates together."""

    relative: float
    per_s: float  # change of log milliseconds per second

    @property
    def is_real(self) -> bool:
        return self.per_s != 0.0


NO_DRIFT = Drift(0.0, 0.0)


def score_all(trials: Sequence[Trial], workload: Workload) -> list[Score]:
    """One score per candidate that finished, fastest first.

    A steady drift is taken out before the medians. On shared cores processor time stands for elapsed time: the
    elapsed time says more about the other programs than about the candidate.
    """
    finished = [(trial, trial.timing) for trial in trials if trial.timing is not None]
    if not finished:
        return []
    is_busy = is_shared(trials)
    drift = find_drift(trials)
    first_s = min(trial.started_s for trial, _ in finished)
    updates: dict[tuple[object, ...], list[float]] = defaultdict(list)
    times: dict[Candidate, list[tuple[float, Timing]]] = defaultdict(list)
    for trial, timing in finished:
        variant = trial.candidate.variant
        updates[(variant.threads, variant["compile"])].append(timing.ms_per_update)
        steady_ms = _ms(timing, is_busy) * math.exp(-drift.per_s * (trial.started_s - first_s))
        times[trial.candidate].append((steady_ms, timing))
    # The update does not depend on the micro-batch, so all trials time the same one.
    middle = min if is_busy else median
    update_ms = {key: middle(values) for key, values in updates.items()}
    scores = [
        _score(candidate, each, workload, update_ms[(candidate.variant.threads, candidate.variant["compile"])])
        for candidate, each in times.items()
    ]
    return sorted(scores, key=lambda score: -score.tokens_per_s)


def winner(scores: Sequence[Score], limit_gib: float | None = None) -> Score | None:
    """The fastest that keeps the head-room; among those as good within 1 %, the one with the least memory."""
    fitting = [score for score in scores if score.fits(limit_gib)]
    if not fitting:
        return None
    best = max(score.tokens_per_s for score in fitting)
    good = [score for score in fitting if score.tokens_per_s >= (1 - AS_GOOD) * best]
    return min(good, key=lambda score: (_memory_step(score), -score.tokens_per_s))


def find_drift(trials: Sequence[Trial]) -> Drift:
    """The slope of log milliseconds over time that all repeated candidates share, when it stands out of the noise.

    Least squares with one level per candidate: only differences between trials of the same candidate count.
    """
    if is_shared(trials):
        return NO_DRIFT  # other load explains it, and the ranking avoids it in another way
    groups: dict[Candidate, list[tuple[float, float]]] = defaultdict(list)
    for trial in trials:
        if trial.timing is not None:
            groups[trial.candidate].append((trial.started_s, math.log(trial.timing.ms_per_micro_step)))
    repeated = [points for points in groups.values() if len(points) > 1]
    centred = [
        (t - _mean(ts), y - _mean(ys))
        for points in repeated
        for ts, ys in [zip(*points, strict=True)]
        for t, y in points
    ]
    freedom = len(centred) - len(repeated) - 1
    time_square = sum(t * t for t, _ in centred)
    if freedom < 1 or time_square == 0:
        return NO_DRIFT
    slope = sum(t * y for t, y in centred) / time_square
    residual = sum((y - slope * t) ** 2 for t, y in centred)
    uncertainty = math.sqrt(residual / freedom / time_square)
    starts = [t for points in groups.values() for t, _ in points]
    relative = math.expm1(slope * (max(starts) - min(starts)))
    if abs(relative) < DRIFT_WORTH_SAYING or abs(slope) < DRIFT_CERTAINTY * uncertainty:
        return NO_DRIFT
    return Drift(relative, slope)


def is_shared(trials: Iterable[Trial]) -> bool:
    """Whether other programs took the cores of a CPU while it was measured."""
    return (_cpu_share(trials) or 1.0) < FAIR_CPU_SHARE


def noise(trials: Sequence[Trial]) -> float:
    """The largest relative difference between two trials of one candidate."""
    is_busy = is_shared(trials)
    groups: dict[Candidate, list[float]] = defaultdict(list)
    for trial in trials:
        if trial.timing is not None:
            groups[trial.candidate].append(_ms(trial.timing, is_busy))
    return max((max(times) / min(times) - 1 for times in groups.values()), default=0.0)


def machine_notes(trials: Sequence[Trial]) -> list[str]:
    """What to say about the machine while it was measured; nothing when it was quiet."""
    notes = []
    drift = find_drift(trials)
    if drift.is_real:
        pace = "slower" if drift.relative > 0 else "faster"
        notes.append(
            f"the machine drifted: {100 * abs(drift.relative):.0f} % {pace} at the end than at the beginning "
            "(clock, temperature or other load); taken out of the ranking"
        )
    elif (worst := noise(trials)) > NOISE_WORTH_SAYING:
        notes.append(
            f"a noisy machine: repeats of the same trial differ by up to {100 * worst:.0f} %; "
            "close other programs and repeat for a finer answer"
        )
    if is_shared(trials):
        notes.append(
            f"other programs used the cores: trials got {100 * (_cpu_share(trials) or 0):.0f} % of the time they wanted; "
            "tokens/s are from processor time, as on quiet cores"
        )
    return notes


def _score(candidate: Candidate, times: list[tuple[float, Timing]], workload: Workload, update_ms: float) -> Score:
    ordered = sorted(times, key=lambda pair: pair[0])
    ms = median(pair[0] for pair in ordered)
    timing = ordered[len(ordered) // 2][1]
    between = (ordered[-1][0] - ordered[0][0]) / 2 / ms
    known = [t.memory_gib for _, t in times if t.memory_gib is not None]
    step_ms = ms * workload.accumulation(candidate.micro_batch) + update_ms
    return Score(
        candidate=candidate,
        trials=len(times),
        ms_per_micro_step=ms,
        tokens_per_s=1e3 * workload.tokens_per_step / step_ms,
        spread=between if len(times) > 1 else timing.spread,
        memory_gib=max(known) if known else None,
        timing=timing,
    )


def _cpu_share(trials: Iterable[Trial]) -> float | None:
    shares = [t.timing.cpu_share for t in trials if t.timing is not None and t.timing.cpu_share is not None]
    return median(shares) if shares else None


def _ms(timing: Timing, is_busy: bool) -> float:
    return timing.cpu_ms if is_busy and timing.cpu_ms else timing.ms_per_micro_step


def _memory_step(score: Score) -> float:
    """Memory in steps of 2 %, so that a few bytes do not decide."""
    return math.inf if score.memory_gib is None else round(math.log(max(score.memory_gib, 1e-6)) / 0.02)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
