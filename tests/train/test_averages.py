"""Looking ahead along the average update, and the average of the weights at the end: exact, undone, kept and used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptfit.checkpoint.format import load_checkpoint
from gptfit.checkpoint.loaded_model import open_model
from gptfit.config.keys import TrainConfig, find_problems
from gptfit.device.device import Device, find_device
from gptfit.model.build import build_model
from gptfit.plan import memory
from gptfit.plan.setting import Setting
from gptfit.schedule import knobs
from gptfit.shape import ModelShape
from gptfit.train.engine import Engine, build_engine
from gptfit.train.lookahead import AVERAGE, LookAhead
from gptfit.train.lookahead import memory as remembered
from gptfit.train.muon import Muon, make_muon
from gptfit.train.optimizers import turn
from gptfit.train.tail_average import TailAverage
from gptfit.train.train import train
from tests.generate.test_evaluate import make_byte_run

MakeConfig = Callable[..., TrainConfig]
MODERN: dict[str, Any] = {
    "arch": "modern",
    "optimizer": "muon",
    "schedule": "wsd",
    "learning_rate": 0.02,
    "min_lr": 0.0,
}
TINY = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 64, "device": "cpu", "max_iters": 100}


def tiny_muon(**changes: Any) -> tuple[TrainConfig, Muon, list[torch.Tensor]]:
    config = TrainConfig(**TINY | MODERN | changes)
    torch.manual_seed(0)
    optimizer = make_muon(build_model(config.shape()), config, find_device(config))
    turn(optimizer, knobs(config.replace(warmup_iters=0), 0))
    matrices = [p for group in optimizer.param_groups if "parts" in group for p in group["params"]]
    return config, optimizer, matrices


def set_gradients(optimizer: Muon, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.grad = torch.randn(p.shape, generator=generator)


def test_the_weights_follow_the_published_recursion() -> None:
    """x' = A(x + share m), m' = beta m + (1 - beta)(x' - x): EMA-Nesterov, modded-nanogpt's pull request 308."""
    config, optimizer, (p, *_) = tiny_muon()
    ahead, beta, share = LookAhead(optimizer, config.max_iters), 1 - 1 / remembered(config.max_iters), 0.6
    m = torch.zeros_like(p)
    for step in range(4):
        x = p.detach().clone()
        ahead.go(share)
        torch.testing.assert_close(p.detach(), x + share * m, atol=1e-7, rtol=0)
        set_gradients(optimizer, step)
        optimizer.step()
        ahead.settle()
        m = beta * m + (1 - beta) * (p.detach() - x)
        torch.testing.assert_close(optimizer.state[p][AVERAGE], m, atol=1e-7, rtol=0)
    assert m.abs().max() > 1e-4


def test_a_step_that_is_given_up_leaves_the_weights_as_they_were_bit_for_bit() -> None:
    config, optimizer, matrices = tiny_muon()
    ahead = LookAhead(optimizer, config.max_iters)
    ahead.go(0.6)
    set_gradients(optimizer, 1)
    optimizer.step()
    ahead.settle()
    before = [p.detach().clone() for p in matrices]
    ahead.go(0.6)
    assert not torch.equal(matrices[0], before[0])
    ahead.come_back()
    assert all(torch.equal(p, old) for p, old in zip(matrices, before, strict=True))


def test_it_looks_ahead_in_the_middle_of_the_run_in_proportion_to_the_rate() -> None:
    config = TrainConfig(max_iters=3125, lr_decay_iters=3125, warmup_iters=0, decay_fraction=0.7, lookahead=0.6,
                         **MODERN)  # fmt: skip
    shares = {step: knobs(config, step).lookahead for step in (499, 500, 900, 2000, 2400)}
    assert shares[499] == shares[2400] == 0
    assert shares[500] == shares[900] == 0.6
    assert shares[2000] == pytest.approx(0.6 * 1125 / (0.7 * 3125))
    assert remembered(3125) == pytest.approx(100)
    problems = find_problems({**config.as_dict(), "optimizer_state": "8bit"})
    assert "lookahead" in problems[0].message


def test_the_average_is_the_mean_of_the_weights_and_is_there_for_the_time_it_is_wanted() -> None:
    model = build_model(ModelShape(1, 1, 8, 8, 16))
    tail, seen = TailAverage(dict(model.named_parameters())), []
    for number in range(3):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(number + 0.5)
        seen.append([p.detach().clone() for p in model.parameters()])
        tail.include()
    with tail.in_place():
        inside = [p.detach().clone() for p in model.parameters()]
    for now, mean, last, *each in zip(inside, model.parameters(), seen[-1], *seen, strict=True):
        torch.testing.assert_close(now, sum(each) / 3)
        assert torch.equal(mean, last)


def test_memory_that_runs_out_where_the_tail_begins_does_no_update_twice(
    small_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first copy was made after the weights had moved, and the step was tried again."""
    common = {**MODERN, "average_tail": 0.5, "batch_size": 4, "gradient_accumulation_steps": 1}
    train(small_config(out_dir=str(tmp_path / "whole"), **common))
    original, calls = TailAverage.make_room, [0]

    def limited(self: TailAverage) -> None:
        calls[0] += 1
        if calls[0] == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        original(self)

    monkeypatch.setattr(TailAverage, "make_room", limited)
    assert train(small_config(out_dir=str(tmp_path / "shrunk"), **common)).micro_batch == 2
    whole, shrunk = (load_checkpoint(tmp_path / name) for name in ("whole", "shrunk"))
    assert whole.averaged == shrunk.averaged == 4
    for name, tensor in whole.average.items():
        torch.testing.assert_close(shrunk.average[name], tensor, rtol=1e-3, atol=1e-4)


def test_tables_stay_where_their_average_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a table that went to the host in the tail, the average would be on the card."""
    config = TrainConfig(**TINY | MODERN, average_tail=0.5, compile=False)
    engine = build_engine(config, config.shape(), find_device(config))
    monkeypatch.setattr(Device, "kind", "cuda")
    engine.tail.make_room()
    assert not engine.move_tables_to_host()
    engine.tail.forget()
    monkeypatch.setattr(Device, "pinned", lambda self, tensor: tensor)
    monkeypatch.setattr(Engine, "_renew_optimizer", lambda self, **changes: None)
    assert engine.move_tables_to_host()


def test_what_is_evaluated_sampled_and_exported_is_the_average(small_config: MakeConfig, tmp_path: Path) -> None:
    data = str(make_byte_run(tmp_path / "bytes", 60) / "data")
    out = tmp_path / "run"
    result = train(small_config(out_dir=str(out), dataset=data, **MODERN, average_tail=0.5))
    saved = load_checkpoint(out / "ckpt.pt")
    assert saved.averaged == 4
    assert saved.average.keys() == saved.model.keys()
    assert any(not torch.equal(saved.average[name], tensor) for name, tensor in saved.model.items())
    opened = open_model(str(out / "ckpt.pt"), device="cpu")
    assert all(torch.equal(tensor, saved.average[name]) for name, tensor in opened.model.state_dict().items())
    measure = {"init_from": str(out / "ckpt.pt"), "out_dir": str(tmp_path / "measured"), "eval_only": True}
    assert train(small_config(dataset=data, **MODERN, **measure)).val_loss == pytest.approx(result.val_loss, rel=1e-6)


def test_plan_counts_the_copies() -> None:
    shape = ModelShape(2, 2, 32, 16, 64, arch="modern")
    plain, averaged, ahead = (
        memory.state_bytes(Setting(shape, 1, optimizer="muon", **changes))
        for changes in ({}, {"average_tail": 0.2}, {"lookahead": 0.6})
    )
    assert averaged - plain == 4 * shape.n_weights
    assert ahead - plain == 8 * sum(weight.size for weight in shape.weights() if weight.kind == "matrix")
