"""The plan's count of activations, logits and state against torch's own memory tracker, on fake tensors."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F

from gptfit.config.keys import TrainConfig
from gptfit.config.optimizer_facts import OPTIMIZERS
from gptfit.device.device import find_device
from gptfit.model.build import build_model
from gptfit.model.gpt2 import GPT2
from gptfit.plan import memory
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape
from gptfit.train.engine import CHUNK_TOKENS
from gptfit.train.optimizers import MAKERS, make_optimizer
from gptfit.units import MIB


def tracked_peak_mib(setting: Setting) -> float:
    """Two updates of an eager bf16 run with AdamW: every tensor is counted, no number is computed."""
    shape = setting.shape
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracker's own use of deprecated hooks
        model = GPT2(shape, checkpoint_activations=setting.checkpoint_activations)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids = torch.zeros(setting.micro_batch, shape.block_size, dtype=torch.long)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, ids)
        with tracker:
            for _ in range(2):
                for _ in range(setting.accumulation):
                    _micro_step(model, ids)
                    tracker.reset_mod_stats()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        peak = tracker.get_tracker_snapshot("peak")
    return sum(device["Total"] for device in peak.values()) / MIB


def _micro_step(model: GPT2, ids: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model.logits(ids)  # alive until backward is done, as nanoGPT returns them
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
    loss.backward()


@pytest.mark.parametrize(
    "setting",
    [
        Setting(ModelShape(2, 12, 768, 1024, 50304), 8, 2, compile=False, logits="returned"),
        Setting(ModelShape(2, 12, 768, 1024, 50304), 8, 1, compile=False, logits="returned"),
        Setting(ModelShape(2, 6, 384, 256, 256), 64, 2, compile=False, logits="returned"),
        Setting(ModelShape(3, 6, 384, 1024, 256), 16, 2, compile=False, checkpoint_activations=True, logits="returned"),
    ],
    ids=["large vocabulary", "a single micro-step", "small vocabulary", "checkpointed"],
)
def test_eager_memory_is_within_six_percent_of_the_tracker(setting: Setting) -> None:
    predicted = memory.predict(setting).allocated.value / MIB
    assert predicted == pytest.approx(tracked_peak_mib(setting), rel=0.06)


def test_every_optimizer_has_its_facts_and_its_code() -> None:
    assert set(MAKERS) == set(OPTIMIZERS)


@pytest.mark.parametrize(("arch", "optimizer"), [*(("gpt2", name) for name in OPTIMIZERS), ("modern", "muon")])
def test_optimizer_state_has_the_planned_bytes(arch: str, optimizer: str) -> None:
    config = TrainConfig(n_layer=2, n_head=2, n_embd=64, vocab_size=128, arch=arch, optimizer=optimizer, device="cpu")
    shape = config.shape()
    model = build_model(shape)
    trained = make_optimizer(model, config, find_device(config))
    ids = torch.zeros(2, 16, dtype=torch.long)
    model(ids, ids).backward()
    trained.step()
    tensors = [value for state in trained.state.values() for value in state.values() if torch.is_tensor(value)]
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.dim())
    assert held == pytest.approx(memory.state_bytes(Setting(shape, 1, optimizer=optimizer)), rel=0.01)


def test_the_plan_and_the_run_cut_the_loss_into_equal_chunks() -> None:
    assert memory.FITTED.chunk_tokens == CHUNK_TOKENS
