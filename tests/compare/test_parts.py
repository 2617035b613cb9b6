"""The small parts: thinning, interpolation, noise, the terminal curve."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptfit.compare.axes import duel, value_at
from gptfit.compare.facts import run_facts
from gptfit.compare.noise import Noise, eval_error, noise_between
from gptfit.compare.terminal_curve import sketch
from gptfit.logs.open_run import open_run
from gptfit.pages.series import run_series, thin
from tests.made_logs import MakeRun


@given(
    st.lists(st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=False)), max_size=300), st.integers(4, 50)
)
def test_thinning_keeps_ends_order_and_extremes(values: list[float | None], most: int) -> None:
    kept = thin(values, most)
    assert kept == sorted(set(kept))
    assert len(kept) <= max(most, 2) + 2
    if values:
        assert kept[0] == 0
        assert kept[-1] == len(values) - 1
    numbers = [value for value in values if value is not None and not math.isnan(value)]
    if numbers:
        assert min(numbers) in [values[i] for i in kept]
        assert max(numbers) in [values[i] for i in kept]


def test_between_evals_a_loss_is_straight_in_log_x() -> None:
    points = [(100.0, 4.0), (400.0, 3.0)]
    assert value_at(points, 200.0) == pytest.approx(3.5)
    assert value_at(points, 400.0) == 3.0
    assert value_at(points, 401.0) is None
    assert value_at(points, 99.0) is None


def test_curves_that_cross_are_seen_to_cross_once() -> None:
    falling = [(float(x), 5 - x / 100) for x in range(100, 500, 100)]
    flat = [(float(x), 2.55) for x in range(100, 500, 100)]
    found = duel(falling, flat, "step", Noise(0.05, 0.0))
    assert found is not None
    assert found.crossings == (pytest.approx(245),)
    assert (found.ahead, found.ahead_from) == (0, 300.0)


def test_runs_that_never_overlap_are_not_compared() -> None:
    assert duel([(1.0, 3.0), (2.0, 2.9)], [(5.0, 3.0), (6.0, 2.0)], "step", Noise(0.05, 0.0)) is None


def test_more_eval_rows_mean_less_noise(make_run: MakeRun) -> None:
    few = run_facts(open_run(make_run("few", config={"eval_iters": 10})))
    many = run_facts(open_run(make_run("many", config={"eval_iters": 1000})))
    assert eval_error(many).nats == pytest.approx(eval_error(few).nats / 10)
    assert noise_between(many, many).band() < noise_between(few, few).band()


def test_evals_on_the_same_rows_are_less_noisy_to_compare(make_run: MakeRun) -> None:
    fixed = {"sampling": "epoch", "dataset": "data/x"}
    a, b = (run_facts(open_run(make_run(name, config=fixed))) for name in "ab")
    other = run_facts(open_run(make_run("c", config={**fixed, "dataset": "data/y"})))
    assert noise_between(a, b).sampling < 0.5 * noise_between(a, other).sampling


def test_a_page_of_a_long_run_stays_small(make_run: MakeRun) -> None:
    log = open_run(make_run("long", steps=20_000, every=1000))
    series = run_series(log, run_facts(log), 2000)
    assert len(series["steps"]["step"]) <= 2002
    assert series["steps"]["step"][-1] == 19_999


def test_the_terminal_curve_is_as_wide_as_asked_and_names_each_run() -> None:
    curves = {
        "A": [(float(x), 5 - x / 50) for x in range(10, 110, 10)],
        "B": [(float(x), 4.0) for x in range(10, 110, 10)],
    }
    lines = sketch(curves, width=60, height=8)
    assert max(map(len, lines)) <= 60
    assert any("A" in line for line in lines)
    assert any("B" in line for line in lines)
    assert sketch({"A": []}) == []
