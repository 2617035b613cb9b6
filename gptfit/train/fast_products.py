"""matmul = 'fp8' and 'fp16acc': the products in a faster format, watched on the first steps beside bfloat16."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from gptfit.device.device import Device
from gptfit.device.formats import accumulate_in_fp16, accumulating_in_float32
from gptfit.model.base import LanguageModel
from gptfit.model.fp8 import Fp8Layers
from gptfit.train.batches import Batch, counted_share

WATCHED_STEPS = 20
# Nats between the two formats' losses on the same batches with the same weights; a choice, not a measurement. Seeds alone
# put runs 0.008 apart at 5M parameters and 0.0013 from 100M on (compare/noise.py).
NOISE = 0.01


@dataclass
class FastProducts:
    """The format a config asks for, as long as it holds."""

    name: str  # plain | fp8 | fp16acc
    model: LanguageModel
    device: Device
    layers: Fp8Layers | None = None
    # By step: one that is done again, as memory ran out in some process, counts once, and so the same for all.
    differences: dict[int, float] = field(default_factory=dict)

    @property
    def is_watched(self) -> bool:
        return self.name != "plain" and len(self.differences) < WATCHED_STEPS

    def watch(self, batch: Batch, step: int) -> None:
        """How far this batch's loss is above bfloat16's; eagerly, as nothing of it is worth compiling."""
        was_training = self.model.training
        self.model.train(False)
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                with self.device.autocast():
                    fast = self.model(*batch)
                with self.plainly() as device, device.autocast():
                    plain = self.model(*batch)
            # Per token that counts, which the noise is about; the model's mean is over all.
            share = float(counted_share(batch)) if self.model.loss_is_masked else 1.0
            self.differences[step] = float(fast - plain) / share if share else 0.0
        finally:
            self.model.train(was_training)

    def give_up(self) -> Device:
        """bfloat16 from here on; the device as it is then used."""
        if self.layers is not None:
            self.layers.use(fast=False)
        accumulate_in_fp16(False)
        self.name, self.device = "plain", _in_bfloat16(self.device)
        return self.device

    @contextlib.contextmanager
    def plainly(self) -> Iterator[Device]:
        """The products as they would be without; for whoever has fewer rows than 8-bit products take, too."""
        layers = self.layers if self.name == "fp8" else None  # once they were given up they must not come back
        with accumulating_in_float32(), layers.plainly() if layers else contextlib.nullcontext():
            yield _in_bfloat16(self.device)


def make_fast_products(matmul: str, model: LanguageModel, device: Device) -> FastProducts:
    """Takes effect at once. A CPU has no such units; there 8 bits are emulated."""
    accumulate_in_fp16(matmul == "fp16acc")
    layers = Fp8Layers(model, emulate=device.kind == "cpu") if matmul == "fp8" else None
    return FastProducts(matmul, model, device, layers)


def verdict(name: str, difference: float) -> tuple[bool, str]:
    """Whether the format may stay, and the sentence that says so; `difference` is the mean of all processes."""
    side = "above" if difference >= 0 else "below"
    seen = f"matmul = '{name}': loss {abs(difference):.4f} {side} bfloat16's on the batches of the first {WATCHED_STEPS} steps"
    if abs(difference) <= NOISE:
        return True, f"{seen}, within the noise of {NOISE:g}"
    return False, f"{seen}, beyond the noise of {NOISE:g}: from here on bfloat16"


def _in_bfloat16(device: Device) -> Device:
    """float16 is only there for its accumulation; a float32 device stays what it is."""
    return replace(device, dtype="bfloat16") if device.dtype == "float16" else device
