"""What a block keeps for backward, counted from the graph behind its result."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gptfit.device.device import Device
from gptfit.model.build import build_model
from gptfit.model.modern import NO_VALUES
from gptfit.model.rotary import rotary_tables
from gptfit.plan.step_work import block_weights
from gptfit.shape import ModelShape

HEAD, POSITIONS = 64, 128
EAGER_AT = (2, 128)  # micro-batch and width; bytes per token and channel are the same at all
COMPILED_AT = (8, 256)  # as the check of compiled models has compiled a block
ARCHITECTURES = ("gpt2", "modern")
# Of the bytes that an eager block keeps in 16 bits; counted in the format that blocks are compiled in.
COMPILED_KEEPS = {"gpt2": 0.94, "modern": 0.80}


def kept_bytes(device: Device, compiled: bool) -> dict[str, float]:
    """Per token and channel of a block, by way to run it; `compiled`: counted of compiled blocks, too."""
    found = {}
    for arch in ARCHITECTURES:
        eager = _kept(device, arch, *EAGER_AT, False)
        found[f"{arch} {device.dtype} eager"] = eager
        found[f"{arch} {device.dtype} compiled"] = (
            _kept(device, arch, *COMPILED_AT, True) if compiled else eager * COMPILED_KEEPS[arch]
        )
    return found


def _kept(device: Device, arch: str, rows: int, width: int, compiled: bool) -> float:
    shape = ModelShape(1, max(1, width // HEAD), width, POSITIONS, 64, arch=arch)
    model = build_model(shape).to(device.torch_device)
    (block,) = model.transformer["h"].children()
    if compiled:
        block.compile(dynamic=False)
    x = torch.randn(rows, POSITIONS, width).to(device.torch_device).requires_grad_()
    tables = rotary_tables(0, POSITIONS, HEAD, device.torch_device)
    with device.autocast():
        y = block(x, *((None, NO_VALUES, tables) if arch == "modern" else ()))
    copies = 0 if device.dtype == "float32" else 2 * block_weights(shape)  # in 16 bits, counted elsewhere
    return (saved_bytes(y, model.parameters()) - copies) / (rows * POSITIONS * width)


def saved_bytes(result: Tensor, parameters: Iterable[Tensor]) -> int:
    """Of every tensor that the graph behind `result` keeps, each storage once, the parameters not."""
    own = {p.untyped_storage().data_ptr() for p in parameters}
    kept: dict[int, int] = {}
    seen: set[Any] = set()
    waiting: list[Any] = [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for tensor in _saved_by(node):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
        waiting += [after for after, _ in node.next_functions]
    return sum(kept.values())


def _saved_by(node: Any) -> list[Tensor]:
    if hasattr(node, "saved_tensors"):  # a function of our own, or compiled code
        return [tensor for tensor in node.saved_tensors if isinstance(tensor, Tensor)]
    values = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    return [value for value in values if isinstance(value, Tensor)]
