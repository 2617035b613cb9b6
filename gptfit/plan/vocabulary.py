"""A vocabulary of the data's own: what fewer entries cost in tokens, before anybody has trained one."""

from __future__ import annotations

from dataclasses import replace

from gptfit.plan.result import DataFacts

# Bytes per token of a BPE trained on the text itself, as a share of GPT-2's on the same text: the middle of MDN's pages
# and of US government guides, which lie 7 % below and above (`gptfit tokenizer train` says it exactly).
SHARES = {2048: 0.80, 4096: 0.92, 8192: 1.0}
ERROR = 0.08
# From here on a vocabulary is most of the model.
EMBEDDING_SHARE = 0.5


def own_vocabularies(data: DataFacts) -> list[DataFacts]:
    """The same text in vocabularies of its own; empty where the data is not GPT-2's tokens of a known length."""
    if not data.is_gpt2 or not data.bytes_per_token:
        return []
    return [_with_vocabulary(data, size, share) for size, share in SHARES.items()]


def _with_vocabulary(data: DataFacts, size: int, share: float) -> DataFacts:
    assert data.bytes_per_token is not None
    tokens = data.tokens
    return replace(
        data,
        name=f"{data.name}-{size}",
        tokens=replace(
            tokens,
            value=tokens.value / share,
            low=tokens.low / share / (1 + ERROR),
            high=tokens.high / share * (1 + ERROR),
            basis="fit",
        ),
        vocab_size=size,
        tokenizer=f"bpe-{size}",
        bytes_per_token=data.bytes_per_token * share,
        gpt2_bytes_per_token=data.bytes_per_token,
    )
