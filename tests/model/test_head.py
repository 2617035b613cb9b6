"""The chunked loss is the plain loss: value and gradients, in chunks of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gptfit.model.head import _add_product, _losses_leaving_gradient, _losses_of_chunk, token_loss


def loss_and_gradients(chunk_tokens: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(70, 24, requires_grad=True)
    weight = (torch.randn(300, 24) * scale).requires_grad_()
    targets = torch.randint(300, (70,))
    loss = token_loss(hidden, weight, targets, chunk_tokens)
    (loss / 3).backward()  # a factor as gradient accumulation puts it
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("chunk_tokens", [1, 16, 33, 70, 1000])
@pytest.mark.parametrize("scale", [0.02, 1.0, 30.0])
def test_gradients_equal_the_plain_ones_to_1e_5(chunk_tokens: int, scale: float) -> None:
    plain, chunked = loss_and_gradients(0, scale), loss_and_gradients(chunk_tokens, scale)
    for expected, found in zip(plain, chunked, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [0.0, 15.0])
def test_a_chunk_as_one_kernel_computes_what_the_pieces_do(dtype: torch.dtype, cap: float) -> None:
    """What is compiled on a card, here uncompiled: the same losses, the same gradient left in place of the logits."""
    torch.manual_seed(0)
    logits, ids = (torch.randn(40, 1000) * 4).to(dtype), torch.randint(1000, (40,))
    pieces, whole = logits.clone(), logits.clone()
    expected = _losses_leaving_gradient(pieces, ids, cap)
    torch.testing.assert_close(_losses_of_chunk(whole, ids, cap), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole, pieces, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # from inside torch's own compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_chunk_gives_the_same_losses_and_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, targets = torch.randn(300, 24).requires_grad_(), torch.randint(300, (70,))
    found = []
    for fused in (False, True):
        hidden = torch.randn(70, 24, generator=torch.Generator().manual_seed(1)).requires_grad_()
        weight.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = token_loss(hidden, weight, targets, 32, fused=fused)
        loss.backward()
        found.append((loss.detach(), hidden.grad, weight.grad))
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)


class AddedProducts(TorchDispatchMode):
    """Hears of products that are added to something, and does not compute them."""

    def __init__(self) -> None:
        super().__init__()
        self.into: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" not in str(func):
            return func(*args, **(kwargs or {}))
        self.into.append((str(func), (kwargs or {}).get("out")))
        return args[0]


def test_on_a_card_a_chunks_16_bit_products_are_added_to_the_float32_gradient_without_a_copy() -> None:
    """As torch would call it there: a word it does not know, or a product by itself, is seen here."""
    with FakeTensorMode():
        total = torch.empty(50, 16, device="cuda")
        left, right = (torch.empty(8, size, device="cuda", dtype=torch.bfloat16) for size in (50, 16))
        with AddedProducts() as heard:
            _add_product(total, left.t(), right)
    ((name, out),) = heard.into
    assert (name, out is total) == ("aten.addmm.dtype_out", True)


def test_evaluation_without_gradients_gives_the_same_loss() -> None:
    plain, _, _ = loss_and_gradients(0)
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(70, 24), torch.randn(300, 24), torch.randint(300, (70,))
    with torch.no_grad():
        torch.testing.assert_close(token_loss(hidden, weight, targets, 16), plain)


def test_under_bfloat16_the_chunked_gradients_are_as_near_the_truth_as_the_plain_ones() -> None:
    truth = loss_and_gradients(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain, chunked = loss_and_gradients(0), loss_and_gradients(16)
    for exact, rounded, found in zip(truth, plain, chunked, strict=True):
        error, allowed = (found.float() - exact).norm(), (rounded.float() - exact).norm()
        assert error <= 1.5 * allowed + 1e-3 * exact.norm()
