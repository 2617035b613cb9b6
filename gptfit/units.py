"""Numbers as people read them: 124.4M, 11.2 GiB, 3 h 12 min."""

from __future__ import annotations

import math

GIB = 1024**3
MIB = 1024**2


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that is no number any more.

    >>> perplexity(0.0), perplexity(1e9)
    (1.0, inf)
    """
    return math.exp(loss) if loss < 700 else math.inf


def si(value: float) -> str:
    """With a magnitude letter: si(124_373_760) -> '124.4M', si(56_109) -> '56.1k', si(1.5e9) -> '1.50B'."""
    if not math.isfinite(value):
        return str(value)
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # 999,960 must read 1.00M, not 1000.0k: the unit changes where rounding would reach 1000.
        if abs(value) >= 0.99995 * scale:
            scaled = value / scale
            return f"{scaled:.1f}{letter}" if abs(scaled) >= 9.995 else f"{scaled:.2f}{letter}"
    return f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"


def count(value: int) -> str:
    """1234567 -> '1,234,567'."""
    return f"{value:,}"


def plural(number: int, noun: str) -> str:
    """1 -> '1 document', 2345 -> '2,345 documents'."""
    return f"{count(number)} {noun}" if number == 1 else f"{count(number)} {noun}s"


def gib(size_bytes: float) -> str:
    """Bytes in the unit that keeps it readable: '11.2 GiB', '340 MiB', '12 KiB'."""
    for unit, scale in (("TiB", 1024**4), ("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if abs(size_bytes) >= scale:
            scaled = size_bytes / scale
            return f"{scaled:.1f} {unit}" if scaled < 100 else f"{scaled:,.0f} {unit}"
    return f"{size_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Two units at most: '12.3 s', '3 min 20 s', '3 h 12 min', '4 d 3 h'."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    for big, small, big_s, small_s in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if seconds >= big_s:
            total = round(seconds / small_s)
            head, tail = divmod(total, big_s // small_s)
            return f"{head} {big} {tail} {small}" if tail else f"{head} {big}"
    raise AssertionError("unreachable: seconds >= 60 matches the last row")


def times(value: float, places: int = 1) -> str:
    """How often: '0.29', '32.6', '293,780'; nobody counts tenths of hundreds."""
    return f"{value:.{places}f}" if value < 100 else f"{value:,.0f}"


def percent(fraction: float, places: int = 0) -> str:
    """0.823 -> '82 %'."""
    return f"{100 * fraction:.{places}f} %"
