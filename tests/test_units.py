"""Numbers as people read them."""

from __future__ import annotations

import pytest

from gptfit.units import count, duration, gib, percent, si


@pytest.mark.parametrize(("value", "text"), [
    (124_373_760, "124.4M"), (56_109, "56.1k"), (1.5e9, "1.50B"), (999_960, "1.00M"), (0, "0"), (65, "65"),
    (2.6e12, "2.60T"), (9_999, "10.0k"), (0.123456, "0.123"),
])  # fmt: skip
def test_si(value: float, text: str) -> None:
    assert si(value) == text


@pytest.mark.parametrize(("seconds", "text"), [
    (3.21, "3.2 s"), (59.6, "60 s"), (200, "3 min 20 s"), (3600, "1 h"), (11520, "3 h 12 min"), (3 * 86400 + 7200, "3 d 2 h"),
    (3599.9, "60 min"),
])  # fmt: skip
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sizes_counts_and_shares() -> None:
    assert gib(11.2 * 1024**3) == "11.2 GiB"
    assert gib(512) == "512 B"
    assert count(1234567) == "1,234,567"
    assert percent(0.823) == "82 %"
