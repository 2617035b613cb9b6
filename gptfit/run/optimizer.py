"""Optimizers: one entry per name; each takes the model and the config and returns a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from gptfit.config import TrainConfig
from gptfit.errors import ConfigError
from gptfit.model.base import LanguageModel
from gptfit.run.device import Device
from gptfit.run.muon import make_muon

Maker = Callable[[LanguageModel, TrainConfig, Device], Optimizer]


def make_optimizer(model: LanguageModel, config: TrainConfig, device: Device) -> Optimizer:
    """The optimizer named by `config.optimizer`."""
    return OPTIMIZERS[config.optimizer](model, config, device)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """A group with an `lr_scale` of its own runs at that multiple of the schedule."""
    for group in optimizer.param_groups:
        scaled = rate * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(scaled)  # torchao's optimizers refuse any other object than their own
        else:
            group["lr"] = scaled


def decay_groups(model: LanguageModel, weight_decay: float) -> list[dict[str, Any]]:
    """nanoGPT's two groups in its order, so that optimizer states load both ways: decay on tensors of 2+ dimensions."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


class AdamW(torch.optim.AdamW):
    """torch's, with all state made before the first weight moves: memory that runs out then costs no half of a step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            self._init_group(group, [], [], [], [], [], [])  # type: ignore[no-untyped-call]
        return super().step(closure)


def _adamw(model: LanguageModel, config: TrainConfig, device: Device) -> Optimizer:
    return AdamW(
        decay_groups(model, config.weight_decay),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=device.kind in ("cpu", "cuda"),  # one pass over the weights instead of about ten
    )


def _adamw8bit(model: LanguageModel, config: TrainConfig, device: Device) -> Optimizer:
    """States in 8 bits with one scale per block: torchao's, which needs a recent NVIDIA card."""
    if device.kind != "cuda":
        raise ConfigError(
            f"optimizer = 'adamw8bit' needs an NVIDIA card, this is a {device.kind}; use adamw", "optimizer"
        )
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        raise ConfigError(
            "optimizer = 'adamw8bit' needs torchao; pip install torchao, or use adamw", "optimizer"
        ) from None
    groups = decay_groups(model, config.weight_decay)
    optimizer: Optimizer = AdamW8bit(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2))
    return optimizer


OPTIMIZERS: dict[str, Maker] = {"adamw": _adamw, "muon": make_muon, "adamw8bit": _adamw8bit}
