"""When a repeated action has all the memory it needs: until then it also waits for pages that it will never fetch again."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

# What fetching a page of 4 KiB may take: 0.25 microseconds by itself, 6.7 as measured in a virtual machine.
PAGE_S = 5e-6
FEW = 0.02  # of an action's time: so much may go for pages in one that has settled
MOST_RUNS = 6
Action = Callable[[], object]


def fetched_pages() -> int:
    """Of memory, that this process has waited for since it began; 0 where the system does not say."""
    try:
        import resource
    except ImportError:
        return int(getattr(psutil.Process().memory_info(), "num_page_faults", 0))  # Windows
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def run_settled(seconds: Callable[[], float], most_s: float, pages: Callable[[], int] | None = None) -> float:
    """Run what says how long it took until it fetches few pages, so many times or so long at most; the last time.

    A heap that other work has left in holes gets large tensors in one piece only after a few runs: logits of 270 MB took
    0.3, 0.9, 0.9, 0.5 and from then on 0.14 seconds.
    """
    began, pages = time.perf_counter(), pages or fetched_pages
    for _ in range(MOST_RUNS):
        before = pages()
        taken = seconds()
        if (pages() - before) * PAGE_S <= FEW * taken or time.perf_counter() - began > most_s:
            break
    return taken
