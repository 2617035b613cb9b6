"""Scoring continuations: how likely a model finds each of several texts after a common beginning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptfit.model.base import LanguageModel
from gptfit.model.cache import KVCache


@dataclass(frozen=True)
class ContinuationScore:
    """The log-probability of all of a continuation's tokens, and whether each was the likeliest one."""

    log_p: float
    n_tokens: int
    is_greedy: bool

    @property
    def mean(self) -> float:
        return self.log_p / self.n_tokens

    def followed_by(self, other: ContinuationScore) -> ContinuationScore:
        return ContinuationScore(
            self.log_p + other.log_p, self.n_tokens + other.n_tokens, self.is_greedy and other.is_greedy
        )


def score_continuations(
    model: LanguageModel, context: Sequence[int], continuations: Sequence[Sequence[int]]
) -> list[ContinuationScore]:
    """The context is read once for all of them. What does not fit into the window is cut from its beginning.

    A continuation longer than the window is scored in windows side by side, each after the token before it.
    """
    window = model.shape.block_size
    scores = _score(model, context, [tokens[:window] for tokens in continuations])
    for i, tokens in enumerate(continuations):
        for start in range(window, len(tokens), window):
            more = _score(model, tokens[start - 1 : start], [tokens[start : start + window]])[0]
            scores[i] = scores[i].followed_by(more)
    return scores


@torch.inference_mode()
def _score(
    model: LanguageModel, context: Sequence[int], continuations: Sequence[Sequence[int]]
) -> list[ContinuationScore]:
    assert context, "a continuation needs something to continue"
    assert all(continuations), "a continuation needs a token"
    longest = max(len(tokens) for tokens in continuations)
    room = model.shape.block_size + 1 - longest
    if len(context) > room and len(continuations) > 1:
        # Each keeps as much of the context as fits with it, as lm-evaluation-harness does; so they share no prefix.
        return [_score(model, context, [tokens])[0] for tokens in continuations]
    context = list(context)[-room:]
    device = model.lm_head.weight.device
    cache = KVCache(model.shape, 1, len(context), device, model.lm_head.weight.dtype)
    first = model.next_logits(torch.tensor([context], device=device), cache)  # (1, V)
    rows = torch.zeros(len(continuations), longest, dtype=torch.long, device=device)
    for row, tokens in zip(rows, continuations, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    log_p, hits = _judge(first.expand(len(rows), -1)[:, None], rows[:, :1])
    if longest > 1:
        # Rows are padded at the end; with causal attention nothing before the padding sees it.
        cache.fan_out(len(rows), longest - 1)
        more_log_p, more_hits = _judge(model.logits(rows[:, :-1], cache), rows[:, 1:])
        log_p, hits = torch.cat([log_p, more_log_p], dim=1), torch.cat([hits, more_hits], dim=1)
    return [
        ContinuationScore(float(p[:n].double().sum()), n, bool(hit[:n].all()))
        for p, hit, n in zip(log_p.cpu(), hits.cpu(), map(len, continuations), strict=True)
    ]


def _judge(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T, V) logits and (B, T) tokens -> each token's log-probability, and whether it was the likeliest."""
    log_p = logits.float().log_softmax(dim=2).gather(2, tokens[:, :, None])[:, :, 0]
    return log_p, logits.argmax(dim=2) == tokens
