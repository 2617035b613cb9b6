"""arch='modern': the inventory, causality, relative positions, and every ingredient by its switch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gptfit.config.keys import INGREDIENTS, TrainConfig
from gptfit.model.build import build_model
from gptfit.model.cache import KVCache
from gptfit.model.head import soft_cap, token_loss
from gptfit.model.modern import Modern
from gptfit.model.rotary import rotary_tables, rotate
from gptfit.shape import ModelShape

TINY = ModelShape(n_layer=3, n_head=2, n_embd=32, block_size=16, vocab_size=64, arch="modern")
# One switch at a time away from the default, and the whole way back.
SWITCHED: list[dict[str, object]] = [
    {"positions": "learned"},
    {"norm": "layer"},
    {"qk_norm": False},
    {"activation": "gelu"},
    {"zero_init": True},
    {"tied_head": True},
    {"smear": False},
    {"value_residual": True},
    {"layer_scalars": True},
    {"logit_softcap": 5.0},
    {"value_embeddings": "tables"},
    {"value_embeddings": "projections"},
    {"bigram": True},
    {"qk_scale": 1.2},
    {"mlp_init": 0.4},
    {"backout": True},
    {"smear_gate": True},
]
EVERYTHING = {key: value for changes in SWITCHED for key, value in changes.items()}


def scrambled(shape: ModelShape, seed: int = 0) -> Modern:
    """No weight at its initial zero or one, so that every path carries something."""
    torch.manual_seed(seed)
    model = build_model(shape)
    assert isinstance(model, Modern)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def tokens(rows: int = 2, seed: int = 1) -> Tensor:
    return torch.randint(64, (rows, 16), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("changes", [{}, *SWITCHED, EVERYTHING], ids=lambda changes: "-".join(changes) or "default")
def test_the_inventory_names_every_tensor_of_the_model(changes: dict[str, object]) -> None:
    shape = replace(TINY, **changes)  # type: ignore[arg-type]
    with torch.device("meta"):
        model = build_model(shape)
    found = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    assert sorted(found) == sorted((weight.name, weight.shape) for weight in shape.weights())


def test_every_ingredient_is_tested_by_its_switch() -> None:
    assert set(EVERYTHING) == set(INGREDIENTS)


def test_config_and_shape_agree_on_the_default_ingredients() -> None:
    assert {key: getattr(TrainConfig(), key) for key in INGREDIENTS} == {key: getattr(TINY, key) for key in INGREDIENTS}


@pytest.mark.parametrize("changes", [{}, *SWITCHED, EVERYTHING], ids=lambda changes: "-".join(changes) or "default")
@torch.inference_mode()
def test_logits_do_not_depend_on_future_tokens(changes: dict[str, object]) -> None:
    model = scrambled(replace(TINY, **changes))  # type: ignore[arg-type]
    idx = tokens()
    other = idx.clone()
    other[:, 9:] = (other[:, 9:] + 1) % 64
    before, after = model.logits(idx), model.logits(other)
    torch.testing.assert_close(before[:, :9], after[:, :9], atol=1e-6, rtol=0)
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-3)


@pytest.mark.parametrize("changes", [{}, *SWITCHED], ids=lambda changes: "-".join(changes) or "default")
def test_every_switch_changes_what_the_model_computes_or_how_it_starts(changes: dict[str, object]) -> None:
    def logits_and_start(shape: ModelShape) -> tuple[Tensor, float]:
        torch.manual_seed(0)
        start = build_model(shape)
        return scrambled(shape).logits(tokens()), sum(float(p.detach().abs().sum()) for p in start.parameters())

    logits, start = logits_and_start(TINY)
    switched_logits, switched_start = logits_and_start(replace(TINY, **changes))  # type: ignore[arg-type]
    differs = not torch.allclose(logits, switched_logits, atol=1e-3) or abs(start - switched_start) > 1
    assert differs == bool(changes)


def test_rotary_products_depend_on_the_distance_only() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 16), torch.randn(1, 16)

    def product(q_at: int, k_at: int) -> float:
        turned_q = rotate(q, *rotary_tables(q_at, 1, 16, q.device))
        turned_k = rotate(k, *rotary_tables(k_at, 1, 16, k.device))
        return float((turned_q * turned_k).sum())

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-3)


def test_rotary_keeps_lengths() -> None:
    x = torch.randn(3, 50, 16)
    turned = rotate(x, *rotary_tables(0, 50, 16, x.device))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize(("zero_init", "nearly"), [(True, 1e-5), (False, 0.1)])
def test_the_first_loss_is_that_of_a_uniform_guess(zero_init: bool, nearly: float) -> None:
    torch.manual_seed(0)
    model = build_model(replace(TINY, zero_init=zero_init))
    assert model(tokens(), tokens(seed=2)).item() == pytest.approx(math.log(64), abs=nearly)


@torch.inference_mode()
def test_a_soft_cap_bounds_every_logit_and_leaves_small_ones_alone() -> None:
    x = torch.tensor([-1e6, -0.1, 0.0, 0.1, 1e6])
    capped = soft_cap(x, 15.0)
    assert capped.abs().max() <= 15.00001
    torch.testing.assert_close(capped[1:4], x[1:4], atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk_tokens", [5, 64])
def test_the_chunked_loss_with_a_cap_has_the_gradients_of_the_whole_one(chunk_tokens: int) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(32, 16), 3 * torch.randn(64, 16)
    targets = torch.randint(64, (32,))

    def loss_and_gradients(chunk: int) -> list[Tensor]:
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = token_loss(h, w, targets, chunk, cap=4.0)
        return [loss, *torch.autograd.grad(loss, [h, w])]

    for chunked, whole in zip(loss_and_gradients(chunk_tokens), loss_and_gradients(0), strict=True):
        torch.testing.assert_close(chunked, whole, atol=1e-6, rtol=1e-5)


@torch.inference_mode()
def test_a_cache_gives_the_logits_of_reading_everything_with_no_weight_at_zero() -> None:
    model = scrambled(replace(TINY, value_residual=True, layer_scalars=True))
    idx, cache = tokens(rows=3), KVCache(TINY, 3, 16, torch.device("cpu"), torch.float32)
    pieces = [model.logits(part, cache) for part in idx.split([4, 1, 1, 10], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model.logits(idx), atol=2e-5, rtol=1e-4)


@torch.inference_mode()
def test_rows_that_fan_out_from_one_prompt_remember_its_last_token() -> None:
    model = scrambled(TINY)
    prompt, tails = tokens(rows=1)[:, :6], tokens(rows=4, seed=3)[:, :5]
    cache = KVCache(TINY, 1, 16, torch.device("cpu"), torch.float32)
    model.logits(prompt, cache)
    cache.fan_out(4, 10)
    whole = model.logits(torch.cat([prompt.expand(4, -1), tails], dim=1))
    torch.testing.assert_close(model.logits(tails, cache), whole[:, 6:], atol=2e-5, rtol=1e-4)


def test_checkpointed_activations_give_the_same_gradients() -> None:
    def gradients(checkpoint_activations: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = build_model(TINY, checkpoint_activations=checkpoint_activations)
        model(tokens(), tokens(seed=2)).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for kept, computed_again in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(kept, computed_again)


def test_the_activation_has_no_power_which_a_card_would_take_in_float32() -> None:
    """CUDA's autocast lists `pow`: its input would be kept for backward in float32, four times as wide as the stream."""
    waiting, seen = [build_model(TINY).transformer["h"][0].mlp(torch.randn(2, 4, TINY.n_embd)).grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [after for after, _ in node.next_functions]
    names = {type(node).__name__ for node in seen}
    assert "ReluBackward0" in names
    assert "PowBackward0" not in names
