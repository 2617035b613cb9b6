"""The loss to expect of a run: the published law where it reaches, the small one below, blended in between."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from gptfit.estimate import Estimate
from gptfit.measured import MeasuredLoss
from gptfit.plan import loss, small_loss
from gptfit.plan.loss import Loss
from gptfit.plan.repeat_penalty import USUAL_DECAY, penalty
from gptfit.plan.result import DataFacts
from gptfit.shape import ModelShape

# Unique GPT-2 tokens and parameters from which the published law begins to count, and from which it alone does.
TOKENS = (loss.LEAST_TOKENS, 200e6)
PARAMETERS = (loss.LEAST_PARAMETERS, 10e6)
LARGE_VOCABULARY = 32_768  # tables of fewer rows hold less, and nothing is published of what they are worth


def expected_loss(
    shape: ModelShape,
    tokens: float,
    data: DataFacts | None,
    *,
    optimizer: str = "adamw",
    dataset: str = "",
    own_runs: Iterable[MeasuredLoss] = (),
    weight_decay: float = USUAL_DECAY,
) -> Loss | None:
    """After `tokens` from scratch; None where nothing is seen or nothing is known of the tokens."""
    if tokens <= 0 or (data and not data.is_gpt2 and not data.bytes_per_token):
        return None
    bytes_per_token, gpt2_bytes = _text(data)
    unique = min(tokens, data.tokens.value) if data and data.tokens.value > 0 else tokens
    scale = bytes_per_token / gpt2_bytes
    name = data.name if data else dataset
    published = loss.predict(
        loss.law_parameters(shape),
        tokens,
        unique_tokens=unique,
        dataset=name,
        arch=shape.arch,
        optimizer=optimizer,
        bytes_per_token=None if not data or data.is_gpt2 else scale * loss.GPT2_BYTES_PER_TOKEN,
        own_runs=own_runs,
        value_tables=shape.value_tables if shape.vocab_size >= LARGE_VOCABULARY else 0,
    )
    share = min(_share(unique * scale, TOKENS), _share(loss.law_parameters(shape), PARAMETERS))
    is_web = loss.dataset_kind(name) is not None
    small = _small(shape, tokens, unique, bytes_per_token, optimizer, is_web)
    chosen = _blend(small, published, share) if published else small
    e = chosen.loss
    guessing = max(0.0, math.log(shape.vocab_size) - e.value)  # what is learned by heart ends no worse than that
    extra = min(guessing, penalty(shape.parameters, tokens, unique, weight_decay))
    chosen = replace(chosen, loss=replace(e, value=e.value + extra, low=e.low + extra, high=e.high + extra))
    return replace(chosen, bits_per_byte=chosen.loss.map(1 / (bytes_per_token * math.log(2))))


def nats_per_byte(found: Loss) -> float:
    """What can be compared across vocabularies."""
    assert found.bits_per_byte is not None
    return found.bits_per_byte.value * math.log(2)


def block_parameters(shape: ModelShape) -> int:
    """What is left of a model without its vocabulary."""
    return shape.matmul_weights - shape.vocab_size * shape.n_embd


def _text(data: DataFacts | None) -> tuple[float, float]:
    """Bytes per token of the data, and of the same text in GPT-2's vocabulary."""
    usual = loss.GPT2_BYTES_PER_TOKEN
    if data is None:
        return usual, usual
    own = data.bytes_per_token or usual
    return own, own if data.is_gpt2 else data.gpt2_bytes_per_token or usual


def _share(value: float, between: tuple[float, float]) -> float:
    """0 at the lower end, 1 at the upper, straight in the logarithm."""
    low, high = between
    return min(1.0, max(0.0, math.log(value / low) / math.log(high / low)))


def _small(
    shape: ModelShape, tokens: float, unique: float, bytes_per_token: float, optimizer: str, is_web: bool
) -> Loss:
    value = small_loss.nats_per_byte(
        block_parameters(shape),
        tokens * bytes_per_token,
        unique * bytes_per_token,
        is_plain=shape.arch != "modern" or optimizer != "muon",
        text=small_loss.WEB_PAGES if is_web else small_loss.ANY_TEXT,
    )
    sentence = "small runs here and published ones, any text: a wide range"
    estimate = Estimate.within(value * bytes_per_token, small_loss.WIDTH, "fit")
    return Loss(estimate, loss.effective_tokens(tokens, unique), sentence)


def _blend(small: Loss, published: Loss, share: float) -> Loss:
    def mixed(low: float, high: float) -> float:
        return (1 - share) * low + share * high

    a, b = small.loss, published.loss
    estimate = Estimate(mixed(a.value, b.value), mixed(a.low, b.low), mixed(a.high, b.high), b.basis)
    return replace(published if share > 0.5 else small, loss=estimate)
