"""The device at hand as the place a setting is resolved for, and the setting a run really has there."""

from __future__ import annotations

from dataclasses import replace

from gptfit.config.keys import TrainConfig
from gptfit.device.device import Device
from gptfit.plan.resolve import Place, setting_of
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape


def place_of(device: Device, can_compile: bool = True) -> Place:
    """What this process holds counts as free: its context is there already, its tensors are part of what is planned."""
    return Place(device.kind, device.dtype, device.free_memory_bytes() + device.held_bytes(), can_compile)


def setting_at(
    config: TrainConfig,
    shape: ModelShape,
    device: Device,
    micro_batch: int,
    compiled: bool,
    chunked: bool,
    processes: int = 1,
) -> Setting:
    """As it runs now, whatever the config left open or memory took away."""
    planned = setting_of(config, shape, place_of(device, compiled), processes)
    return replace(planned, micro_batch=micro_batch, compile=compiled, chunked_loss=chunked)
