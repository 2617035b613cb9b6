"""Generating tokens: one prompt read once, n rows continued together, past the window too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gptfit.generate.pick import Picker, Picking
from gptfit.model.base import LanguageModel
from gptfit.model.cache import KVCache


def window_start(length: int, block_size: int) -> int:
    """Where the model starts reading when it predicts the token after `length` others.

    The whole text while it fits. Then the oldest quarter of the window is let go at once: positions are counted
    from the window's start, so every move means reading the window again, and moving by one token, as nanoGPT
    does, would read all of it for every token.

    >>> [window_start(n, 8) for n in (7, 8, 9, 10, 11)]
    [0, 0, 2, 2, 4]
    """
    step = max(1, block_size // 4)
    return max(0, -(-(length - block_size) // step) * step)


def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    rows: int,
    tokens: int,
    picking: Picking,
    vocab_size: int | None = None,
) -> Iterator[list[int]]:
    """Yields the next token of every row, `tokens` times. `vocab_size` keeps a padded model to real tokens."""
    assert prompt, "the model needs a token to start from"
    reader = _Reader(model, prompt, rows, tokens)
    picker = Picker(picking, rows)
    for _ in range(tokens):
        picked = picker.pick(reader.next_logits()[:, :vocab_size])
        yield picked.tolist()
        reader.append(picked)


class _Reader:
    """Keeps the text of every row and the cache of what the model has read of it."""

    def __init__(self, model: LanguageModel, prompt: Sequence[int], rows: int, tokens: int) -> None:
        self._model = model
        # Where the blocks are: while training, tables and head may be in host memory.
        self._device, self._dtype = next(model.transformer["h"].parameters()).device, model.lm_head.weight.dtype
        self._block_size = model.shape.block_size
        self._text = torch.empty(rows, len(prompt) + tokens, dtype=torch.long, device=self._device)
        self._text[:, : len(prompt)] = torch.tensor(prompt, device=self._device)
        self._length = len(prompt)
        self._start = window_start(self._length, self._block_size)
        self._cache, self._read = self._new_cache(1), self._start
        self._fans_out = rows > 1

    def append(self, tokens: Tensor) -> None:
        self._text[:, self._length] = tokens.to(self._device)
        self._length += 1
        start = window_start(self._length, self._block_size)
        if start != self._start:
            self._start = self._read = start
            self._cache = self._new_cache(self._text.shape[0])

    @torch.inference_mode()
    def next_logits(self) -> Tensor:
        """(B, V), reading what has not been read yet; the prompt once for all rows."""
        new = self._text[:, self._read : self._length]
        self._read = self._length
        if not self._fans_out:
            return self._model.next_logits(new, self._cache)
        logits = self._model.next_logits(new[:1], self._cache)
        self._fans_out = False
        rows = self._text.shape[0]
        self._cache.fan_out(rows, self._room() - self._cache.length)
        return logits.expand(rows, -1)

    def _new_cache(self, rows: int) -> KVCache:
        return KVCache(self._model.shape, rows, self._room(), self._device, self._dtype)

    def _room(self) -> int:
        """Tokens this window can still come to hold; never more than the model's own."""
        return min(self._block_size, self._text.shape[1] - self._start)
