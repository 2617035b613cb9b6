"""How fast this machine's CPU multiplies matrices, from a fraction of a second: for a plan where nothing was timed yet."""

from __future__ import annotations

import threading
import time
from functools import lru_cache

SIZE = 512  # 3 MiB of matrices; larger ones are hardly faster, and one product takes milliseconds on any CPU
SECONDS = 0.2  # of products; on a busy machine as many more as it takes for some of them to be left alone
PRODUCTS, MOST_SECONDS = 20, 1.0
PATIENCE_S = (
    15.0  # for numpy to be imported as well, which takes seconds on a busy machine; a plan does not wait longer
)


@lru_cache(maxsize=1)  # once per command
def product_rate() -> float | None:
    """Float32 FLOPs per second of the best product by numpy; None where that fails or takes too long.

    In a thread of its own, as nothing that goes wrong in a library for a first guess may keep a plan waiting.
    """
    found: list[float] = []
    timing = threading.Thread(target=_time_products, args=(found,), daemon=True)
    timing.start()
    timing.join(PATIENCE_S)
    return found[0] if found else None


def _time_products(found: list[float]) -> None:
    try:
        import numpy as np

        one = np.full((SIZE, SIZE), 0.5, np.float32)
        out = np.empty_like(one)
        took: list[float] = []
        begun = time.perf_counter()
        while (spent := time.perf_counter() - begun) < (SECONDS if len(took) >= PRODUCTS else MOST_SECONDS):
            np.matmul(one, one, out=out)
            took.append(time.perf_counter() - begun - spent)
            found[:] = [2 * SIZE**3 / min(took)]
    except Exception:  # noqa: BLE001  no numpy, no memory, no clock: the plan says that nothing was timed
        return
