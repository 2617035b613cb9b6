"""16-bit products on a CPU without code for them: computed in float32, which it is fast at, and rounded once at the end.

torch's own way there is a plain loop on one core, 20 to 60 times slower than float32. What comes out is what units for
bfloat16 give: their sums are float32 too.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
LIFTED = torch.bfloat16
AT_ONCE = (
    2**19
)  # float32 numbers of one factor or result; more are lifted in turns, so that they take no memory to speak of


@functools.cache
def lift_slow_products() -> torch.library.Library | None:
    """Where this CPU has no code for them and torch lets them be replaced (2.9 on), from here on in this whole process."""
    if torch.ops.mkldnn._is_mkldnn_bf16_supported() or not hasattr(torch.library, "get_kernel"):
        return None
    return lift_products()


def lift_products() -> torch.library.Library:
    """As long as what is returned is kept; products of float32 are untouched."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says of every kernel that it is replaced
        for name in PRODUCTS:
            plain, into = (torch.library.get_kernel(f"aten::{each}", "CPU") for each in (name, f"{name}.out"))
            for each, run in ((name, _lifted(plain)), (f"{name}.out", _lifted_into(plain, into))):
                library.impl(each, run, "CPU", with_keyset=True, allow_override=True)  # type: ignore[no-untyped-call]
        for each in (ATTENTION, f"{ATTENTION}_backward"):
            attention = _lifted_attention(torch.library.get_kernel(f"aten::{each}", "CPU"))
            library.impl(each, attention, "CPU", with_keyset=True, allow_override=True)  # type: ignore[no-untyped-call]
    return library


def _lifted(kernel: Any) -> Callable[..., Tensor]:
    def run(keyset: Any, *tensors: Tensor, **scales: Any) -> Tensor:
        if tensors[-1].dtype is not LIFTED:
            return kernel.call_boxed(keyset, *tensors, **scales)  # type: ignore[no-any-return]
        if len(tensors) == 2 and tensors[0].dim() == 2:
            return _in_turns(*tensors)
        return kernel.call_boxed(keyset, *map(Tensor.float, tensors), **scales).to(LIFTED)  # type: ignore[no-any-return]

    return run


def _in_turns(a: Tensor, b: Tensor) -> Tensor:
    """(m, k) x (k, n), divided along the longest of the three."""
    (m, k), n = a.shape, b.shape[1]
    longest, turns = max(m, k, n), math.ceil(max(m * k, k * n, m * n) / AT_ONCE)
    if turns <= 1 or b.shape[0] != k:
        return torch.mm(a.float(), b.float()).to(LIFTED)
    each = math.ceil(longest / turns)
    parts = [slice(first, first + each) for first in range(0, longest, each)]
    if longest == k:
        total = torch.zeros(m, n)
        for part in parts:
            total.addmm_(a[:, part].float(), b[part].float())
        return total.to(LIFTED)
    result, factor = a.new_empty(m, n), (b if longest == m else a).float()
    for part in parts:
        if longest == m:
            result[part] = torch.mm(a[part].float(), factor)
        else:
            result[:, part] = torch.mm(factor, b[:, part].float())
    return result


def _lifted_into(kernel: Any, into: Any) -> Callable[..., Tensor]:
    """As compiled code asks for it."""
    lifted = _lifted(kernel)

    def run(keyset: Any, *tensors: Tensor, out: Tensor, **scales: Any) -> Tensor:
        if tensors[-1].dtype is not LIFTED:
            return into.call_boxed(keyset, *tensors, out=out, **scales)  # type: ignore[no-any-return]
        result = lifted(keyset, *tensors, **scales)
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return run


def _lifted_attention(kernel: Any) -> Callable[..., tuple[Tensor, ...]]:
    """Forward gives the output and the sums of exponentials, which are float32 in any format; backward three gradients."""

    def run(keyset: Any, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        if arguments[0].dtype is not LIFTED:
            return kernel.call_boxed(keyset, *arguments, **options)  # type: ignore[no-any-return]
        lifted = (each.float() if isinstance(each, Tensor) else each for each in arguments)
        first, *others = kernel.call_boxed(keyset, *lifted, **options)
        is_forward = len(others) == 1
        return (first.to(LIFTED), *(other if is_forward else other.to(LIFTED) for other in others))

    return run
