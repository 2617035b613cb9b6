"""8-bit floating point products: torchao's linear layers in the MLPs and the head, on the same weights as the plain ones.

Each operand is scaled by its largest number and rounded: 4 bits of exponent and 3 of fraction for values and weights, 5 and
2 for gradients. The weights themselves stay in float32, so a checkpoint and the optimizer know nothing of it.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from gptfit.model.base import LanguageModel

MULTIPLE = 16  # sides of a matrix that the card's 8-bit products take


@dataclass(frozen=True)
class SwappedLinear:
    """One layer in both formats, and where it hangs."""

    parent: nn.Module
    name: str
    plain: nn.Linear
    fast: nn.Module


class Fp8Layers:
    """The layers that were swapped; they can be swapped back, for a moment or for good."""

    def __init__(self, model: LanguageModel, emulate: bool) -> None:
        make = _float8_maker(emulate)
        self._swapped = [SwappedLinear(p, name, linear, make(linear)) for p, name, linear in _chosen(model)]
        self.use(fast=True)

    def __len__(self) -> int:
        return len(self._swapped)

    def use(self, fast: bool) -> None:
        for each in self._swapped:
            setattr(each.parent, each.name, each.fast if fast else each.plain)

    @contextlib.contextmanager
    def plainly(self) -> Iterator[None]:
        self.use(fast=False)
        try:
            yield
        finally:
            self.use(fast=True)


def _chosen(model: LanguageModel) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """The MLPs' matrices and the head: most of the arithmetic, and what training bears best."""
    for block in model.transformer["h"].children():
        mlp = block.get_submodule("mlp")
        for name in ("c_fc", "c_proj"):
            linear = mlp.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            if _has_fitting_sides(linear):
                yield mlp, name, linear
    if _has_fitting_sides(model.lm_head) and not model.tables_on_host:
        yield model, "lm_head", model.lm_head


def _has_fitting_sides(linear: nn.Linear) -> bool:
    return linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0


def _float8_maker(emulate: bool) -> Any:
    """torchao's class, imported here because that takes seconds and tells of kernels that are not ours to need."""
    logging.getLogger("torchao").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    return lambda linear: Float8Linear.from_float(linear, config)
