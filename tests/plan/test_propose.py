"""Proposals fit the card, the time and the data, and say so in files both programs read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gptfit.configfile import load_config
from gptfit.errors import DeviceError
from gptfit.estimate import Estimate
from gptfit.gpus import find
from gptfit.plan.propose import Wish, propose
from gptfit.plan.result import DataFacts

WEB = DataFacts("fineweb", Estimate.exact(3e9), tokenizer="gpt2")
WISH = Wish(find("4070"), hours=12, data=WEB, vocab_size=50304)


@pytest.mark.parametrize("gpu", ["RTX 3050", "4070", "4090", "T4", "GTX 1080 Ti", "A100 80GB"])
@pytest.mark.parametrize("hours", [1, 24])
def test_a_proposal_starts_fits_and_ends_in_time(gpu: str, hours: float) -> None:
    answer = propose(replace(WISH, gpu=find(gpu), hours=hours))
    chosen = answer.choice.plan
    assert chosen.runs
    assert chosen.fits
    assert chosen.hours is not None
    assert 0.85 * hours <= chosen.hours.value <= 1.05 * hours
    assert not chosen.errors


def test_twelve_hours_on_a_4070_is_gpt2_small_at_8() -> None:
    """What its owner arrived at after six attempts."""
    chosen = propose(WISH).choice.plan
    assert 90e6 < chosen.shape.parameters < 160e6
    assert chosen.config.batch_size == 8
    assert chosen.tokens_per_step == 524_288


def test_the_choice_has_the_lowest_loss_of_the_same_recipe_and_time() -> None:
    answer = propose(WISH)
    assert answer.choice.plan.loss is not None
    for other in answer.alternatives:
        if other.title == "smaller, faster":
            assert other.plan.loss is not None
            assert other.plan.loss.loss.value >= answer.choice.plan.loss.loss.value


def test_more_hours_make_a_larger_model_and_a_lower_loss() -> None:
    short, long = (propose(replace(WISH, hours=hours)).choice.plan for hours in (3, 100))
    assert long.shape.parameters > short.shape.parameters
    assert short.loss is not None
    assert long.loss is not None
    assert long.loss.loss.value < short.loss.loss.value


def test_little_data_makes_a_small_model_and_ends_early() -> None:
    small = replace(WISH, data=DataFacts("notes", Estimate.exact(15e6), tokenizer="gpt2"))
    chosen = propose(small).choice.plan
    assert chosen.shape.parameters <= 15e6
    assert chosen.epochs is not None
    assert chosen.epochs.value <= 10
    assert chosen.config.dropout > 0


def test_a_long_context_on_a_small_card_uses_our_keys_and_offers_one_without() -> None:
    answer = propose(replace(WISH, gpu=find("RTX 3050"), hours=200, block_size=8192))
    config = answer.choice.plan.config
    assert config.chunked_loss is True or config.checkpoint_activations
    (plain,) = [other for other in answer.alternatives if other.title == "plain nanoGPT"]
    assert plain.plan.config.chunked_loss == "auto"
    assert not plain.plan.config.checkpoint_activations
    assert plain.plan.fits


def test_the_modern_recipe_is_among_the_alternatives() -> None:
    (modern,) = [other for other in propose(WISH).alternatives if other.title == "modern recipe"]
    assert modern.plan.config.optimizer == "muon"
    assert modern.plan.config.arch == "modern"


def test_several_gpus_share_the_accumulation() -> None:
    chosen = propose(replace(WISH, gpu=find("4090"), processes=2)).choice.plan
    assert chosen.config.gradient_accumulation_steps % 2 == 0
    assert chosen.runs


@pytest.mark.parametrize("changes", [{"hours": 0.0001}, {"gpu": replace(find("4070"), vram_gib=0.0)}])
def test_where_nothing_fits_one_line_says_so(changes: dict[str, object]) -> None:
    with pytest.raises(DeviceError, match="no model fits"):
        propose(replace(WISH, **changes))  # type: ignore[arg-type]


def test_a_card_without_a_known_rate_cannot_be_planned_in_hours() -> None:
    unknown = replace(find("4070"), name="RTX 9999", bf16_tflops=None, fp32_tflops=None, measured_low_tflops=None)
    with pytest.raises(DeviceError, match="no arithmetic rate"):
        propose(replace(WISH, gpu=unknown))


def test_a_written_proposal_reads_back_equal(tmp_path: object) -> None:
    from pathlib import Path

    from gptfit.configwrite import render

    assert isinstance(tmp_path, Path)
    config = propose(WISH).choice.plan.config
    path = tmp_path / "mine.py"
    path.write_text(render(config, "title"), encoding="utf-8")
    assert load_config([path]).config == config
