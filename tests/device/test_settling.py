"""When a repeated action has all the memory it needs."""

from __future__ import annotations

import mmap
import sys

import pytest

from gptfit.device.settling import MOST_RUNS, fetched_pages, run_settled


@pytest.mark.skipif(sys.platform != "linux", reason="pages are fetched one by one on Linux")
def test_memory_touched_for_the_first_time_is_fetched_page_by_page_and_then_no_more() -> None:
    pages = 500
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as memory:
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            memory.madvise(mmap.MADV_NOHUGEPAGE)

        def touch() -> int:
            before = fetched_pages()
            for page in range(pages):
                memory[page * mmap.PAGESIZE] = 1
            return fetched_pages() - before

        assert pages <= touch() < pages + 50
        assert touch() < 50


def test_an_action_is_run_until_it_fetches_few_pages_and_only_that_run_counts() -> None:
    fetched, taken = iter([0, 60_000, 60_000, 120_000, 120_000, 120_100, 120_100]), iter([0.9, 0.5, 0.14])
    assert run_settled(lambda: next(taken), 60.0, lambda: next(fetched)) == 0.14
    assert next(taken, None) is None


def test_an_action_that_always_wants_new_memory_is_not_run_forever() -> None:
    fetched, runs = iter(range(0, 10**9, 10**6)), iter(range(1, 1000))
    assert run_settled(lambda: float(next(runs)) / 1e3, 60.0, lambda: next(fetched)) == MOST_RUNS / 1e3
    assert run_settled(lambda: float(next(runs)), 0.0, lambda: next(fetched)) == MOST_RUNS + 1, "nor past its time"
