"""What to measure next: a pure function of what has been measured, so that a search can be replayed and tested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gptfit.tune.rank import AS_GOOD, Score, score_all, winner
from gptfit.tune.space import Space, ladder
from gptfit.tune.trials import Candidate, Trial, Variant

# A size this much slower than the best ends the walk in its direction.
CLEARLY_SLOWER = 0.95
# An upward walk ends when doubling twice brought less than this.
STILL_RISING = 1.01
# Between two rungs of the ladder a better size is likely only when the rungs are about as fast as the best.
NEARLY_AS_FAST = 0.97

FEWEST_ROUNDS = 2
MOST_ROUNDS = 5
MOST_CONTENDERS = 4

# Micro-batch -> tokens/s, or None when it did not finish.
MeasuredCurve = Mapping[int, float | None]


def next_candidate(space: Space, trials: Sequence[Trial]) -> Candidate | None:
    """First the micro-batch, then the other settings one at a time, then repeats; None when the ranking is stable."""
    return _explore(space, trials) or _confirm(space, trials) or _repeat(space, trials)


def _explore(space: Space, trials: Sequence[Trial]) -> Candidate | None:
    """Decided by the faster of each candidate's first two trials, so that later repeats never send the search back."""
    first = _early_trials(trials)
    # A size that ran without leaving the head-room ends the walk like one that did not run.
    usable = [score for score in score_all(first, space.workload) if score.fits(space.limit_gib)]
    speeds = {score.candidate: score.tokens_per_s for score in usable}
    tried = {trial.candidate: speeds.get(trial.candidate) for trial in first}
    curve = _curve(tried, space.base)
    size = next_size(space, curve, space.start)
    if size is None:
        size = next((asked for asked in space.asked if asked not in curve), None)
    if size is not None:
        return Candidate(size, space.base)
    current = space.base
    for axis in space.axes:
        rivals = [current.having(axis.name, value) for value in axis.values]
        for variant in rivals:
            size = _next_size_of_rival(space, tried, current, variant)
            if size is not None:
                return Candidate(size, variant)
        # The simpler explanation wins: another value is adopted only when it is faster by more than 1 %.
        best_rival = max(rivals, key=lambda variant: _best_speed(_curve(tried, variant)))
        if _best_speed(_curve(tried, best_rival)) > (1 + AS_GOOD) * _best_speed(_curve(tried, current)):
            current = best_rival
    return None


def _confirm(space: Space, trials: Sequence[Trial]) -> Candidate | None:
    """The sizes on both sides of the best are tried twice: one disturbed trial must not end the walk there."""
    scores = [score for score in score_all(trials, space.workload) if score.fits(space.limit_gib)]
    if not scores:
        return None
    best = scores[0].candidate
    same = {s.candidate.micro_batch: s for s in scores if s.candidate.variant == best.variant}
    above = min((size for size in same if size > best.micro_batch), default=None)
    below = max((size for size in same if size < best.micro_batch), default=None)
    beside = [same[size] for size in (above, below) if size is not None]
    return next((score.candidate for score in beside if score.trials < FEWEST_ROUNDS), None)


def next_size(space: Space, curve: MeasuredCurve, start: int) -> int | None:
    """The next micro-batch of one curve: outward from `start` on the ladder, then the neighbours of the best."""
    if start not in curve:
        return start
    # Nothing at or above a size that failed is tried again.
    failure = min((size for size, speed in curve.items() if speed is None), default=None)
    allowed = [size for size in space.sizes if failure is None or size < failure]
    rungs = [rung for rung in ladder(space.sizes, start) if rung in allowed or rung in curve]
    finished = {size: speed for size, speed in curve.items() if speed is not None}
    if not finished:
        below = [rung for rung in rungs if rung < min(curve)]
        return max(below, default=None)
    outward = [side for side in (_above(rungs, finished), _below(rungs, finished)) if side is not None]
    fresh = [(speed, size) for size, speed in outward if size not in curve]
    if fresh:
        return max(fresh)[1]  # from the faster end first
    return _neighbour(allowed, finished, has_failed=failure is not None)


def contenders(scores: Sequence[Score], limit_gib: float | None) -> list[Score]:
    """Those that may still be the best, given how much their times scatter; fastest first."""
    fitting = [score for score in scores if score.fits(limit_gib)]
    if not fitting:
        return []
    best = fitting[0]
    reach = best.tokens_per_s * (1 - max(AS_GOOD, best.spread))
    return [s for s in fitting if s.tokens_per_s * (1 + max(AS_GOOD, s.spread)) >= reach][:MOST_CONTENDERS]


