"""Torch's random streams: set from (seed, step), or saved and put back."""

from __future__ import annotations

import torch
from torch import Tensor

from gptfit.device.device import Device
from gptfit.train.order import mix

RngState = dict[str, Tensor]


def seed_step(seed: int, step: int, rank: int, device: Device) -> None:
    """Dropout of a step as a function of (seed, step, rank), so that a resumed run needs no saved stream."""
    device.seed(mix(mix(seed, step), rank) & 0x7FFF_FFFF_FFFF_FFFF)


def rng_state(device: Device) -> RngState:
    state = {"cpu": torch.get_rng_state()}
    if device.kind == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device.torch_device)
    return state


def set_rng_state(state: RngState, device: Device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.kind == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device.torch_device)
