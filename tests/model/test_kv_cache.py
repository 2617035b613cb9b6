"""The KV cache gives what reading everything again gives."""

from __future__ import annotations

import pytest
import torch

from gptfit.model.base import LanguageModel
from gptfit.model.cache import KVCache
from tests.models import ARCHES, tiny_model


def new_cache(model: LanguageModel, rows: int) -> KVCache:
    return KVCache(model.shape, rows, model.shape.block_size, torch.device("cpu"), torch.float32)


@pytest.fixture(params=ARCHES)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return tiny_model(request.param)


@pytest.mark.parametrize("pieces", [[16], [1] * 16, [5, 1, 1, 9], [1, 15]])
@torch.inference_mode()
def test_text_read_in_pieces_has_the_logits_of_text_read_at_once(model: LanguageModel, pieces: list[int]) -> None:
    idx = torch.randint(64, (3, 16), generator=torch.Generator().manual_seed(1))
    cache, start, found = new_cache(model, 3), 0, []
    for size in pieces:
        found.append(model.logits(idx[:, start : start + size], cache))
        start += size
        assert cache.length == start
    torch.testing.assert_close(torch.cat(found, dim=1), model.logits(idx), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("pieces", [[1] * 9, [4, 1, 4], [9]])
@torch.inference_mode()
def test_rows_that_share_a_prefix_have_the_logits_of_rows_that_own_it(model: LanguageModel, pieces: list[int]) -> None:
    numbers = torch.Generator().manual_seed(2)
    prefix = torch.randint(64, (1, 7), generator=numbers)
    tails = torch.randint(64, (5, 9), generator=numbers)
    whole = model.logits(torch.cat([prefix.expand(5, -1), tails], dim=1))
    cache = new_cache(model, 1)
    torch.testing.assert_close(model.logits(prefix, cache), whole[:1, :7], atol=2e-5, rtol=1e-5)
    cache.fan_out(5, 9)
    start, found = 0, []
    for size in pieces:
        found.append(model.logits(tails[:, start : start + size], cache))
        start += size
    assert cache.length == 16
    torch.testing.assert_close(torch.cat(found, dim=1), whole[:, 7:], atol=2e-5, rtol=1e-5)


@torch.inference_mode()
def test_the_next_logits_are_those_of_the_last_position(model: LanguageModel) -> None:
    idx = torch.arange(10)[None]
    torch.testing.assert_close(model.next_logits(idx), model.logits(idx)[:, -1])
