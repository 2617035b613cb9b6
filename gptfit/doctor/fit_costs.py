"""From what whole models took to what a unit of every kind of work costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptfit.plan.step_work import Work

# Standard deviations of what one model takes: a share of it, and half a millisecond however small it is.
ERROR, ERROR_S = 0.04, 5e-4
# From so many of them on a model counts less, as others used the machine meanwhile, and one that is far off next to nothing;
# in how many rounds that is found out.
STRANGE, ROUNDS = 2.0, 5


@dataclass(frozen=True)
class Observed:
    work: Work
    seconds: float


def fit_costs(samples: Sequence[Observed]) -> dict[str, float]:
    """Seconds per unit, none below zero: the likeliest, where what is strange counts less."""
    kinds = list(samples[0].work)
    seconds = torch.tensor([sample.seconds for sample in samples]).double()
    work = torch.tensor([[float(sample.work[kind]) for kind in kinds] for sample in samples]).double()
    unit = (
        (work / seconds[:, None]).amax(dim=0).clamp(min=1e-300)
    )  # one of each at most, or numbers of twenty digits meet
    errors = (ERROR * seconds).hypot(torch.tensor(ERROR_S).double())
    rows, wanted = work / unit / errors[:, None], seconds / errors
    # Where there are fewer models than kinds of work, a little of each rather than all of one.
    little = torch.eye(len(kinds)).double()
    weights = torch.ones_like(wanted)
    for _ in range(ROUNDS):
        a = torch.cat([rows * weights[:, None], little])
        b = torch.cat([wanted * weights, torch.zeros(len(kinds)).double()])
        costs = nonnegative(a, b)
        weights = STRANGE / (rows @ costs - wanted).abs().clamp(min=STRANGE)
    return dict(zip(kinds, (costs / unit).tolist(), strict=True))


def nonnegative(a: Tensor, b: Tensor) -> Tensor:
    """The x, nowhere below zero, for which |a x - b| is least. Lawson and Hanson, Solving Least Squares Problems (1974), 23.

    Kinds of work enter one by one, each time the one that promises most; one that would go below zero leaves again.
    """
    n = a.shape[1]
    x, inside = torch.zeros(n).to(a), torch.zeros(n, dtype=torch.bool)
    enough = 1e-10 * float((a.T @ b).abs().max())
    for _ in range(3 * n):  # it ends by itself; rounding errors might not
        promise = (a.T @ (b - a @ x)).masked_fill(inside, 0)
        if float(promise.max()) <= enough:
            break
        inside[int(promise.argmax())] = True
        best = _solved(a, b, inside)
        while bool((best[inside] <= 0).any()):
            below = inside & (best <= 0)
            x = x + (x[below] / (x[below] - best[below])).min() * (best - x)  # as far as none is below zero
            inside &= x > 1e-12
            best = _solved(a, b, inside)
        x = best
    return x


def _solved(a: Tensor, b: Tensor, inside: Tensor) -> Tensor:
    """Without bounds, of the columns inside alone."""
    x = torch.zeros(a.shape[1]).to(a)
    if bool(inside.any()):
        x[inside] = torch.linalg.lstsq(a[:, inside], b[:, None], driver="gelsd").solution[:, 0]
    return x
