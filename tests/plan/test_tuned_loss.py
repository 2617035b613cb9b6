"""What is promised of GPT-2's weights, tuned, against what was published of them."""

from __future__ import annotations

import math

import pytest

from gptfit.estimate import Estimate
from gptfit.plan.result import DataFacts
from gptfit.plan.tuned_loss import AS_RELEASED, tuned_loss

SHAKESPEARE_BYTES = 1_115_394 / 338_025  # per GPT-2 token: nanoGPT's data/shakespeare/readme.md


def data(name: str, bytes_per_token: float) -> DataFacts:
    return DataFacts(name, Estimate.exact(3e5), 50_304, "gpt2", bytes_per_token)


def test_shakespeare_lies_within_the_range_and_not_at_its_edge() -> None:
    """llm.c's README, April 2024: val loss 3.516 after one epoch of GPT-2 124M on tinyshakespeare."""
    found = tuned_loss("gpt2", data("shakespeare", SHAKESPEARE_BYTES))
    assert found is not None
    assert found.bits_per_byte is not None
    assert found.loss.low < 3.516 < 0.95 * found.loss.high
    assert found.loss.value == pytest.approx(3.516, rel=0.3)
    assert found.bits_per_byte.high / found.bits_per_byte.low > 2.5, "nobody has measured the text at hand"


def test_web_pages_are_promised_what_nanogpt_reached() -> None:
    """nanoGPT's README: 2.85 after tuning GPT-2 124M on OpenWebText, at the bytes per token of web pages."""
    found = tuned_loss("gpt2", data("openwebtext", 4.65))
    assert found is not None
    assert found.loss.value == pytest.approx(2.85)
    assert found.loss.low < 2.85 < found.loss.high


def test_a_larger_model_is_promised_more_and_strange_tokens_nothing() -> None:
    losses = [tuned_loss(name, data("x", 3.3)) for name in AS_RELEASED]
    values = [found.loss.value for found in losses if found is not None]
    assert values == sorted(values, reverse=True)
    assert len(values) == len(AS_RELEASED)
    assert all(math.isfinite(value) for value in values)
    assert tuned_loss("gpt2", DataFacts("x", Estimate.exact(1e6), 65, "chars", 1.0)) is None
    assert tuned_loss("somebody/else", None) is None
