"""Gradients and optimizer state made before the first micro-step and kept: the same weights, at the same addresses."""

from __future__ import annotations

import pytest
import torch

from gptfit.config.keys import TrainConfig
from gptfit.device.device import find_device
from gptfit.schedule import Knobs
from gptfit.train.engine import Engine, build_engine


def engine_of(keeps_gradients: bool, **keys: object) -> Engine:
    torch.manual_seed(0)
    config = TrainConfig(
        n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64, batch_size=2, gradient_accumulation_steps=2,
        device="cpu", dtype="float32", compile=False,
    ).replace(**keys)  # fmt: skip
    engine = build_engine(config, config.shape(), find_device(config))
    engine.parallel.keeps_gradients = keeps_gradients
    return engine


def updates(engine: Engine, count: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        for _ in range(2):
            ids = torch.randint(64, (2, 17), generator=generator)
            engine.backward_micro_step(engine.forward_micro_step((ids[:, :-1], ids[:, 1:]), is_last=False), 2)
        engine.update(torch.ones(()), 2, Knobs(1e-3))


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"arch": "modern", "optimizer": "muon"},
        {"optimizer_state": "8bit"},
        {"gradient_dtype": "bfloat16", "dtype": "bfloat16"},
    ],
    ids=["adamw", "muon", "8bit", "16-bit gradients"],
)
def test_kept_gradients_train_to_the_same_weights_bit_for_bit(keys: dict[str, object]) -> None:
    usual, kept = (engine_of(keeps, **keys) for keeps in (False, True))
    updates(usual, 3)
    updates(kept, 3)
    for expected, found in zip(usual.model.parameters(), kept.model.parameters(), strict=True):
        assert torch.equal(expected, found)


def test_gradients_and_state_are_there_before_the_first_forward_and_stay_in_place() -> None:
    engine = engine_of(keeps_gradients=True)
    seen: list[bool] = []

    def look(*_: object) -> None:
        parameters = list(engine.model.parameters())
        seen.append(all(p.grad is not None and "exp_avg" in engine.optimizer.state[p] for p in parameters))

    engine.model.register_forward_pre_hook(look)
    updates(engine, 1)
    assert seen == [True, True]
    before = [p.grad.data_ptr() for p in engine.model.parameters() if p.grad is not None]
    updates(engine, 2)
    assert [p.grad.data_ptr() for p in engine.model.parameters() if p.grad is not None] == before


def test_without_accumulation_and_on_a_cpu_only_gradients_of_tables_are_kept() -> None:
    engine = engine_of(keeps_gradients=False)
    assert not build_engine(engine.config, engine.config.shape(), engine.device).parallel.keeps_gradients
    updates(engine, 1)
    assert all(p.grad is None for p in engine.model.parameters() if p not in engine.parallel.kept_tables)
