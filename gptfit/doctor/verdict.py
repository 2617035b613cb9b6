"""Verdict: what one check of the card found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["ok", "warning", "error", "skipped"]


@dataclass(frozen=True)
class Verdict:
    """One line of the screen and the numbers behind it; the remedy where it is not ok."""

    level: Level
    text: str
    remedy: str = ""
    values: dict[str, Any] = field(default_factory=dict)
