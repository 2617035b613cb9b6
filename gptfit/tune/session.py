"""Tune: a config and options in, the fastest micro-batch out; each result goes into the cache as soon as it is there."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import FrameType

from gptfit import measured
from gptfit.config.keys import TrainConfig
from gptfit.device.processes import find_processes
from gptfit.errors import RunError, UsageError
from gptfit.plan.calibration import newest
from gptfit.shape import ModelShape
from gptfit.tune.cache import measured_speed
from gptfit.tune.curve_words import chunk_note, explain, failure_notes
from gptfit.tune.measuring import Observer, Session, find_machine, make_measure, tune
from gptfit.tune.rank import Score, is_shared, machine_notes
from gptfit.tune.space import Space, make_space
from gptfit.tune.trials import Candidate, Machine, Trial
from gptfit.units import duration


@dataclass(frozen=True)
class TuneOptions:
    """What the user asked for."""

    minutes: float = 10.0
    also: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    headroom: float = 0.08
    memory_gib: float | None = None
    trial_seconds: float = 300.0
    varies_threads: bool = True


@dataclass(frozen=True)
class TuneResult:
    """A session and everything needed to speak about it."""

    config: TrainConfig
    shape: ModelShape
    machine: Machine
    session: Session
    notes: tuple[str, ...]

    @property
    def scores(self) -> list[Score]:
        return self.session.scores()

    @property
    def best(self) -> Score | None:
        return self.session.best()

    @property
    def peak(self) -> tuple[float, str] | None:
        """(TFLOPS, basis) that MFU is taken against: the highest any trial found."""
        found = [
            (trial.timing.peak_tflops, trial.timing.peak_basis)
            for trial in self.session.trials
            if trial.timing is not None and trial.timing.peak_tflops
        ]
        return max(found, default=None)

    def mfu(self, score: Score) -> float | None:
        """None also where cores were shared: the peak was measured while others used them."""
        if is_shared(self.session.trials):
            return None
        peak = self.peak
        return self.shape.flops_per_token * score.tokens_per_s / 1e12 / peak[0] if peak else None

    def explanation(self) -> str:
        return explain(self.scores, self.session.trials, self.session.main_variant(), self.machine.kind)

    def why_nothing(self) -> str:
        trials = self.session.trials
        if not trials:
            return "stopped before the first trial had finished; nothing was measured"
        if all(trial.outcome == "oom" for trial in trials):
            smallest = min(trial.candidate.micro_batch for trial in trials)
            return f"micro-batch {smallest} is out of memory on {self.machine.device}; use a smaller model or block_size, or --checkpoint_activations=True"
        if self.scores:
            return "every size that ran uses the head-room; lower --headroom, or use a smaller model or block_size"
        last = trials[-1]
        return f"no trial finished; micro-batch {last.candidate.micro_batch}: {last.message}"


# Opens what watches a session once it is known what will be tried on which machine.
OpenObserver = Callable[[TrainConfig, ModelShape, Machine, Space], AbstractContextManager[Observer]]


@contextmanager
def silent(config: TrainConfig, shape: ModelShape, machine: Machine, space: Space) -> Iterator[Observer]:
    """Nobody watches."""
    yield _Silent()


class _Silent:
    def started(self, candidate: Candidate, round_number: int) -> None:
        pass

    def stage(self, name: str) -> None:
        pass

    def finished(self, trial: Trial, session: Session) -> None:
        pass


def run_session(
    config: TrainConfig, shape: ModelShape, options: TuneOptions, open_observer: OpenObserver = silent
) -> TuneResult:
    """Ctrl-C and SIGTERM end it with what was measured by then."""
    if not find_processes().is_alone:
        raise UsageError("tune measures one device", fix="run it without torchrun")
    began = time.monotonic()
    # Asked for compiled trials, the machine must say whether it can compile even if the config does not.
    machine = find_machine(config.replace(compile=config.compile or "compile" in options.also))
    own = newest(measured.read(), machine.device)
    space = make_space(config, shape, machine, options.also, options.sizes, options.headroom, options.memory_gib, own)
    if not options.varies_threads:
        space = replace(space, axes=tuple(axis for axis in space.axes if axis.name != "threads"))
    with _terminated_like_interrupted(), open_observer(config, shape, machine, space) as observer:
        keeper = _Keeper(observer, config, shape, machine)
        measure = make_measure(config, shape, machine, options.memory_gib)
        left_s = 60 * options.minutes - (time.monotonic() - began)
        session = tune(space, measure, keeper, left_s, options.trial_seconds)
        keeper.ended(session)
    notes = [*machine.notes, *space.notes, *failure_notes(session.trials, space.base)]
    notes += [*machine_notes(session.trials), *keeper.problems]
    if machine.compile_problem:
        notes.insert(0, f"not compiled: {machine.compile_problem}")
    if remark := chunk_note(session.scores(), space.base):
        notes.append(remark)
    if session.reason == "time":
        notes.append(
            f"the {duration(60 * options.minutes)} were used up before the ranking was stable; --minutes gives more"
        )
    return TuneResult(config, shape, machine, session, tuple(notes))


class _Keeper:
    """Puts each candidate's standing into the cache at once, then passes everything on to who watches."""

    def __init__(self, observer: Observer, config: TrainConfig, shape: ModelShape, machine: Machine) -> None:
        self._observer, self._config, self._shape, self._machine = observer, config, shape, machine
        self.problems: list[str] = []

    def started(self, candidate: Candidate, round_number: int) -> None:
        self._observer.started(candidate, round_number)

    def stage(self, name: str) -> None:
        self._observer.stage(name)

    def finished(self, trial: Trial, session: Session) -> None:
        self._keep(score for score in session.scores() if score.candidate == trial.candidate)
        self._observer.finished(trial, session)

    def ended(self, session: Session) -> None:
        """The final standings; the config's own settings last, as the newest line is the one `plan` believes."""
        base = session.space.base
        self._keep(sorted(session.scores(), key=lambda score: score.candidate.variant == base))

    def _keep(self, scores: Iterable[Score]) -> None:
        try:
            measured.append(measured_speed(score, self._config, self._shape, self._machine) for score in scores)
        except RunError as error:
            self.problems = [str(error)]  # the answer is worth more than the cache


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
