"""The search of `tune` on simulated machines: what it measures, when it stops, whom it crowns, what it says."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptfit.config.keys import DEFAULTS, TUNABLE, TrainConfig
from gptfit.errors import UsageError
from gptfit.tune.curve_words import chunk_note, explain, failure_notes, fixed_ms
from gptfit.tune.measuring import Session, tune
from gptfit.tune.rank import find_drift, machine_notes, noise, score_all, winner
from gptfit.tune.search import contenders, is_stable, next_candidate
from gptfit.tune.space import Space, VariedSetting, divisors, ladder, make_axes, make_space, nearest_divisors
from gptfit.tune.trial_process import Ended
from gptfit.tune.trials import Candidate, Machine, Outcome, Timing, Trial, Variant, Workload

BASE = Variant.of(0, {**DEFAULTS, "dtype": "bfloat16", "chunked_loss": False})
CARD = Machine(
    device="NVIDIA GeForce RTX 4070", kind="cuda", dtype="bfloat16", has_bf16=True, torch="2.13.0", threads=8, cores=16,
    total_bytes=12 * 2**30, free_bytes=int(11.3 * 2**30), gpu="RTX 4070 12GB",
)  # fmt: skip
CPU = Machine(
    device="cpu, 8 threads", kind="cpu", dtype="float32", has_bf16=False, torch="2.13.0", threads=8, cores=16,
    total_bytes=2**35, free_bytes=2**35,
)  # fmt: skip


def timing(ms: float, memory_gib: float = 1.0, update_ms: float = 5.0, spread: float = 0.0) -> Timing:
    return Timing(
        device="card", chunked_loss=False, compiled=True, ms_per_micro_step=ms, ms_low=ms * (1 - spread),
        ms_high=ms * (1 + spread), samples=9, ms_per_update=update_ms, device_gib=memory_gib,
    )  # fmt: skip


def trial(size: int, ms: float, memory_gib: float = 1.0, started_s: float = 0.0, variant: Variant = BASE) -> Trial:
    return Trial(Candidate(size, variant), "ok", started_s, 10.0, timing=timing(ms, memory_gib))


def failed(size: int, outcome: Outcome = "oom", variant: Variant = BASE) -> Trial:
    return Trial(Candidate(size, variant), outcome, 0.0, 10.0, message=outcome)


def space(rows: int = 64, start: int = 8, **changes: object) -> Space:
    made = Space(Workload(rows, 1024), start, BASE, sizes=divisors(rows))
    return replace(made, **changes)  # type: ignore[arg-type]


class Silent:
    def started(self, candidate: Candidate, round_number: int) -> None: ...
    def stage(self, name: str) -> None: ...
    def finished(self, trial: Trial, session: Session) -> None: ...


class SimulatedMachine:
    """Milliseconds and memory as functions of the candidate; every trial advances the clock by `seconds`."""

    def __init__(
        self, ms: Callable[[Candidate, float], float], oom_from: float = math.inf, seconds: float = 10.0
    ) -> None:
        self.now, self.ms, self.oom_from, self.seconds = 0.0, ms, oom_from, seconds
        self.tried: list[Candidate] = []

    def measure(self, candidate: Candidate, is_first: bool, limit_s: float, on_stage: object) -> Ended:
        self.tried.append(candidate)
        began, self.now = self.now, self.now + self.seconds
        if candidate.micro_batch >= self.oom_from:
            return Ended("oom", self.seconds, "out of memory")
        values = vars(timing(self.ms(candidate, began), 1 + 0.1 * candidate.micro_batch))
        return Ended("ok", self.seconds, values=dict(values))

    def tune(self, experiment: Space, budget_s: float = 10_000.0) -> Session:
        return tune(experiment, self.measure, Silent(), budget_s, 300.0, clock=lambda: self.now)


def test_sizes_divide_the_step_and_the_nearest_are_named() -> None:
    assert divisors(480)[:8] == (1, 2, 3, 4, 5, 6, 8, 10)
    assert nearest_divisors(480, 16) == (16,)
    assert nearest_divisors(480, 7) == (6, 8)
    assert nearest_divisors(8, 100) == (8,)
    assert ladder(divisors(64), 8) == (1, 2, 4, 8, 16, 32, 64)
    assert ladder(divisors(480), 12) == (1, 2, 3, 6, 12, 24, 48, 96, 160, 240, 480)


@given(st.integers(1, 2000), st.integers(0, 40))
def test_the_ladder_starts_where_it_is_told_and_its_rungs_divide(rows: int, pick: int) -> None:
    sizes = divisors(rows)
    start = sizes[pick % len(sizes)]
    rungs = ladder(sizes, start)
    assert start in rungs
    assert rungs[0] == 1
    assert rungs[-1] == rows
    assert all(rows % rung == 0 for rung in rungs)
    assert list(rungs) == sorted(set(rungs))


def test_one_disturbed_trial_does_not_end_the_walk() -> None:
    """The first trial at 16 takes twice its time, as when another program ran; 32 and 64 are really faster."""
    seen: list[int] = []

    def ms(candidate: Candidate, _now: float) -> float:
        size = candidate.micro_batch
        seen.append(size)
        return (20 + 5 * size) * (2 if size == 16 and seen.count(16) == 1 else 1)

    best = SimulatedMachine(ms).tune(space()).best()
    assert best is not None
    assert best.candidate.micro_batch >= 32


def test_the_search_on_a_card_starts_at_plans_largest_that_fits() -> None:
    config = TrainConfig(batch_size=8, gradient_accumulation_steps=64, chunked_loss=False)
    made = make_space(config, config.shape(), CARD)
    assert made.workload.tokens_per_step == 524_288
    # 124M on a 12 GB card: in a real history of nanoGPT 16 rows did not fit; a model that returns its loss alone needs less.
    assert made.start == 16
    assert next_candidate(made, []) == Candidate(16, made.base)
    assert max(made.sizes) < 64, "sizes far beyond the card's memory are not tried"
    wide = config.replace(vocab_size=2 * 50304)
    assert make_space(wide, wide.shape(), CARD).start == 8
    in_chunks = make_space(wide.replace(chunked_loss="auto"), wide.shape(), CARD)
    assert in_chunks.start == 16, "where whole logits do not fit, a run computes the loss in chunks"


def test_a_wanted_size_that_does_not_divide_is_noted_with_its_neighbours() -> None:
    config = TrainConfig(batch_size=8, gradient_accumulation_steps=8)
    made = make_space(config, config.shape(), CARD, asked=[6])
    assert made.asked == (4, 8)
    assert made.notes[-1] == "6 does not divide the 64 rows of a step; nearest that do: 4 and 8"


def test_plans_largest_is_named_when_it_does_not_divide_the_step() -> None:
    config = TrainConfig(batch_size=8, gradient_accumulation_steps=64, n_layer=6, n_head=6, n_embd=384)
    (note,) = make_space(config, config.shape(), CARD).notes
    assert note.startswith("plan's largest that fits: ")
    assert "does not divide the 512 rows of a step; nearest that do: " in note


def test_threads_vary_on_a_cpu_and_what_was_asked_for_elsewhere() -> None:
    assert make_axes(replace(BASE, threads=8), CPU) == (VariedSetting("threads", (16, 4, 1)),)
    assert make_axes(BASE, CARD, ["compile", "dtype"]) == (
        VariedSetting("compile", (False,)),
        VariedSetting("dtype", ("float32",)),
    )
    with pytest.raises(UsageError, match="--also colour"):
        make_axes(BASE, CARD, ["colour"])


def test_any_key_that_is_tunable_is_an_axis_with_the_values_that_mean_something_there() -> None:
    on_card = {axis.name: axis.values for axis in make_axes(BASE, CARD, TUNABLE)}
    assert set(on_card) == set(TUNABLE)
    assert on_card["attention"] == ("flash", "cudnn")
    assert on_card["fused_loss"] == (False,)
    assert on_card["checkpoint_activations"] == ("wide", True)
    on_cpu = {axis.name: axis.values for axis in make_axes(replace(BASE, threads=8), CPU, TUNABLE)}
    assert on_cpu["attention"] == ("flash", "math")
    assert "fused_loss" not in on_cpu


def test_a_setting_that_never_ran_is_named_with_its_reason() -> None:
    trials = [trial(8, 20.0), failed(8, "crash", BASE.having("attention", "cudnn"))]
    assert failure_notes(trials, BASE) == ["attention=cudnn did not run: crash"]
    assert failure_notes([*trials, trial(4, 20.0, variant=BASE.having("attention", "cudnn"))], BASE) == []


def test_out_of_memory_ends_the_walk_up_and_the_search_goes_on() -> None:
    machine = SimulatedMachine(lambda c, _: 5 + 2 * c.micro_batch, oom_from=16)
    session = machine.tune(space())
    assert session.reason == "stable"
    outcomes = {t.candidate.micro_batch: t.outcome for t in session.trials}
    assert outcomes[16] == "oom"
    assert 32 not in outcomes
    assert outcomes[4] == "ok"
    best = session.best()
    assert best is not None
    assert best.candidate.micro_batch == 8
    assert sum(t.candidate.micro_batch == 16 for t in session.trials) == 1, "a size that failed is not repeated"


def test_between_the_last_that_fits_and_the_first_that_does_not_the_divisors_are_tried() -> None:
    machine = SimulatedMachine(lambda c, _: 40 + c.micro_batch, oom_from=20)
    best = machine.tune(space(rows=480, start=12)).best()
    assert best is not None
    assert best.candidate.micro_batch == 16


def test_a_start_that_does_not_fit_walks_down() -> None:
    machine = SimulatedMachine(lambda c, _: 5 + 2 * c.micro_batch, oom_from=3)
    best = machine.tune(space(start=32)).best()
    assert best is not None
    assert best.candidate.micro_batch == 2


def test_when_nothing_fits_the_search_ends_without_a_winner() -> None:
    machine = SimulatedMachine(lambda c, _: 1.0, oom_from=1)
    session = machine.tune(space())
    assert session.best() is None
    assert {t.candidate.micro_batch for t in session.trials} == {8, 4, 2, 1}
    assert explain(session.scores(), session.trials, BASE, "cuda") == "out of memory from 1"


@settings(max_examples=40, deadline=None)
@given(
    fixed=st.floats(0.1, 200),
    per_row=st.floats(1, 50),
    bend=st.floats(0, 0.02),
    start=st.sampled_from(divisors(96)),
    seed=st.integers(0, 10**6),
    noise_level=st.floats(0, 0.01),
)
def test_the_winner_is_within_5_percent_of_the_true_best(
    fixed: float, per_row: float, bend: float, start: int, seed: int, noise_level: float
) -> None:
    """Curves rise with the batch (fixed cost) and may fall again (caches); noise up to 1 % on every trial."""
    rng = random.Random(seed)

    def true_ms(size: int) -> float:
        return fixed + per_row * size * (1 + bend * size)

    machine = SimulatedMachine(lambda c, _: true_ms(c.micro_batch) * rng.gauss(1, noise_level))
    session = machine.tune(space(rows=96, start=start))
    best = session.best()
    assert best is not None
    rate = {size: size / true_ms(size) for size in divisors(96)}
    assert rate[best.candidate.micro_batch] >= 0.95 * max(rate.values())
    assert len(session.trials) < 40


def test_another_setting_is_adopted_only_when_it_is_faster_and_then_gets_its_own_sizes() -> None:
    def ms(candidate: Candidate, _: float) -> float:
        slow = 1.0 if candidate.variant["compile"] else 1.4
        checkpointing = 1.3 if candidate.variant["checkpoint_activations"] else 1.0
        return (5 + 2 * candidate.micro_batch) * slow * checkpointing

    base = BASE.having("compile", False)
    axes = (VariedSetting("compile", (True,)), VariedSetting("checkpoint_activations", (True,)))
    machine = SimulatedMachine(ms)
    session = machine.tune(space(base=base, axes=axes))
    best = session.best()
    assert best is not None
    assert best.candidate.variant == base.having("compile", True)
    checkpointed = {c for c in machine.tried if c.variant["checkpoint_activations"]}
    assert len(checkpointed) == 1, "one trial shows that it is slower"
    assert all(c.variant["compile"] for c in checkpointed), "one thing at a time, on top of what was adopted"


def test_a_setting_that_saves_memory_is_tried_where_the_others_ran_out() -> None:
    chunked = BASE.having("chunked_loss", True)

    class Saving(SimulatedMachine):
        def measure(self, candidate: Candidate, is_first: bool, limit_s: float, on_stage: object) -> Ended:
            self.oom_from = 64 if candidate.variant["chunked_loss"] else 8
            return super().measure(candidate, is_first, limit_s, on_stage)

    machine = Saving(lambda c, _: 30 + (2.2 if c.variant["chunked_loss"] else 2.0) * c.micro_batch)
    best = machine.tune(space(axes=(VariedSetting("chunked_loss", (True,)),))).best()
    assert best is not None
    assert best.candidate == Candidate(32, chunked)


def test_a_setting_that_fails_where_the_others_run_gets_one_trial() -> None:
    class Hungry(SimulatedMachine):
        def measure(self, candidate: Candidate, is_first: bool, limit_s: float, on_stage: object) -> Ended:
            self.oom_from = 1 if candidate.variant["dtype"] == "float32" else math.inf
            return super().measure(candidate, is_first, limit_s, on_stage)

    machine = Hungry(lambda c, _: 5 + 2.0 * c.micro_batch)
    machine.tune(space(axes=(VariedSetting("dtype", ("float32",)),)))
    assert sum(candidate.variant["dtype"] == "float32" for candidate in machine.tried) == 1


def test_the_rounds_are_interleaved() -> None:
    machine = SimulatedMachine(lambda c, _: 2.0 * c.micro_batch)
    machine.tune(space())
    repeats = machine.tried[len(set(machine.tried)) :]
    assert repeats, "sizes that are equally fast are repeated"
    assert all(a != b for a, b in itertools.pairwise(repeats))


def test_within_1_percent_the_smaller_memory_wins_and_beyond_it_the_speed() -> None:
    workload = Workload(64, 1024)
    close = [trial(8, 8.05, memory_gib=4), trial(16, 16.0, memory_gib=8)]
    apart = [trial(8, 8.5, memory_gib=4), trial(16, 16.0, memory_gib=8)]
    assert [winner(score_all(t, workload)).candidate.micro_batch for t in (close, apart)] == [8, 16]  # type: ignore[union-attr]


def test_the_winner_keeps_the_head_room() -> None:
    scores = score_all([trial(8, 9.0, memory_gib=4), trial(16, 16.0, memory_gib=11.5)], Workload(64, 1024))
    chosen = winner(scores, limit_gib=11.0)
    assert chosen is not None
    assert chosen.candidate.micro_batch == 8
    assert winner(scores, limit_gib=1.0) is None


def test_tokens_per_second_count_the_update_once_per_step() -> None:
    (score,) = score_all([trial(8, 10.0)], Workload(64, 1024))
    assert score.tokens_per_s == pytest.approx(65536 / (8 * 10 + 5) * 1e3)


def test_contenders_are_those_whose_scatter_reaches_the_best() -> None:
    trials = [trial(8, 8.0), trial(16, 17.2), trial(4, 6.0)]
    assert [s.candidate.micro_batch for s in contenders(score_all(trials, Workload(64, 1024)), None)] == [8]
    noisy = [replace(t, timing=replace(t.timing, ms_low=0.9 * t.timing.ms_per_micro_step)) for t in trials if t.timing]
    assert [s.candidate.micro_batch for s in contenders(score_all(noisy, Workload(64, 1024)), None)] == [8, 16]


def test_one_round_is_never_stable() -> None:
    assert not is_stable(space(), [trial(8, 8.0)])
    assert is_stable(space(), [trial(8, 8.0), trial(8, 8.0)])


def test_a_machine_that_heats_up_is_noticed_and_taken_out_of_the_ranking() -> None:
    """8 is truly the fastest; measured late on a machine that slows by 0.1 % a second it looks slower than 16."""
    pace = 0.001
    early_and_late = [trial(16, 16.4 * math.exp(pace * t), started_s=t) for t in (0, 100, 200)] + [
        trial(8, 8.0 * math.exp(pace * t), started_s=t) for t in (50, 150, 250)
    ]
    drift = find_drift(early_and_late)
    assert drift.relative == pytest.approx(math.expm1(pace * 250), rel=0.01)
    assert score_all(early_and_late, Workload(64, 1024))[0].ms_per_micro_step == pytest.approx(8.0, rel=0.01)
    (note,) = machine_notes(early_and_late)
    assert "drifted: 28 % slower at the end" in note


def test_scatter_without_direction_is_noise_not_drift() -> None:
    times = [8.0, 8.8, 8.1, 8.7, 8.0]
    trials = [trial(8, ms, started_s=60.0 * i) for i, ms in enumerate(times)]
    assert not find_drift(trials).is_real
    assert noise(trials) == pytest.approx(0.1)
    assert "differ by up to 10 %" in machine_notes(trials)[0]


def test_a_quiet_machine_is_not_mentioned() -> None:
    assert machine_notes([trial(8, 8.0 + 0.01 * i, started_s=10.0 * i) for i in range(4)]) == []


def busy(size: int, elapsed_ms: float, cpu_ms: float) -> Trial:
    slowed = replace(timing(elapsed_ms, memory_gib=1 + 0.1 * size), cpu_ms=cpu_ms, cpu_share=cpu_ms / elapsed_ms)
    return Trial(Candidate(size, BASE), "ok", 0.0, 10.0, timing=slowed)


def test_other_load_on_the_cores_is_said() -> None:
    (note,) = machine_notes([busy(8, 10.0, 6.0)])
    assert note.startswith("other programs used the cores: trials got 60 % of the time they wanted")


def test_on_shared_cores_processor_time_decides() -> None:
    """By the clock on the wall 4 would win; undisturbed, 8 is faster per row."""
    trials = [busy(4, 6.0, 5.0), busy(8, 14.0, 8.0), busy(8, 30.0, 8.2)]
    best = winner(score_all(trials, Workload(64, 1024)))
    assert best is not None
    assert (best.candidate.micro_batch, best.ms_per_micro_step) == (8, pytest.approx(8.1))


def test_the_time_is_not_overrun_by_a_trial_that_would_not_finish() -> None:
    machine = SimulatedMachine(lambda c, _: 2.0 * c.micro_batch, seconds=25.0)
    session = machine.tune(space(), budget_s=60.0)
    assert session.reason == "time"
    assert session.elapsed_s <= 60.0
    assert session.best() is not None


def test_control_c_keeps_what_was_measured() -> None:
    class Interrupted(SimulatedMachine):
        def measure(self, candidate: Candidate, is_first: bool, limit_s: float, on_stage: object) -> Ended:
            if len(self.tried) == 2:
                raise KeyboardInterrupt
            return super().measure(candidate, is_first, limit_s, on_stage)

    session = Interrupted(lambda c, _: 5 + 2.0 * c.micro_batch).tune(space())
    assert session.reason == "interrupted"
    assert len(session.trials) == 2
    assert session.best() is not None


def test_the_curve_in_a_sentence() -> None:
    trials = [trial(size, 6 + 4 * size) for size in (1, 2, 4)] + [trial(size, 4.1 * size + 1) for size in (16, 32)]
    text = explain(score_all([*trials, failed(64)], Workload(64, 1024)), [*trials, failed(64)], BASE, "cuda")
    assert text.startswith("launch-bound up to 4 (")
    assert "; flat from 16 to 32 (within 3 %)" in text
    assert text.endswith("; out of memory from 64")


def test_a_curve_that_falls_says_from_where() -> None:
    trials = [trial(4, 4.0), trial(8, 8.0), trial(16, 20.0), failed(32, "timeout")]
    text = explain(score_all(trials, Workload(64, 1024)), trials, BASE, "cpu")
    assert text == "flat from 4 to 8 (within 3 %); slower from 16 (19 % at 16); too slow to time at 32"


def test_fixed_milliseconds_are_the_part_that_does_not_shrink() -> None:
    scores = score_all([trial(size, 12 + 3 * size) for size in (1, 2, 4, 8)], Workload(64, 1024))
    assert fixed_ms(scores) == pytest.approx(12, rel=1e-6)


def test_a_change_of_chunking_between_sizes_is_said() -> None:
    whole = [trial(2, 2.0), trial(4, 4.0)]
    chunked = [replace(t, timing=replace(t.timing, chunked_loss=True)) for t in [trial(8, 8.0)] if t.timing]
    workload = Workload(64, 1024)
    assert chunk_note(score_all(whole, workload), BASE) is None
    assert chunk_note(score_all(whole + chunked, workload), BASE) == (
        "chunked_loss = 'auto' took whole logits up to micro-batch 4 and chunks from 8"
    )
