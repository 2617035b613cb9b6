"""Optimizers: one entry per name; each takes the model and the config and returns a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gptfit.config.keys import TrainConfig
from gptfit.device.device import Device
from gptfit.device.processes import ALONE, Processes
from gptfit.model.base import LanguageModel
from gptfit.schedule import Knobs
from gptfit.train.kept_state import KeptStateOptimizer
from gptfit.train.muon import Muon, make_muon

Parameters = Mapping[str, nn.Parameter]
Maker = Callable[[LanguageModel, TrainConfig, Device, Processes, Parameters], "AdamW | Muon"]


def make_optimizer(
    model: LanguageModel,
    config: TrainConfig,
    device: Device,
    processes: Processes = ALONE,
    parameters: Parameters | None = None,
) -> AdamW | Muon | KeptStateOptimizer:
    """The optimizer named by `config.optimizer`, its state kept as the config says.

    `parameters`, by name: the parts this process has of a divided model, else the model's own.
    """
    named = dict(model.named_parameters()) if parameters is None else parameters
    optimizer = MAKERS[config.optimizer](model, config, device, processes, named)
    is_8bit, is_on_host = config.optimizer_state == "8bit", config.optimizer_device == "cpu"
    if not is_8bit and not is_on_host and config.gradient_dtype == "float32":
        return optimizer
    return KeptStateOptimizer(optimizer, device, is_8bit, is_on_host)


def set_gradient_dtype(model: LanguageModel, config: TrainConfig) -> None:
    """16-bit gradients for the blocks' matrices only: a row of an embedding is a sum over few tokens among many."""
    if config.gradient_dtype == "float32":
        return
    parameters = dict(model.named_parameters())
    for weight in model.shape.weights():
        if weight.kind == "matrix":
            parameters[weight.name].grad_dtype = torch.bfloat16


def turn(optimizer: Optimizer, knobs: Knobs) -> None:
    """A group with an `lr_scale` of its own runs at that multiple of the schedule; `parts` are Muon's matrices."""
    for group in optimizer.param_groups:
        if "parts" in group and knobs.momentum is not None:
            group["momentum"], group["decay_share"] = knobs.momentum, knobs.decay_share
        scaled = knobs.rate * group.get("lr_scale", 1.0)
        group["lr"] = scaled


def decay_groups(named: Parameters, weight_decay: float) -> list[dict[str, Any]]:
    """nanoGPT's two groups in its order, so that optimizer states load both ways: decay on tensors of 2+ dimensions."""
    parameters = [p for p in named.values() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


class AdamW(torch.optim.AdamW):
    """torch's, with all state made before the first weight moves: running out of memory leaves no update half done."""

    def step(self, closure: Any = None) -> Any:
        self.make_state()
        return super().step(closure)

    def make_state(self) -> None:
        for group in self.param_groups:
            self._init_group(group, [], [], [], [], [], [])  # type: ignore[no-untyped-call]


def _adamw(_: LanguageModel, config: TrainConfig, device: Device, __: Processes, named: Parameters) -> AdamW:
    return AdamW(
        decay_groups(named, config.weight_decay),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=device.kind in ("cpu", "cuda"),  # one pass over the weights instead of about ten
    )


# One for each row of config/optimizer_facts.py.
MAKERS: dict[str, Maker] = {"adamw": _adamw, "muon": make_muon}
