"""Muon: the spectrum of its update, its groups and rates, its state, and its agreement with torch's own."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gptfit.config.keys import TrainConfig
from gptfit.config.recipe import adamw_rate
from gptfit.device.device import find_device
from gptfit.model.build import build_model
from gptfit.plan.setting import Setting
from gptfit.schedule import Knobs
from gptfit.shape import ModelShape
from gptfit.train import muon
from gptfit.train.muon import ROUNDS, Muon, make_muon, orthogonalize, update_scale
from gptfit.train.optimizers import turn

TINY = ModelShape(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64, arch="modern")
CONFIG = TrainConfig(
    n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64, arch="modern", optimizer="muon",
    learning_rate=0.02, weight_decay=0.1, device="cpu",
)  # fmt: skip


def make(shape: ModelShape = TINY, config: TrainConfig = CONFIG) -> tuple[torch.nn.Module, Muon]:
    torch.manual_seed(0)
    model = build_model(shape)
    optimizer = make_muon(model, config, find_device(config))
    assert isinstance(optimizer, Muon)
    return model, optimizer


def fill_gradients(model: torch.nn.Module, seed: int = 0) -> None:
    numbers = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=numbers)


@pytest.mark.parametrize("size", [(32, 32), (32, 96), (128, 32)])
def test_the_update_has_all_singular_values_near_one(size: tuple[int, int]) -> None:
    # The rounds are made for everything above a hundredth of the norm.
    u, _, v = torch.linalg.svd(torch.randn(4, *size, generator=torch.Generator().manual_seed(0)), full_matrices=False)
    gradient = u @ torch.diag_embed(torch.logspace(0, -1.7, 32).expand(4, 32)) @ v
    values = torch.linalg.svdvals(orthogonalize(gradient))
    assert values.min() > 0.7
    assert values.max() < 1.3


def test_the_bfloat16_rounds_reach_the_same_spectrum() -> None:
    u, _, v = torch.linalg.svd(torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(0)), full_matrices=False)
    gradient = u @ torch.diag_embed(torch.logspace(0, -1.5, 64).expand(2, 64)) @ v
    values = torch.linalg.svdvals(orthogonalize(gradient.bfloat16()).float())
    assert values.min() > 0.6
    assert values.max() < 1.4


@pytest.mark.parametrize(
    ("dtype", "has_units", "expected"),
    [
        ("float32", True, torch.float32),
        ("bfloat16", True, torch.bfloat16),
        ("bfloat16", False, torch.float32),
        ("float16", True, torch.float32),
    ],
)
def test_on_a_cpu_the_rounds_are_done_in_the_number_format_of_the_run_where_it_has_units(
    monkeypatch: pytest.MonkeyPatch, dtype: str, has_units: bool, expected: torch.dtype
) -> None:
    used = []
    monkeypatch.setattr(muon, "has_bf16", lambda device: has_units)
    monkeypatch.setattr(muon, "orthogonalize", lambda matrices: used.append(matrices.dtype) or matrices)
    model, optimizer = make(config=replace(CONFIG, dtype=dtype))
    fill_gradients(model)
    optimizer.step()
    assert set(used) == {expected}


def test_a_gradient_of_rank_one_does_not_explode() -> None:
    gradient = torch.ones(1, 16, 64) * 1e-12
    values = torch.linalg.svdvals(orthogonalize(gradient))
    assert values.max() < 1.3


def test_the_update_keeps_the_singular_vectors() -> None:
    gradient = torch.randn(1, 24, 48, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(gradient[0], full_matrices=False)
    turned = u.T @ orthogonalize(gradient)[0] @ v.T
    off_diagonal = turned - torch.diag(turned.diagonal())
    assert off_diagonal.abs().max() < 1e-3
    assert turned.diagonal().min() > 0.5


def test_a_zero_gradient_gives_a_zero_update() -> None:
    assert orthogonalize(torch.zeros(2, 8, 16)).abs().max() == 0


def test_scale_makes_a_tall_update_move_outputs_as_much_as_a_square_one() -> None:
    x = torch.randn(256, generator=torch.Generator().manual_seed(0))

    def move(rows: int) -> float:
        numbers = torch.Generator().manual_seed(1)
        update = orthogonalize(torch.randn(1, rows, 256, generator=numbers))[0] * update_scale(rows, 256)
        return float((update @ x).square().mean().sqrt())

    assert move(1024) == pytest.approx(move(256), rel=0.25)


@pytest.mark.parametrize("size", [(32, 32), (128, 32), (32, 128)])
def test_steps_go_where_torchs_own_muon_goes(size: tuple[int, int]) -> None:
    # Other rounds, so other singular values near 1; the direction is the same.
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.randn(size)) for _ in range(2))
    theirs.data.copy_(ours.data)
    gradients = [torch.randn(size) for _ in range(3)]
    muon = Muon([{"params": [ours], "parts": 1, "weight_decay": 0.1}], 0.02, 0.95, (0.9, 0.95))
    reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95)
    start = ours.detach().clone()
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        muon.step()
        reference.step()
    moved, reference_moved = ours.detach() - start, theirs.detach() - start
    assert torch.cosine_similarity(moved.flatten(), reference_moved.flatten(), dim=0) > 0.97
    assert float(moved.norm()) == pytest.approx(float(reference_moved.norm()), rel=0.2)


def test_queries_keys_and_values_are_orthogonalised_apart() -> None:
    model, optimizer = make(config=replace(CONFIG, weight_decay=0.0))
    weight = dict(model.named_parameters())["transformer.h.0.attn.c_attn.weight"]
    before = weight.detach().clone()
    fill_gradients(model)
    optimizer.step()
    step = (before - weight.detach()) / 0.02
    for part in step.chunk(3):
        # As one tall matrix the three would share unit singular values: a third of this each.
        assert torch.linalg.svdvals(part).square().mean() > 0.6


def test_every_parameter_is_in_one_group_and_matrices_alone_get_weight_decay() -> None:
    model, optimizer = make()
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters()}
    assert len(grouped) == len(list(model.parameters()))
    for group in optimizer.param_groups:
        assert group["weight_decay"] == (0.1 if "parts" in group else 0.0)


def test_a_rate_of_its_own_for_embedding_and_head_scales_with_the_schedule() -> None:
    _, optimizer = make(config=replace(CONFIG, embedding_lr=0.2, head_lr=0.01))
    turn(optimizer, Knobs(0.01))
    rates = {group["lr"] for group in optimizer.param_groups}
    assert {round(rate, 9) for rate in rates} == {0.01, 0.1, 0.005, round(adamw_rate("scalar", TINY) / 2, 9)}


def test_state_is_four_bytes_per_matrix_weight_and_eight_for_the_rest() -> None:
    model, optimizer = make()
    fill_gradients(model)
    optimizer.step()
    kinds = {weight.name: weight.kind for weight in TINY.weights()}
    for name, parameter in model.named_parameters():
        tensors = [value for key, value in optimizer.state[parameter].items() if key != "step"]
        expected = 4 if kinds[name] == "matrix" else 8
        assert sum(tensor.nbytes for tensor in tensors) == expected * parameter.numel(), name


def test_a_loaded_state_continues_exactly() -> None:
    model, optimizer = make()
    for seed in range(3):
        fill_gradients(model, seed)
        optimizer.step()
    twin = copy.deepcopy(model)
    twin_optimizer = make_muon(twin, CONFIG, find_device(CONFIG))  # type: ignore[arg-type]
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, other in ((model, optimizer), (twin, twin_optimizer)):
        fill_gradients(one, 9)
        other.step()
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_the_state_of_before_the_first_step_can_be_loaded() -> None:
    model, optimizer = make()
    fresh = copy.deepcopy(optimizer.state_dict())
    fill_gradients(model, 1)
    optimizer.step()
    optimizer.load_state_dict(fresh)
    optimizer.step()
    assert all(bool(optimizer.state[p]) for p in model.parameters())


def test_muon_trains_nanogpts_gpt2_too() -> None:
    shape = replace(TINY, arch="gpt2", bias=True)
    model, optimizer = make(shape, replace(CONFIG, arch="gpt2", bias=True))
    idx = torch.arange(17).repeat(4, 1) % 11
    losses: list[Tensor] = []
    for _ in range(30):
        loss = model(idx[:, :-1], idx[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert losses[-1] < 0.3 * losses[0]


def test_plan_counts_the_rounds_that_are_done() -> None:
    assert Setting.muon_rounds == len(ROUNDS)
