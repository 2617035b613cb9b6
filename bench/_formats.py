"""Number formats of a card on a CPU: each product computed as the card's units would, and slow all the same.

`WideProducts` gives 16-bit products the float32 sums of a tensor core. A CPU without 16-bit units would do them one by one,
fifty times slower than this. `NarrowSums` keeps the sum in float16 and rounds it after every 16 products, which is what
allow_fp16_accumulation does on a GeForce card.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, *ATTENTION)
HALVES = (torch.bfloat16, torch.float16)
SUMMED_AT_ONCE = 16  # products a tensor core adds before it writes the sum


def _is_half(value: Any) -> bool:
    """A plain tensor of 16 bits: torchao's stand for 8 bits and know their own products."""
    return type(value) in (Tensor, torch.nn.Parameter) and value.dtype in HALVES


class WideProducts(TorchDispatchMode):
    """16-bit operands, float32 sums, 16-bit results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtype = next((a.dtype for a in args if _is_half(a)), None)
        if func not in PRODUCTS or dtype is None:
            return func(*args, **kwargs)
        found = self.product(func, [a.float() if _is_half(a) else a for a in args], kwargs)
        if isinstance(found, Tensor):
            return found.to(dtype)
        # Attention's second result, the logarithm of its sums, has a dimension less and is float32 on every device.
        return tuple(part.to(dtype) if part.dim() == 4 else part for part in found)

    def product(self, func: Any, wide: list[Any], kwargs: Any) -> Any:
        return func(*wide, **kwargs)


class NarrowSums(WideProducts):
    """The same with float16 sums for plain matrix products; attention's kernels know no such switch."""

    def product(self, func: Any, wide: list[Any], kwargs: Any) -> Any:
        if func is aten.mm.default:
            return summed_in_float16(*wide)
        if func is aten.addmm.default:
            return wide[0] + summed_in_float16(wide[1], wide[2])
        return func(*wide, **kwargs)


def summed_in_float16(left: Tensor, right: Tensor) -> Tensor:
    total = torch.zeros(left.shape[0], right.shape[1], dtype=torch.float16)
    for start in range(0, left.shape[1], SUMMED_AT_ONCE):
        part = slice(start, start + SUMMED_AT_ONCE)
        total = (total.float() + left[:, part] @ right[part]).half()
    return total.float()
