"""The chunked loss beside Inductor's own chunking of the whole one: error of loss and gradients against float64.

    python bench/loss_chunks.py          numbers only; on a CPU

Hand-written chunks are model/head.py's, as they are (eager) and with their softmax compiled (fused). `auto` is torch's
`torch._inductor.config.auto_chunker`, which cuts the graph of the plain loss.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch._inductor.inductor_prims  # the chunker needs its operations registered
from torch import Tensor

from gptfit.model.head import token_loss

TOKENS, WIDTH, VOCAB, CHUNK = 1024, 256, 16384, 256
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> int:
    print(f"{TOKENS} tokens of {WIDTH} channels, vocabulary {VOCAB}, {TOKENS // CHUNK} chunks; relative error (2-norm)")
    print(f"{'':36s} {'loss':>9s} {'states':>9s} {'head':>9s}")
    truth = _gradients(_plain, torch.float64, False, 0.0)
    capped = _gradients(_capped, torch.float64, False, 15.0)
    for cap, exact in ((0.0, truth), (15.0, capped)):
        for is_16_bit in (False, True):
            for name, loss in _ways(cap).items():
                found = _gradients(loss, torch.float32, is_16_bit, cap)
                errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
                how = f"{name}{', bfloat16' if is_16_bit else ''}{', soft cap' if cap else ''}"
                print(f"{how:36s} " + " ".join(f"{error:9.1e}" for error in errors))
    return 0


def _plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return token_loss(hidden, weight, targets)


def _capped(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight)
    bent = logits * torch.rsqrt((logits / 15.0).square() + 1)
    return torch.nn.functional.cross_entropy(bent, targets)


def _ways(cap: float) -> dict[str, Loss]:
    def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return token_loss(hidden, weight, targets, cap=cap)

    auto = torch.compile(whole, options={"auto_chunker.enable": True, "auto_chunker.num_chunk": TOKENS // CHUNK})
    return {
        "whole": whole,
        "hand-written, eager": lambda h, w, t: token_loss(h, w, t, CHUNK, cap),
        "hand-written, fused": lambda h, w, t: token_loss(h, w, t, CHUNK, cap, fused=True),
        "auto": auto,
    }


def _gradients(loss: Loss, dtype: torch.dtype, is_16_bit: bool, cap: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = (0.1 * torch.randn(VOCAB, WIDTH, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_16_bit):
        value = loss(hidden, weight, targets)
    value.backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert weight.grad is not None
    return [value.detach(), hidden.grad, weight.grad]


if __name__ == "__main__":
    sys.exit(main())
