"""Generating: cached equals uncached for both architectures, inside the window and past it."""

from __future__ import annotations

import pytest
import torch

from gptfit.errors import RunError, UsageError
from gptfit.generate.decode import _Reader, generate, window_start
from gptfit.generate.pick import Picker, Picking
from gptfit.model.base import LanguageModel
from tests.models import ARCHES, tiny_model


@torch.inference_mode()
def generate_uncached(
    model: LanguageModel, prompt: list[int], rows: int, tokens: int, picking: Picking
) -> list[list[int]]:
    """The same window and draws, reading everything again for every token."""
    picker, text = Picker(picking, rows), torch.tensor([prompt] * rows)
    for _ in range(tokens):
        start = window_start(text.shape[1], model.shape.block_size)
        picked = picker.pick(model.logits(text[:, start:])[:, -1])
        text = torch.cat([text, picked[:, None]], dim=1)
    return text[:, len(prompt) :].tolist()


def generated(model: LanguageModel, prompt: list[int], rows: int, tokens: int, picking: Picking) -> list[list[int]]:
    columns = list(generate(model, prompt, rows, tokens, picking))
    return [list(row) for row in zip(*columns, strict=True)]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("n_prompt", [1, 7, 16, 17, 40])
@pytest.mark.parametrize("picking", [Picking(0.0), Picking(1.0, None, None, 5), Picking(0.8, 10, 0.9, 7)])
def test_cached_tokens_equal_uncached_tokens(arch: str, rows: int, n_prompt: int, picking: Picking) -> None:
    model = tiny_model(arch)
    prompt = [(7 * i + 3) % 64 for i in range(n_prompt)]
    assert generated(model, prompt, rows, 50, picking) == generate_uncached(model, prompt, rows, 50, picking)


@pytest.mark.parametrize("arch", ARCHES)
def test_text_that_fits_is_what_nanogpts_rule_gives(arch: str) -> None:
    """Greedy tokens from the whole text each time: no window, no cache, no picker."""
    model, text = tiny_model(arch), [5, 6]
    for _ in range(14):
        text.append(int(model.logits(torch.tensor([text]))[0, -1].argmax()))
    assert generated(model, [5, 6], 1, 14, Picking(0.0)) == [text[2:]]


def test_the_window_is_never_longer_than_the_block_nor_shorter_than_three_quarters() -> None:
    for block_size in (1, 2, 3, 8, 1024):
        for length in range(1, 4 * block_size):
            context = length - window_start(length, block_size)
            assert min(length, block_size * 3 // 4) <= context <= block_size
            assert context > 0


def test_tokens_are_where_the_blocks_are_also_when_tables_are_in_host_memory() -> None:
    """As of a run that keeps its tables there and writes samples."""
    model = tiny_model("gpt2")
    model.transformer["h"].to("meta")
    assert _Reader(model, [1, 2], 1, 3)._device.type == "meta"


def test_a_row_does_not_depend_on_how_many_are_made() -> None:
    model, how = tiny_model(), Picking(1.0, None, None, 11)
    assert generated(model, [1, 2], 4, 30, how)[:2] == generated(model, [1, 2], 2, 30, how)


def test_rows_differ_and_seeds_differ() -> None:
    model = tiny_model()
    rows = generated(model, [1], 3, 30, Picking(1.0, None, None, 1))
    other = generated(model, [1], 1, 30, Picking(1.0, None, None, 77))
    assert len({tuple(row) for row in rows + other}) == 4


def test_tokens_beyond_the_tokenizer_are_never_drawn() -> None:
    drawn = list(generate(tiny_model(), [1], 8, 60, Picking(5.0, None), vocab_size=9))
    assert {token for tokens in drawn for token in tokens} == set(range(9))


def test_draws_follow_the_probabilities() -> None:
    p = torch.tensor([0.5, 0.1, 0.3, 0.1])
    picker = Picker(Picking(1.0, None, None, 3), 4000)
    counts = torch.bincount(picker.pick(p.log().expand(4000, 4)), minlength=4) / 4000
    assert (counts - p).abs().max() < 0.03  # four standard errors of 0.008


def test_top_k_and_top_p_leave_the_likeliest_tokens() -> None:
    logits = torch.tensor([0.5, 0.1, 0.3, 0.1]).log().expand(500, 4)
    assert set(Picker(Picking(1.0, 2), 500).pick(logits).tolist()) == {0, 2}
    assert set(Picker(Picking(1.0, None, 0.5), 500).pick(logits).tolist()) == {0}
    assert set(Picker(Picking(1.0, None, 0.51), 500).pick(logits).tolist()) == {0, 2}
    assert set(Picker(Picking(1.0, 1), 500).pick(logits).tolist()) == {0}


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ((1.0, None, None, -1), "seed"),
        ((-0.1,), "temperature"),
        ((float("nan"),), "temperature"),
        ((1.0, 0), "top-k"),
        ((1.0, None, 1.5), "top-p"),
    ],
)
def test_impossible_settings_are_named(values: tuple[float, ...], name: str) -> None:
    with pytest.raises(UsageError, match=name):
        Picking(*values)  # type: ignore[arg-type]


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert Picker(Picking(1e-45, None), 1).pick(logits).tolist() == [1]


def test_damaged_weights_are_said_instead_of_drawn_from() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[3, 3] = float("nan")
    with pytest.raises(RunError, match="not finite"):
        generated(model, [9], 1, 1, Picking(0.0))
