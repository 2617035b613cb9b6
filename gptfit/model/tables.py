"""Look-up tables whose weights may stay in host memory: rows are fetched from there, and their gradients added there.

On the device there are only the rows of a micro-batch and, for the time of the loss, the head in the products' format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Table(nn.Embedding):
    """An embedding; `keep_on_host` once its weights are there."""

    fetch: Callable[[Tensor, Tensor], Tensor] | None = None

    def keep_on_host(self) -> None:
        # Not a decorator: it imports the compiler, seconds that most programs can do without.
        self.fetch = torch.compiler.disable(_rows_from_host)  # type: ignore[no-untyped-call]

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) if self.fetch is None else self.fetch(self.weight, ids)


def _rows_from_host(weight: Tensor, ids: Tensor) -> Tensor:
    return _HostRows.apply(weight, ids)  # type: ignore[no-any-return, no-untyped-call]


class _HostRows(torch.autograd.Function):
    """Gradients go straight into the table's own: a dense one for every look-up would be as large as the table."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.weight, ctx.ids = weight, ids.to(weight.device)
        rows = weight.detach()[ctx.ids]
        return (rows.pin_memory() if ids.is_cuda else rows).to(ids.device, non_blocking=True)

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[None, None]:
        weight = ctx.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        rows = grad_rows.to(weight.device, weight.dtype).flatten(0, -2)
        weight.grad.index_add_(0, ctx.ids.flatten(), rows)
        return None, None


def on_device(weight: Tensor, device: torch.device) -> Tensor:
    """A matrix from host memory for one product, in the format the product has: half the bytes on the way."""
    kind = device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    return weight.to(dtype).to(device, non_blocking=True)
