"""Verdict: what one check of the card found."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["ok", "warning", "error", "skipped"]
COMPILE_PROBLEM = "compile_problem"  # among a verdict's values: why this machine cannot compile


@dataclass(frozen=True)
class Verdict:
    """One line of the screen and the numbers behind it; the remedy where it is not ok."""

    level: Level
    text: str
    remedy: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.remedy or self.level in ("ok", "skipped"), f"{self.text}: what to do?"


def worst(errors: Iterable[float]) -> float:
    """The largest; not a number where one of them is none, which `max` would lose.

    >>> worst([0.1, float("nan"), 0.2])
    nan
    """
    found = list(errors)
    return math.nan if any(map(math.isnan, found)) else max(found)
