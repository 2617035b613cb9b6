"""What to change when even a micro-batch of 1 does not fit, from the plan's memory model."""

from __future__ import annotations

from dataclasses import replace

from gptfit.config import TrainConfig
from gptfit.plan.memory import predict
from gptfit.plan.setting import Setting
from gptfit.run.device import Device
from gptfit.shape import ModelShape
from gptfit.units import gib


def out_of_memory_advice(config: TrainConfig, shape: ModelShape, device: Device, micro_batch: int) -> str:
    """One line: what was tried, what the plan says is needed, and the change that saves most."""
    setting = Setting(
        shape=shape,
        micro_batch=micro_batch,
        dtype=device.dtype,
        compile=config.compile,
        chunked_loss=bool(config.chunked_loss is True),
        checkpoint_activations=config.checkpoint_activations,
        optimizer=config.optimizer,
    )
    needed = predict(setting).allocated.value
    line = f"out of memory with a micro-batch of {micro_batch}: about {gib(needed)} are needed"
    ways = {
        "--checkpoint_activations=True": replace(setting, checkpoint_activations=True),
        "--chunked_loss=True": replace(setting, chunked_loss=True),
        f"--block_size={config.block_size // 2}": replace(
            setting, shape=replace(shape, block_size=max(1, config.block_size // 2))
        ),
        f"--n_layer={max(1, config.n_layer // 2)}": replace(
            setting, shape=replace(shape, n_layer=max(1, config.n_layer // 2))
        ),
    }
    if micro_batch > 1:
        ways[f"--batch_size={micro_batch // 2}"] = replace(setting, micro_batch=micro_batch // 2)
    best = min(ways, key=lambda way: predict(ways[way]).allocated.value)
    return f"{line}; {best} brings it to about {gib(predict(ways[best]).allocated.value)}"
