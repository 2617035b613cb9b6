"""KVCache: the keys and values of tokens already read, so that the next token costs one token's work."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from gptfit.shape import ModelShape


class LayerCache:
    """One layer's keys and values: a prefix common to all rows (or none), then each row's own."""

    def __init__(self, size: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype) -> None:
        self._keys = torch.empty(size, device=device, dtype=dtype)  # (B, nh, room, hs)
        self._values = torch.empty_like(self._keys)
        self._own = 0
        self._prefix: tuple[Tensor, Tensor] | None = None  # (nh, P, hs) each

    @property
    def length(self) -> int:
        """Tokens held: the position of the next one."""
        return self._own + (self._prefix[0].shape[1] if self._prefix else 0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """Take in the new tokens' keys and values; (B, nh, T, hs) of causal attention over everything held."""
        start, self._own = self._own, self._own + q.shape[2]
        self._keys[:, :, start : self._own] = k
        self._values[:, :, start : self._own] = v
        keys, values = self._keys[:, :, : self._own], self._values[:, :, : self._own]
        if self._prefix is not None:
            return self._attend_with_prefix(q, keys, values, start, scale)
        if start == 0 or q.shape[2] == 1:
            return F.scaled_dot_product_attention(q, keys, values, is_causal=start == 0, scale=scale)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=_mask(q, start), scale=scale)

    def _attend_with_prefix(self, q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float | None) -> Tensor:
        """One softmax over two pieces. All rows meet the prefix in one product per head, so it is read once."""
        assert self._prefix is not None
        prefix_keys, prefix_values = self._prefix
        q = q * (q.shape[3] ** -0.5 if scale is None else scale)
        own = q @ keys.transpose(2, 3)
        if q.shape[2] > 1:
            own = own.masked_fill(~_mask(q, start), float("-inf"))
        shared = _rows_apart(_rows_together(q) @ prefix_keys.transpose(1, 2), q)
        weights = torch.cat((shared, own), dim=3).softmax(dim=3)
        n_prefix = shared.shape[3]
        over_prefix = _rows_apart(_rows_together(weights[..., :n_prefix]) @ prefix_values, q)
        return over_prefix + weights[..., n_prefix:] @ values

    def fan_out(self, rows: int, room: int) -> None:
        """From one row to several that share what it read; each gets `room` for tokens of its own."""
        assert self._prefix is None, "a cache fans out once"
        self._prefix = self._keys[0, :, : self._own], self._values[0, :, : self._own]
        self._keys = self._keys.new_empty(rows, self._keys.shape[1], room, self._keys.shape[3])
        self._values, self._own = torch.empty_like(self._keys), 0


class KVCache:
    """A cache for every layer of a model, with its memory taken at once."""

    def __init__(self, shape: ModelShape, rows: int, room: int, device: torch.device, dtype: torch.dtype) -> None:
        size = (rows, shape.n_head, room, shape.n_embd // shape.n_head)
        self.layers = [LayerCache(size, device, dtype) for _ in range(shape.n_layer)]
        self.previous: Tensor | None = None  # the last token's embedding, for models that look back one token
        self.previous_id: Tensor | None = None  # and the token itself

    @property
    def length(self) -> int:
        return self.layers[0].length

    def fan_out(self, rows: int, room: int) -> None:
        for layer in self.layers:
            layer.fan_out(rows, room)


def _mask(q: Tensor, start: int) -> Tensor:
    """(T, start + T): new token i sees every held one and the new ones up to itself."""
    time = q.shape[2]
    return torch.ones(time, start + time, dtype=torch.bool, device=q.device).tril(start)


def _rows_together(x: Tensor) -> Tensor:
    """(B, nh, T, n) -> (nh, B * T, n)."""
    return x.transpose(0, 1).flatten(1, 2)


def _rows_apart(x: Tensor, like: Tensor) -> Tensor:
    """(nh, B * T, n) -> (B, nh, T, n)."""
    return x.view(x.shape[0], like.shape[0], like.shape[2], x.shape[2]).transpose(0, 1)
