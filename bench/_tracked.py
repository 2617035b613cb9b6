"""Peak bytes of a training step, every tensor counted by torch's own tracker while nothing is computed."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from gptfit.config.keys import TrainConfig
from gptfit.device.device import find_device
from gptfit.model import head
from gptfit.train.engine import Engine, build_engine
from gptfit.train.kept_state import KeptStateOptimizer

UPDATES = 2  # state exists from the first on, so the second has the peak


def device_peak(config: TrainConfig) -> int:
    """Of `config` run eagerly as it would be on a card; what its last rungs keep in host memory is taken off."""
    before = head.CPU_ROWS_PER_SOFTMAX, nn.Module.to
    head.CPU_ROWS_PER_SOFTMAX = head.CARD_ROWS_PER_SOFTMAX
    nn.Module.to = lambda self, *args, **kwargs: self  # type: ignore[method-assign]  # fake tensors are where they are
    try:
        with FakeTensorMode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tracker's own use of deprecated hooks
            return _peak(config)
    finally:
        head.CPU_ROWS_PER_SOFTMAX, nn.Module.to = before  # type: ignore[method-assign]


def _peak(config: TrainConfig) -> int:
    engine = build_engine(config, config.shape(), find_device(config))
    for table in () if engine.model.tables_on_host else engine.model.tables():
        table.fetch = None  # on a card autograd makes their gradients
    ids = torch.zeros(config.batch_size, config.block_size, dtype=torch.long)
    tracker = MemTracker()
    tracker.track_external(engine.model, engine.optimizer, ids)
    with tracker:
        for _ in range(UPDATES):
            for micro in range(config.gradient_accumulation_steps):
                _micro_step(engine, ids, micro + 1 == config.gradient_accumulation_steps)
                tracker.reset_mod_stats()
            engine.optimizer.step()
            engine.optimizer.zero_grad(set_to_none=True)
    peak: dict[Any, dict[Any, int]] = tracker.get_tracker_snapshot("peak")
    return sum(device["Total"] for device in peak.values()) - host_bytes(engine)


def _micro_step(engine: Engine, ids: torch.Tensor, is_last: bool) -> None:
    """In a function of its own, so that the loss and its graph end with it."""
    loss = engine.forward_micro_step((ids, ids), is_last)
    engine.backward_micro_step(loss, engine.config.gradient_accumulation_steps)


def host_bytes(engine: Engine) -> int:
    """State that is kept in host memory, and tables with their gradients and state; on a CPU all of it is in one place."""
    optimizer, total = engine.optimizer, 0
    if engine.model.tables_on_host:
        away = {*(table.weight for table in engine.model.tables()), engine.model.lm_head.weight}
        total += sum(2 * weight.nbytes for weight in away)  # the gradient is as large
        if not isinstance(optimizer, KeptStateOptimizer):
            states = [value for weight in away for value in optimizer.state[weight].values()]
            total += sum(value.nbytes for value in states if isinstance(value, torch.Tensor))
    if isinstance(optimizer, KeptStateOptimizer) and optimizer.is_on_host:
        total += optimizer.kept_bytes()
    return total