def is_stable(space: Space, trials: Sequence[Trial]) -> bool:
    """Every contender was repeated, and the last round of repeats did not change the winner."""
    rivals = contenders(score_all(trials, space.workload), space.limit_gib)
    if any(rival.trials < FEWEST_ROUNDS for rival in rivals):
        return False
    if len(rivals) <= 1 or all(rival.trials >= MOST_ROUNDS for rival in rivals):
        return True
    before = trials[: -len(rivals)]
    now, then = (winner(score_all(t, space.workload), space.limit_gib) for t in (trials, before))
    return now is not None and then is not None and now.candidate == then.candidate


def _repeat(space: Space, trials: Sequence[Trial]) -> Candidate | None:
    """The contender with the fewest trials, longest ago first: rounds are interleaved."""
    if is_stable(space, trials):
        return None
    rivals = contenders(score_all(trials, space.workload), space.limit_gib)
    last = {trial.candidate: index for index, trial in enumerate(trials)}
    failed = {trial.candidate for trial in trials if trial.timing is None}
    open_rivals = [r for r in rivals if r.trials < MOST_ROUNDS and r.candidate not in failed]
    if not open_rivals:
        return None
    return min(open_rivals, key=lambda rival: (rival.trials, last[rival.candidate])).candidate


def _next_size_of_rival(
    space: Space, tried: Mapping[Candidate, float | None], current: Variant, variant: Variant
) -> int | None:
    """One trial at the current best size; more only when it is about as fast, or where the current one failed."""
    curve, reference = _curve(tried, variant), _curve(tried, current)
    finished = {size: speed for size, speed in reference.items() if speed is not None}
    start = max(finished, key=lambda size: finished[size]) if finished else min(reference)
    if start not in curve:
        return start
    if finished:
        speed = curve[start]
        if speed is None:
            return None  # it does not run where the current one does
        at_an_edge = start == max(finished) and len(finished) < len(reference)
        if speed < NEARLY_AS_FAST * finished[start] and not at_an_edge:
            return None
    return next_size(space, curve, start)


def _above(rungs: Sequence[int], finished: Mapping[int, float]) -> tuple[int, float] | None:
    """(next rung, speed at the end of the walk) while going up may pay."""
    top = max(finished)
    beyond = [rung for rung in rungs if rung > top]
    walked = sorted(size for size in finished if size in rungs)
    is_flat = len(walked) >= 3 and finished[top] < STILL_RISING * finished[walked[-3]]
    if not beyond or is_flat or finished[top] < CLEARLY_SLOWER * max(finished.values()):
        return None
    return beyond[0], finished[top]


def _below(rungs: Sequence[int], finished: Mapping[int, float]) -> tuple[int, float] | None:
    """Downward the walk goes on while it is flat: the same speed with less memory is better."""
    bottom = min(finished)
    beyond = [rung for rung in rungs if rung < bottom]
    if not beyond or finished[bottom] < CLEARLY_SLOWER * max(finished.values()):
        return None
    return beyond[-1], finished[bottom]


def _neighbour(allowed: Sequence[int], finished: Mapping[int, float], has_failed: bool) -> int | None:
    """An unmeasured size beside the best, where the measured one beyond it is nearly as fast or did not fit."""
    best = max(finished, key=lambda size: finished[size])
    above = min((size for size in allowed if size > best), default=None)
    below = max((size for size in allowed if size < best), default=None)
    if above is not None and above not in finished:
        beyond = min((size for size in finished if size > best), default=None)
        if has_failed if beyond is None else finished[beyond] >= NEARLY_AS_FAST * finished[best]:
            return above
    if below is not None and below not in finished:
        beyond = max((size for size in finished if size < best), default=None)
        if beyond is not None and finished[beyond] >= NEARLY_AS_FAST * finished[best]:
            return below
    return None


def _early_trials(trials: Sequence[Trial]) -> list[Trial]:
    """Other load only ever slows a trial down, so of two the faster one is nearer the truth."""
    seen: dict[Candidate, list[Trial]] = {}
    for trial in trials:
        seen.setdefault(trial.candidate, []).append(trial)
    return [min(each[:FEWEST_ROUNDS], key=_elapsed) for each in seen.values()]


def _elapsed(trial: Trial) -> float:
    return trial.timing.ms_per_micro_step if trial.timing else float("inf")


def _curve(tried: Mapping[Candidate, float | None], variant: Variant) -> dict[int, float | None]:
    return {candidate.micro_batch: speed for candidate, speed in tried.items() if candidate.variant == variant}


def _best_speed(curve: MeasuredCurve) -> float:
    return max((speed for speed in curve.values() if speed is not None), default=0.0)
