"""Learning rates against nanoGPT's published rule and their own invariants."""

from __future__ import annotations

import itertools

import pytest

from gptfit.config.keys import TrainConfig
from gptfit.schedule import SCHEDULE_NAMES, learning_rate

BASE = TrainConfig(learning_rate=1e-3, min_lr=1e-4, warmup_iters=100, lr_decay_iters=1000, max_iters=1000)


def test_cosine_goes_up_linearly_halves_in_the_middle_and_ends_at_min_lr() -> None:
    assert learning_rate(BASE, 0) == pytest.approx(1e-3 / 101)
    assert learning_rate(BASE, 99) == pytest.approx(1e-3 * 100 / 101)
    assert learning_rate(BASE, 100) == 1e-3
    assert learning_rate(BASE, 550) == pytest.approx((1e-3 + 1e-4) / 2)
    assert learning_rate(BASE, 1000) == pytest.approx(1e-4)
    assert learning_rate(BASE, 5000) == 1e-4


def test_wsd_is_flat_until_its_last_fraction_and_a_longer_horizon_shares_the_flat_part() -> None:
    short = BASE.replace(schedule="wsd", decay_fraction=0.2, min_lr=0.0)
    long = short.replace(lr_decay_iters=5000, max_iters=5000)
    assert all(learning_rate(short, step) == learning_rate(long, step) for step in range(801))
    assert learning_rate(short, 900) == pytest.approx(0.5e-3)
    assert learning_rate(short, 1000) == 0.0


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_no_schedule_rises_after_warm_up_or_leaves_its_bounds(name: str) -> None:
    config = BASE.replace(schedule=name)
    rates = [learning_rate(config, step) for step in range(100, 1200)]
    assert all(a >= b for a, b in itertools.pairwise(rates))
    assert min(rates) >= config.min_lr
    assert max(rates) == config.learning_rate


def test_decay_lr_off_is_constant_from_the_first_step() -> None:
    config = BASE.replace(decay_lr=False)
    assert {learning_rate(config, step) for step in (0, 50, 500, 5000)} == {1e-3}
