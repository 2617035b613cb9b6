"""The loss head: cross entropy of a linear layer, whole or in chunks of tokens that never hold all logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Rows of logits turned into probabilities at a time. On a CPU 16 x 50,304 floats are 3 MB, small enough for a core's
# cache; on a card 512 rows fill it and take 100 MB of float32. Fused code takes a whole chunk, as it keeps no copy.
UNCOUNTED = -1  # a target that no loss is about, as in nanoGPT
CPU_ROWS_PER_SOFTMAX, CARD_ROWS_PER_SOFTMAX = 16, 512


def token_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_tokens: int = 0,
    cap: float = 0.0,
    fused: bool = False,
    masked: bool = False,
) -> Tensor:
    """Mean cross entropy of (N, C) states against (N,) targets; 0 for chunk_tokens computes all logits at once.

    `masked`: targets may be UNCOUNTED, whose loss is zero; the mean is still over all N.
    """
    if not chunk_tokens:
        return mean_loss(soft_cap(F.linear(hidden, weight), cap), targets, masked)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _ChunkedLoss.apply(hidden, weight, targets, chunk_tokens, cap, fused, masked)  # type: ignore[no-any-return, no-untyped-call]
    return _chunked_loss(hidden, weight, targets, chunk_tokens, cap)


def mean_loss(logits: Tensor, targets: Tensor, masked: bool) -> Tensor:
    """Over all tokens, those that do not count with a loss of zero: micro-batches of one size can then be averaged."""
    if not masked:
        return F.cross_entropy(logits, targets)
    return F.cross_entropy(logits, targets, ignore_index=UNCOUNTED, reduction="sum") / targets.numel()


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Logits bent smoothly to stay inside -cap..cap, in float32; 0 leaves them alone."""
    if not cap:
        return logits
    logits = logits.float()
    return logits * _cap_bend(logits, cap)


def _cap_bend(logits: Tensor, cap: float) -> Tensor:
    """x / sqrt(1 + (x / cap)^2), cheaper than tanh, divided by x. Its cube is the derivative."""
    return torch.rsqrt((logits / cap).square() + 1)


def _chunked_loss(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int, cap: float) -> Tensor:
    weight = weight.to(hidden.device)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for states, ids in zip(_pieces(hidden, chunk_tokens), _pieces(targets, chunk_tokens), strict=True):
        logits = soft_cap(F.linear(states, weight).float(), cap)
        total += F.cross_entropy(logits, ids, ignore_index=UNCOUNTED, reduction="sum")
    return total / hidden.shape[0]


class _ChunkedLoss(torch.autograd.Function):
    """Gradients are computed in forward while a chunk's probabilities exist; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk_tokens: int,
        cap: float,
        fused: bool,
        masked: bool,
    ) -> Tensor:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        with torch.autocast(kind, enabled=False):
            loss, grad_hidden, grad_weight = _loss_and_gradients(
                hidden.to(dtype), weight.to(dtype).to(hidden.device), targets, chunk_tokens, cap, fused, masked
            )
        # A head in host memory gets its gradient there, before backward needs the room.
        ctx.save_for_backward(grad_hidden.to(hidden.dtype), grad_weight.to(weight.device))
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, Tensor, None, None, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_loss, grad_weight.mul_(grad_loss.to(grad_weight.device)), None, None, None, None, None


def _loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_tokens: int,
    cap: float,
    fused: bool = False,
    masked: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The division by the token count comes last: probabilities near 1/N would vanish in 16 bits."""
    n_tokens, rows = hidden.shape[0], min(chunk_tokens, hidden.shape[0])
    losses_of = fused_losses() if fused else _losses_leaving_gradient
    losses = torch.empty(n_tokens, dtype=torch.float32, device=hidden.device)
    grad_hidden = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device)
    grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=hidden.device)
    buffer = torch.empty(rows, weight.shape[0], dtype=weight.dtype, device=hidden.device)
    for start in range(0, n_tokens, chunk_tokens):
        part = slice(start, min(start + chunk_tokens, n_tokens))
        states, ids = hidden[part], targets[part]
        logits = torch.mm(states, weight.t(), out=buffer[: len(states)])
        losses[part] = losses_of(logits, ids.clamp(min=0) if masked else ids, cap)
        if masked:  # neither loss nor gradient
            losses[part].masked_fill_(ids == UNCOUNTED, 0.0)
            logits.masked_fill_((ids == UNCOUNTED).unsqueeze(1), 0.0)
        grad_hidden[part] = logits @ weight
        _add_product(grad_weight, logits.t(), states)
    return losses.mean(), grad_hidden.div_(n_tokens), grad_weight.div_(n_tokens)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right in float32; a card adds 16-bit products without a copy of them."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


@cache
def fused_losses() -> Callable[[Tensor, Tensor, float], Tensor]:
    """A chunk's losses and gradient as two kernels: logits are read twice and written once, in their own format.

    Inductor's auto-chunker, which cuts the whole loss, gives the same digits (bench/loss_chunks.py). This way is kept: the
    chunk's size is known to the plan, evaluation and eager runs use the same code, and it is no private option of torch's.
    """
    return torch.compile(_losses_of_chunk, dynamic=False)


def _losses_leaving_gradient(logits: Tensor, ids: Tensor, cap: float) -> Tensor:
    """Per-token losses; `logits` is overwritten by softmax minus one-hot, the gradient of their sum; a cap bends it."""
    rows = CPU_ROWS_PER_SOFTMAX if logits.device.type == "cpu" else CARD_ROWS_PER_SOFTMAX
    return torch.cat(
        [_losses_of_rows(b, t, cap) for b, t in zip(_pieces(logits, rows), _pieces(ids, rows), strict=True)]
    )


def _losses_of_rows(block: Tensor, targets: Tensor, cap: float) -> Tensor:
    log_p = torch.log_softmax(soft_cap(block.float(), cap), dim=-1)
    column = targets.unsqueeze(1)
    losses = -log_p.gather(1, column).squeeze(1)
    p = log_p.exp_()
    p.scatter_add_(1, column, torch.full_like(column, -1, dtype=p.dtype))
    block.copy_(p if not cap else p * _cap_bend(block.float(), cap) ** 3)
    return losses


def _losses_of_chunk(logits: Tensor, ids: Tensor, cap: float) -> Tensor:
    """The same without scattering, which a compiler could not join with the rest."""
    capped = soft_cap(logits.float(), cap)
    log_p = torch.log_softmax(capped, dim=-1)  # which the compiler knows to compute in one pass, unlike logsumexp
    column = ids.unsqueeze(1)
    losses = -log_p.gather(1, column).squeeze(1)
    is_target = torch.arange(logits.shape[1], device=logits.device) == column
    gradient = log_p.exp() - is_target.float()
    logits.copy_(gradient if not cap else gradient * _cap_bend(logits.float(), cap) ** 3)
    return losses


def _pieces(tensor: Tensor, size: int) -> list[Tensor]:
    return [tensor[start : start + size] for start in range(0, tensor.shape[0], size)]
