"""Python's garbage collector kept out of the training loop."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collection_frozen() -> Iterator[None]:
    """A collection in the middle of a step costs tens of milliseconds; the loop makes no cycles to collect."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
