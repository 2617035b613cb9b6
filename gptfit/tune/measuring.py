"""A tuning session: asks what to measure next, measures it, and stops when stable, out of time or interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from gptfit.config.keys import TrainConfig
from gptfit.device.local_gpu import used_bytes
from gptfit.errors import DeviceError
from gptfit.shape import ModelShape
from gptfit.tune.rank import Score, score_all, winner
from gptfit.tune.search import next_candidate
from gptfit.tune.space import Space, candidate_config
from gptfit.tune.trial_process import Ended, run_process
from gptfit.tune.trials import Candidate, Machine, Trial, Variant, machine_from_json, timing_from_json

PROBE_SECONDS = 120.0  # torch's import, a CUDA context and the compiler's first program on a slow disk
TIMED_SECONDS = 3.0

Reason = Literal["stable", "time", "interrupted"]
# (candidate, whether it is its first trial, seconds it may take, what to call with the name of each stage)
Measure = Callable[[Candidate, bool, float, Callable[[str], None]], Ended]


class Observer(Protocol):
    """Who watches a session; all of it is optional."""

    def started(self, candidate: Candidate, round_number: int) -> None: ...
    def stage(self, name: str) -> None: ...
    def finished(self, trial: Trial, session: Session) -> None: ...


@dataclass
class Session:
    """What has been measured so far, and why it ended."""

    space: Space
    trials: list[Trial] = field(default_factory=list)
    reason: Reason | None = None
    elapsed_s: float = 0.0

    def scores(self) -> list[Score]:
        return score_all(self.trials, self.space.workload)

    def best(self) -> Score | None:
        return winner(self.scores(), self.space.limit_gib)

    def main_variant(self) -> Variant:
        """The settings whose curve tells most: the best's when it has a curve, else the config's own."""
        best = self.best()
        if best is not None and sum(s.candidate.variant == best.candidate.variant for s in self.scores()) > 1:
            return best.candidate.variant
        return self.space.base


def tune(
    space: Space,
    measure: Measure,
    observer: Observer,
    budget_s: float,
    trial_limit_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Session:
    """Ctrl-C ends it like the end of the time: what was measured is kept."""
    session = Session(space)
    began = clock()
    try:
        while session.reason is None:
            candidate = next_candidate(space, session.trials)
            session.elapsed_s = clock() - began
            left_s = budget_s - session.elapsed_s
            has_result = any(trial.timing is not None for trial in session.trials)
            if candidate is None:
                session.reason = "stable"
            elif has_result and left_s < expected_seconds(session.trials, candidate):
                session.reason = "time"
            else:
                limit_s = min(trial_limit_s, left_s) if has_result else trial_limit_s
                _one_trial(session, candidate, measure, observer, limit_s, is_cut=limit_s < trial_limit_s)
    except KeyboardInterrupt:
        session.reason = "interrupted"
    session.elapsed_s = clock() - began
    return session


def expected_seconds(trials: list[Trial], candidate: Candidate) -> float:
    """How long this one will take: as it did last time, else as long as the longest first trial."""
    same = [trial.duration_s for trial in trials if trial.candidate == candidate]
    finished = [trial.duration_s for trial in trials if trial.timing is not None]
    return same[-1] if same else max(finished, default=0.0)


def find_machine(config: TrainConfig) -> Machine:
    """Asked of a process of its own: this one must hold no memory on the card while trials run."""
    request = _request("machine", config)
    ended = run_process(request, PROBE_SECONDS)
    if ended.outcome != "ok":
        raise DeviceError(ended.message or "the device did not answer; see `gptfit doctor`")
    return machine_from_json(ended.values)


def make_measure(
    config: TrainConfig,
    shape: ModelShape,
    machine: Machine,
    memory_gib: float | None = None,
    timed_s: float | None = None,
) -> Measure:
    """Trials of this config on the real device, each in its own process with a hard memory limit."""
    limit_bytes = int(memory_gib * 1024**3) if memory_gib else 0
    if machine.kind == "cpu":
        # Without a limit the system would end some process of the user's, perhaps not the trial.
        limit_bytes = min(limit_bytes or machine.free_bytes, machine.free_bytes)

    def measure(candidate: Candidate, is_first: bool, limit_s: float, on_stage: Callable[[str], None]) -> Ended:
        request = _request(
            "trial",
            candidate_config(config, candidate),
            vocab_size=shape.vocab_size,
            threads=candidate.variant.threads,
            limit_bytes=limit_bytes,
            timed_s=timed_s or TIMED_SECONDS,
            has_eval=is_first,
        )
        return run_process(request, limit_s, on_stage)

    return measure


def _one_trial(
    session: Session, candidate: Candidate, measure: Measure, observer: Observer, limit_s: float, is_cut: bool
) -> None:
    before = sum(trial.candidate == candidate for trial in session.trials)
    observer.started(candidate, before + 1)
    ended = measure(candidate, before == 0, limit_s, observer.stage)
    if ended.outcome == "timeout" and is_cut:
        session.reason = "time"  # the session's end, not the trial's fault
        return
    trial = Trial(
        candidate=candidate,
        outcome=ended.outcome,
        started_s=session.elapsed_s,
        duration_s=ended.duration_s,
        message=ended.message,
        timing=timing_from_json(ended.values) if ended.outcome == "ok" else None,
    )
    session.trials.append(trial)
    observer.finished(trial, session)


def _request(purpose: str, config: TrainConfig, **values: Any) -> dict[str, Any]:
    empty = {"vocab_size": 0, "threads": 0, "limit_bytes": 0, "timed_s": 0.0, "has_eval": False}
    return {"purpose": purpose, "config": config.as_dict(), "used_bytes": used_bytes(), **empty, **values}
