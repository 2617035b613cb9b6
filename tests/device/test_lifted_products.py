"""bfloat16 products on a CPU without code for them: float32's, rounded once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gptfit.device import lifted_products
from gptfit.device.lifted_products import lift_products, lift_slow_products


def drawn(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).bfloat16()


@pytest.fixture
def lifted() -> Iterator[None]:
    library = lift_products()
    yield
    library._destroy()


@pytest.mark.usefixtures("lifted")
def test_every_product_is_float32s_rounded_once() -> None:
    a, b, bias, p, q, r = drawn(3, 5), drawn(5, 7), drawn(7), drawn(2, 3, 5), drawn(2, 5, 4), drawn(2, 3, 4)
    cases = [
        (torch.mm, (a, b), {}),
        (torch.addmm, (bias, a, b), {"beta": 0.5, "alpha": 2}),
        (torch.bmm, (p, q), {}),
        (torch.baddbmm, (r, p, q), {"beta": -1.5, "alpha": 0.25}),
    ]
    for product, tensors, scales in cases:
        expected = product(*(tensor.float() for tensor in tensors), **scales).bfloat16()
        assert torch.equal(product(*tensors, **scales), expected)
        for out in (torch.empty_like(expected), torch.empty(0, dtype=torch.bfloat16)):
            assert product(*tensors, **scales, out=out) is out
            assert torch.equal(out, expected)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.mm(a, a)


@pytest.mark.usefixtures("lifted")
@pytest.mark.parametrize("size", [(90, 4, 5), (4, 90, 5), (4, 5, 90), (3, 3, 3), (64, 64, 64)])
def test_a_large_product_is_lifted_in_turns(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int, int]) -> None:
    """Along any of its three sizes, whole or not a multiple of a turn; whatever is lifted at once stays small."""
    m, k, n = size
    a, b = drawn(m, k), drawn(n, k).T
    expected = torch.mm(a.float(), b.float())
    monkeypatch.setattr(lifted_products, "AT_ONCE", 100)
    found = torch.mm(a, b)
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), expected, rtol=0.01, atol=0.01)


@pytest.mark.usefixtures("lifted")
@pytest.mark.parametrize("positions", [7, 200])
def test_attention_is_float32s_rounded_once_and_so_are_its_gradients(positions: int) -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (drawn(2, 3, positions, 16 + i)[..., :16].to(dtype).requires_grad_() for i in range(3))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
        out.backward(drawn(2, 3, positions, 16).to(dtype))  # type: ignore[no-untyped-call]
        found.append([out.detach(), q.grad, k.grad, v.grad])
    assert torch.equal(found[0][0].bfloat16(), found[1][0])
    for exact, rounded in zip(*found, strict=True):
        assert exact is not None
        assert rounded is not None
        assert rounded.dtype == torch.bfloat16
        assert torch.allclose(exact, rounded.float(), rtol=0.03, atol=0.03 * float(exact.abs().max()))


def test_gradients_come_out_and_float32_stays_as_it_is() -> None:
    x, layer = drawn(4, 8).float(), nn.Linear(8, 6)
    before = layer(x)
    before.sum().backward()
    expected = layer.weight.grad
    assert expected is not None
    layer.weight.grad = None
    library = lift_products()
    assert torch.equal(layer(x), before)
    with torch.autocast("cpu", torch.bfloat16):
        lifted = layer(x)
    assert lifted.dtype == torch.bfloat16
    lifted.sum().backward()
    assert torch.allclose(lifted.float(), before, rtol=0.02, atol=0.02)
    assert layer.weight.grad is not None
    assert torch.allclose(layer.weight.grad, expected, rtol=0.02, atol=0.02)
    library._destroy()


@pytest.mark.parametrize(("has_own", "lifts"), [(True, 0), (False, 1)])
def test_where_the_cpu_has_code_of_its_own_nothing_is_replaced(
    monkeypatch: pytest.MonkeyPatch, has_own: bool, lifts: int
) -> None:
    done: list[None] = []
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_own)
    monkeypatch.setattr(lifted_products, "lift_products", lambda: done.append(None))
    lift_slow_products.cache_clear()
    lift_slow_products()
    lift_slow_products()
    assert len(done) == lifts
    lift_slow_products.cache_clear()
