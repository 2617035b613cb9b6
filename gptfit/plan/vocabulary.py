"""A vocabulary of the data's own: what fewer entries cost in tokens, measured on the file or, without one, usual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gptfit.plan.result import DataFacts

SIZES = (2048, 4096, 8192, 16384, 32768, 50304)  # multiples of 64, which kernels for the head like
# Bytes per token of a BPE trained on the text itself, as a share of GPT-2's on the same text: the middle of MDN's pages
# and of US government guides, which lie 7 % below and above (`gptfit tokenizer train` says it exactly).
USUAL_SHARES = {2048: 0.80, 4096: 0.92, 8192: 1.0}
USUAL_ERROR = 0.08
MEASURED_ERROR = 0.02  # of a sample against all of the web files


def own_vocabularies(data: DataFacts, measured: Mapping[int, float]) -> list[DataFacts]:
    """The same text in vocabularies of its own; empty where the data is not GPT-2's tokens of a known length.

    `measured` are shares of GPT-2's bytes per token by size, as `measure_vocabularies` finds them.
    """
    if not data.is_gpt2 or not data.bytes_per_token:
        return []
    shares, error = (measured, MEASURED_ERROR) if measured else (USUAL_SHARES, USUAL_ERROR)
    return [_with_vocabulary(data, size, share, error, bool(measured)) for size, share in shares.items()]


def _with_vocabulary(data: DataFacts, size: int, share: float, error: float, is_measured: bool) -> DataFacts:
    assert data.bytes_per_token is not None
    tokens = data.tokens
    return replace(
        data,
        name=f"{data.name}-{size}",
        tokens=replace(
            tokens,
            value=tokens.value / share,
            low=tokens.low / share / (1 + error),
            high=tokens.high / share * (1 + error),
            basis="measured" if is_measured else "fit",
        ),
        vocab_size=size,
        tokenizer=f"bpe-{size}",
        bytes_per_token=data.bytes_per_token * share,
        gpt2_bytes_per_token=data.bytes_per_token,
    )
