"""Gradients of look-ups added up in place, row by row, beside the dense ones that autograd makes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from gptfit.config.keys import TrainConfig
from gptfit.device.device import find_device
from gptfit.model.tables import Table
from gptfit.schedule import Knobs
from gptfit.train.engine import Engine, build_engine

ROWS, WIDTH = 40, 8


def tables() -> tuple[Table, nn.Embedding]:
    torch.manual_seed(0)
    ours, plain = Table(ROWS, WIDTH), nn.Embedding(ROWS, WIDTH)
    plain.load_state_dict(ours.state_dict())
    ours.keep_gradient()
    return ours, plain


def learn(table: nn.Embedding, ids: torch.Tensor) -> None:
    (table(ids) * torch.linspace(-1, 1, WIDTH)).square().sum().backward()


@pytest.mark.parametrize("ids", [[[1, 2, 1], [39, 1, 2]], [list(range(ROWS))]], ids=["few rows", "all rows"])
def test_two_look_ups_add_up_to_what_autograd_finds(ids: list[list[int]]) -> None:
    ours, plain = tables()
    for table in (ours, plain):
        learn(table, torch.tensor(ids))
        learn(table, torch.tensor([[7, 7, 2]]))
    assert ours.weight.grad is not None
    assert plain.weight.grad is not None
    assert torch.allclose(ours.weight.grad, plain.weight.grad, rtol=1e-6)
    rows = ours.gradient_rows()
    assert rows is not None
    assert float(rows.norm()) == pytest.approx(float(plain.weight.grad.norm()), rel=1e-6)


def test_a_forgotten_gradient_is_zero_everywhere_and_stays_where_it_was() -> None:
    ours, plain = tables()
    learn(ours, torch.tensor([[1, 2, 1]]))
    assert ours.weight.grad is not None
    place = ours.weight.grad.data_ptr()
    ours.weight.grad[2, 3] = math.nan  # as where a number overflowed
    ours.forget_gradient()
    assert not ours.weight.grad.any()
    for table in (ours, plain):
        learn(table, torch.tensor([[5, 2]]))
    assert ours.weight.grad.data_ptr() == place
    assert torch.equal(ours.weight.grad, plain.weight.grad)
    rows = ours.gradient_rows()
    assert rows is not None
    assert len(rows) == 2


def engine_of(**keys: object) -> Engine:
    torch.manual_seed(0)
    config = TrainConfig(
        n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=300, batch_size=2, gradient_accumulation_steps=2,
        device="cpu", dtype="float32", compile=False, arch="modern", optimizer="muon", value_embeddings="tables",
        bigram=True,
    ).replace(**keys)  # fmt: skip
    return build_engine(config, config.shape(), find_device(config))


def as_autograd_does(engine: Engine) -> Engine:
    for table in engine.parallel.kept_tables.values():
        table.fetch = table.touched = None
    engine.parallel.kept_tables = {}
    return engine


def test_every_table_but_a_tied_one_is_kept() -> None:
    assert len(engine_of().parallel.kept_tables) == 3  # the embedding, one of the values, pairs
    tied = engine_of(arch="gpt2", optimizer="adamw", value_embeddings="none", bigram=False)
    assert list(tied.parallel.kept_tables.values()) == [tied.model.transformer["wpe"]]


def micro_step(engine: Engine, generator: torch.Generator) -> None:
    ids = torch.randint(300, (2, 17), generator=generator)
    engine.backward_micro_step(engine.forward_micro_step((ids[:, :-1], ids[:, 1:]), is_last=False), 2)


@pytest.mark.parametrize("clip", [0.0, 0.05], ids=["not clipped", "clipped"])
def test_training_is_the_same_as_with_dense_gradients(clip: float) -> None:
    """Also after a step that was given up, one whose numbers were not finite, and where not all tokens count."""
    engines = engine_of(grad_clip=clip), as_autograd_does(engine_of(grad_clip=clip))
    norms: list[list[float]] = [[], []]
    for engine, seen in zip(engines, norms, strict=True):
        generator = torch.Generator().manual_seed(1)
        for counted in (None, torch.tensor(1.4), None):
            micro_step(engine, generator)
            engine.forget_gradients()
            for _ in range(2):
                micro_step(engine, generator)
            assert not engine.update(torch.tensor(math.inf), 2, Knobs(1e-3)).applied
            for _ in range(2):
                micro_step(engine, generator)
            seen.append(engine.update(torch.ones(()), 2, Knobs(1e-3), counted).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    for ours, dense in zip(*(engine.model.parameters() for engine in engines), strict=True):
        assert torch.allclose(ours, dense, rtol=1e-4, atol=1e-6)
