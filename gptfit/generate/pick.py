"""Picking the next token from logits: temperature, top-k, top-p; the same draw for the same seed and row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gptfit.errors import RunError, UsageError


@dataclass(frozen=True)
class Picking:
    """How a token is chosen; the defaults are nanoGPT's. temperature 0 always takes the likeliest token."""

    temperature: float = 0.8
    top_k: int | None = 200
    top_p: float | None = None
    seed: int = 1337

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"--temperature {self.temperature:g} must be 0 (always the likeliest token) or more")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"--top-k {self.top_k} must be 1 or more", fix="leave it out to allow every token")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p {self.top_p:g} must be above 0 and at most 1")
        if not 0 <= self.seed < 2**62:
            raise UsageError(f"--seed {self.seed} must be 0 or more and below 2^62")


class Picker:
    """One random stream per row, so row 2 of 3 is also row 2 of 16."""

    def __init__(self, picking: Picking, rows: int) -> None:
        self._picking = picking
        self._streams = [torch.Generator().manual_seed(picking.seed + row) for row in range(rows)]

    def pick(self, logits: Tensor) -> Tensor:
        """(B, V) logits -> (B,) token ids, on the CPU."""
        how = self._picking
        if not bool(logits.sum().isfinite()):
            raise RunError(
                "the model's logits are not finite: its weights are damaged", fix="use an earlier checkpoint"
            )
        if how.temperature == 0:
            return logits.argmax(dim=1).cpu()
        draws = torch.stack([torch.rand(1, generator=stream, dtype=torch.float64) for stream in self._streams])
        p, ids = _candidates(logits.float(), how)
        # Where the draw falls among the summed probabilities; in double, as a row may have 50,000 of them.
        sums = p.cpu().double().cumsum(dim=1)
        place = torch.searchsorted(sums, draws * sums[:, -1:], right=True)
        return ids.cpu().gather(1, place.clamp_(max=ids.shape[1] - 1))[:, 0]


def _candidates(logits: Tensor, how: Picking) -> tuple[Tensor, Tensor]:
    """Probabilities, the likeliest first, and their token ids; top-p counts within what top-k left."""
    n = logits.shape[1]
    few = how.top_k is not None and how.top_k < n
    values, ids = logits.topk(how.top_k or n, dim=1) if few else logits.sort(dim=1, descending=True)
    # Subtract the largest first: a logit divided by a tiny temperature may overflow float32, a zero cannot.
    p = ((values - values[:, :1]) / how.temperature).softmax(dim=1)
    if how.top_p is not None:
        # The smallest set that reaches top_p: a token stays if those before it have not reached it yet.
        p = p.masked_fill(p.cumsum(dim=1) - p >= how.top_p, 0.0)
    return p, ids
