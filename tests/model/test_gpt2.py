"""nanoGPT's GPT-2: the inventory of ModelShape is what the model really has."""

from __future__ import annotations

import math

import pytest
import torch

from gptfit.model.build import build_model
from gptfit.shape import ModelShape

SMALL = ModelShape(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=50, bias=False)


@pytest.mark.parametrize("bias", [True, False])
def test_every_tensor_of_the_shape_is_in_the_model_and_no_other(bias: bool) -> None:
    shape = ModelShape(n_layer=3, n_head=4, n_embd=64, block_size=32, vocab_size=100, bias=bias)
    with torch.device("meta"):
        model = build_model(shape)
    found = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert found == {weight.name: weight.shape for weight in shape.weights()}


def test_gpt2_small_has_124373760_weights() -> None:
    shape = ModelShape(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304)
    with torch.device("meta"):
        model = build_model(shape)
    assert sum(p.numel() for p in model.parameters()) == 124_373_760


def test_a_fresh_model_guesses_uniformly() -> None:
    torch.manual_seed(0)
    model = build_model(SMALL)
    ids = torch.randint(50, (8, 16))
    assert model(ids, ids.roll(1)).item() == pytest.approx(math.log(50), abs=0.1)


def test_a_token_never_sees_a_later_one() -> None:
    torch.manual_seed(0)
    model = build_model(SMALL).eval()
    ids = torch.randint(50, (1, 16))
    changed = ids.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 50
    before, after = model.logits(ids), model.logits(changed)
    assert torch.equal(before[0, :10], after[0, :10])
    assert not torch.allclose(before[0, 10:], after[0, 10:])


def test_recomputed_activations_give_the_same_gradients() -> None:
    gradients = []
    for checkpoint_activations in (False, True):
        torch.manual_seed(0)
        model = build_model(SMALL, dropout=0.1, checkpoint_activations=checkpoint_activations)
        ids = torch.randint(50, (2, 16))
        model(ids, ids.roll(1)).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)
