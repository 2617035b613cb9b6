"""How unlike processes share the micro-steps of an update: each as many as it can do in the time of the others."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def share_out(seconds: Sequence[float], total: int) -> list[int]:
    """`total` micro-steps among processes that need `seconds` for one each, so that the last is done soonest.

    Everyone gets at least one: all take part in the exchange of gradients.

    >>> share_out([1.0, 2.0], 6), share_out([1.0, 1.0, 1.0], 6)
    ([4, 2], [2, 2, 2])
    """
    assert total >= len(seconds), "at least one micro-step each"
    shares = [1] * len(seconds)
    # Whoever would finish one more first takes it: no other choice ends sooner when all micro-steps are alike.
    ready = [(2 * one, place) for place, one in enumerate(seconds)]
    heapq.heapify(ready)
    for _ in range(total - len(seconds)):
        done, place = heapq.heappop(ready)
        shares[place] += 1
        heapq.heappush(ready, (done + seconds[place], place))
    return shares


def slowest(seconds: Sequence[float], shares: Sequence[int]) -> float:
    """When the last process is done with its share."""
    return max(one * share for one, share in zip(seconds, shares, strict=True))
