"""Rotary positions: pairs of channels turn by an angle that grows with the token's place (Su et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

# modded-nanogpt: the slowest pair turns once in about 6,000 tokens, and half of the pairs not at all.
SLOWEST = 1 / 1024


def rotary_tables(start: int, length: int, head_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions start, start + 1, ...: (length, head_size / 2) each."""
    positions = torch.arange(start, start + length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, rotary_speeds(head_size, device))
    return angles.cos(), angles.sin()


def rotary_speeds(head_size: int, device: torch.device) -> Tensor:
    """The angle each pair turns by from one token to the next: (head_size / 2)."""
    turning = head_size // 4
    exponents = torch.linspace(0, 1, turning, device=device)
    return torch.cat([SLOWEST**exponents, exponents.new_zeros(head_size // 2 - turning)])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(..., T, hs) -> the same, each pair (i, i + hs / 2) turned by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).type_as(x)
