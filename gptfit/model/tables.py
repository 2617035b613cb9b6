"""Look-up tables whose weights may stay in host memory: rows are fetched from there, and their gradients added there.

On the device there are only the rows of a micro-batch and, for the time of the loss, the head in the products' format.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Table(nn.Embedding):
    """An embedding; `is_on_host` once `keep_on_host` has moved it."""

    is_on_host = False

    def forward(self, ids: Tensor) -> Tensor:
        return _rows_from_host(self.weight, ids) if self.is_on_host else super().forward(ids)


@torch.compiler.disable  # type: ignore[untyped-decorator]
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
