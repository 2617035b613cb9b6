"""Exported: what an export wrote, and how it was checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Exported:
    """Where it is, and what was compared to know that it is right."""

    path: Path
    checks: tuple[str, ...]
    notes: tuple[str, ...] = ()
