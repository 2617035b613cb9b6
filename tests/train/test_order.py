"""The epoch sampler: every window once, no memory, position from the step alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptfit.train.batches import EpochSampler
from gptfit.train.order import EpochOrder, permute


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_permute_visits_every_place_once(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


@given(st.integers(2, 50), st.integers(3, 4000), st.integers(0, 10**6), st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_an_epoch_has_each_window_once_and_stays_inside_the_file(block: int, extra: int, seed: int, epoch: int) -> None:
    order = EpochOrder(n_tokens=block + extra, block_size=block, seed=seed)
    starts = np.sort(order.starts(epoch * order.windows, order.windows))
    assert (np.diff(starts) == block).all()
    assert starts[0] == order.offset(epoch)
    assert starts[-1] + block + 1 <= order.n_tokens


def test_orders_differ_between_epochs_and_seeds_and_look_random() -> None:
    order = EpochOrder(n_tokens=100_001, block_size=10, seed=1)
    first, second = order.starts(0, order.windows), order.starts(order.windows, order.windows)
    other = EpochOrder(n_tokens=100_001, block_size=10, seed=2).starts(0, order.windows)
    for a, b in ((first, second), (first, other), (first, np.sort(first))):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.05


def test_offsets_shift_between_epochs() -> None:
    order = EpochOrder(n_tokens=100_001, block_size=64, seed=1)
    assert order.offset(0) == 0
    assert len({order.offset(epoch) for epoch in range(20)}) > 10


def test_a_hundred_billion_tokens_need_no_memory() -> None:
    order = EpochOrder(n_tokens=10**11, block_size=1024, seed=1337)
    starts = order.starts(90_000_000, 480)
    assert len(set(starts.tolist())) == 480
    assert starts.max() < 10**11 - 1024
    assert starts.std() > 10**10


def test_a_file_of_one_window_repeats_it() -> None:
    order = EpochOrder(n_tokens=17, block_size=16, seed=3)
    assert order.starts(0, 5).tolist() == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_a_step_without_overlap(processes: int) -> None:
    order = EpochOrder(n_tokens=10_001, block_size=10, seed=5)
    share = 8 // processes
    samplers = [EpochSampler(order, lambda step: 8 * step, lambda _, r=rank: r * share) for rank in range(processes)]
    together = np.concatenate([sampler.starts(3, 0, share) for sampler in samplers])
    assert together.tolist() == order.starts(24, 8).tolist()
