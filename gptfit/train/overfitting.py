"""When a run is said to overfit: validation rose while training fell, several evaluations in a row."""

from __future__ import annotations

RISES_BEFORE_WARNING = 3  # one or two are within the noise of an evaluation


def moved_apart(before: tuple[float | None, float | None], now: tuple[float, float]) -> bool:
    """Whether the (train, val) losses of one evaluation and the next went different ways."""
    train_before, val_before = before
    if train_before is None or val_before is None:
        return False
    return now[0] < train_before and now[1] > val_before


def is_noticed(rises_in_a_row: int) -> bool:
    """Said once, at this count, not at every evaluation after it."""
    return rises_in_a_row == RISES_BEFORE_WARNING
