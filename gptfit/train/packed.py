"""Optimizer state in 8 bits: blocks of 256 numbers share a scale, and codes are denser near zero.

Block-wise scales are from Dettmers et al. (2021, "8-bit Optimizers via Block-wise Quantization"). Their table of codes is
replaced by a power law: |x| = scale * (code / largest code)^2 for a momentum and ^4 for a mean square, whose range is wide.
Unpacking and packing again gives the same codes, so a checkpoint in float32 loses nothing of what was in 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256
SIGNED_CODES, SQUARE_CODES = 127, 255
SIGNED_POWER, SQUARE_POWER = 2, 4
LEAST_SCALE = 1e-30


@dataclass(frozen=True)
class Packed:
    """Codes in blocks and a float32 scale for each block; `shape` is that of the tensor they stand for."""

    codes: Tensor  # (blocks, BLOCK), int8 for numbers with a sign, uint8 for squares
    scales: Tensor  # (blocks, 1)
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def pack(tensor: Tensor, is_square: bool) -> Packed:
    """A mean square never becomes zero by rounding: an update divided by it would explode."""
    blocks = F.pad(tensor.flatten(), (0, -tensor.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    # A block of nothing but numbers this small is zero: their shares could not be told apart.
    scales = scales * (scales > LEAST_SCALE)
    share = torch.where(scales > 0, blocks / scales.clamp_min(LEAST_SCALE), 0.0)
    if is_square:
        codes = (share ** (1 / SQUARE_POWER) * SQUARE_CODES).round_().clamp_(min=1).to(torch.uint8)
    else:
        codes = (share.abs() ** (1 / SIGNED_POWER) * SIGNED_CODES).round_().copysign_(share).to(torch.int8)
    return Packed(codes, scales, tensor.shape)


def unpack(packed: Packed) -> Tensor:
    if packed.codes.dtype == torch.uint8:
        share = (packed.codes.float() / SQUARE_CODES) ** SQUARE_POWER
    else:
        share = packed.codes.float() / SIGNED_CODES
        share = share * share.abs()
    values = (share * packed.scales).flatten()[: packed.shape.numel()]
    return values.view(packed.shape)
