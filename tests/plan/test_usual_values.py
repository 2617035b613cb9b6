"""Usual values per size: the published tables come out, and nothing jumps in between."""

from __future__ import annotations

import pytest

from gptfit.plan import usual_values
from gptfit.schedule import usual_warmup


@pytest.mark.parametrize(
    ("parameters", "rate"), [(10e6, 1e-3), (124e6, 6e-4), (350e6, 3e-4), (760e6, 2e-4), (1.3e9, 2e-4), (100e9, 1e-4)]
)
def test_learning_rates_follow_gpt3(parameters: float, rate: float) -> None:
    assert usual_values.learning_rate(parameters) == pytest.approx(rate, rel=0.3)


def test_the_rate_never_rises_with_size() -> None:
    rates = [usual_values.learning_rate(1e6 * 1.3**n) for n in range(45)]
    assert rates == sorted(rates, reverse=True)


def test_a_long_run_of_gpt2_small_takes_half_a_million_tokens_a_step() -> None:
    assert usual_values.tokens_per_step(124e6, 10e9) == 524_288


def test_a_short_run_still_has_two_thousand_updates() -> None:
    assert 100e6 / usual_values.tokens_per_step(30e6, 100e6) >= 1400


@pytest.mark.parametrize("max_iters", [1, 5, 100, 5000, 600_000])
def test_warm_up_is_never_more_than_a_tenth_of_a_real_run(max_iters: int) -> None:
    warmup = usual_warmup(max_iters)
    assert 1 <= warmup <= max(10, max_iters // 10)
    assert warmup <= max_iters


def test_the_final_rate_is_a_tenth_and_reads_well() -> None:
    assert repr(usual_values.final_rate(6e-4)) == "6e-05"


def test_dropout_only_for_repeated_data() -> None:
    assert [usual_values.dropout(epochs) for epochs in (1, 8, 50)] == [0.0, 0.1, 0.2]
