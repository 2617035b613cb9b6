"""Faster number formats of the products: what a device needs for them, and the switch torch has for one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec

import torch

from gptfit.config.keys import TrainConfig
from gptfit.device.device import Device
from gptfit.errors import DeviceError

FP8_CAPABILITY = (8, 9)  # Ada is the first GeForce generation with 8-bit floating point units
FP16_CAPABILITY = (7, 0)  # the first tensor cores


def check_formats(config: TrainConfig, device: Device) -> None:
    """One line where this device cannot do what `matmul` or `residual_dtype` ask for."""
    if problem := matmul_problem(config.matmul, device):
        raise DeviceError(f"matmul = {config.matmul!r} {problem}", fix="use matmul = 'plain'")
    if config.residual_dtype != "float32" and device.dtype == "float32":
        raise DeviceError(
            f"residual_dtype = {config.residual_dtype!r} needs products in 16 bits, and {device.name} computes in float32",
            fix="use residual_dtype = 'float32'",
        )


def matmul_problem(matmul: str, device: Device) -> str | None:
    """Why this device does not have that format; None where it does."""
    if matmul == "plain":
        return None
    least = FP8_CAPABILITY if matmul == "fp8" else FP16_CAPABILITY
    if device.kind != "cuda" or torch.version.hip is not None:
        return f"needs an NVIDIA card, and this is {device.name}"
    has = torch.cuda.get_device_capability(device.torch_device)
    if has < least:
        return f"needs compute capability {least[0]}.{least[1]}, and {device.name} has {has[0]}.{has[1]}"
    if matmul == "fp8" and find_spec("torchao") is None:
        return "needs torchao, which is not installed: pip install 'gptfit[fp8]'"
    return None


def accumulate_in_fp16(on: bool) -> None:
    """Sums of float16 products in float16, which GeForce cards do at twice the rate."""
    torch.backends.cuda.matmul.allow_fp16_accumulation = on


@contextlib.contextmanager
def accumulating_in_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_fp16_accumulation
    accumulate_in_fp16(False)
    try:
        yield
    finally:
        accumulate_in_fp16(before)
