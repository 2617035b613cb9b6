"""Each problem is found where it is, and only there; each carries its remedy."""

from __future__ import annotations

import pytest

from gptfit.config.keys import TrainConfig
from gptfit.errors import Problem
from gptfit.estimate import Estimate
from gptfit.gpus import find
from gptfit.plan.plan import plan
from gptfit.plan.result import DataFacts

# A run nobody would complain about: 124M, half a million tokens a step, 2.6B tokens, once over the data.
GOOD = {
    "batch_size": 8,
    "gradient_accumulation_steps": 64,
    "max_iters": 5000,
    "lr_decay_iters": 5000,
    "warmup_iters": 200,
    "eval_interval": 500,
    "eval_iters": 100,
    "dataset": "fineweb",
}
# The same number of tokens in more or fewer steps.
LONG = {"max_iters": 320_000, "lr_decay_iters": 320_000, "warmup_iters": 2000, "eval_interval": 32_000}
SHORT = {"max_iters": 500, "lr_decay_iters": 500, "warmup_iters": 20, "eval_interval": 50}
DATA = DataFacts("fineweb", Estimate.exact(3e9), tokenizer="gpt2")


def problems(
    gpu: str = "4070", data: DataFacts | None = DATA, texts: tuple[str, ...] = (), **changes: object
) -> list[Problem]:
    config = TrainConfig.unchecked(**{**GOOD, **changes})
    return list(plan(config, config.shape(), find(gpu), data=data, texts=texts).problems)


def test_a_good_config_has_no_problem() -> None:
    assert problems() == []


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"n_embd": 504}, "n_head", "head size 42"),
        ({"vocab_size": 50257}, "vocab_size", "multiple of 64"),
        ({"gradient_accumulation_steps": 1, **LONG}, "gradient_accumulation_steps", "8,192 tokens per step is small"),
        ({"gradient_accumulation_steps": 640, **SHORT}, "gradient_accumulation_steps", "large"),
        ({"tokens_per_step": 8192, **LONG}, "tokens_per_step", "small"),
        ({"learning_rate": 1e-5, "min_lr": 1e-6}, "learning_rate", "far below"),
        ({"learning_rate": 1e-2}, "learning_rate", "far above"),
        ({"warmup_iters": 2000}, "warmup_iters", "40 %"),
        ({"lr_decay_iters": 600000}, "lr_decay_iters", "never finishes decaying"),
        ({"lr_decay_iters": 2500}, "lr_decay_iters", "run at min_lr"),
        ({"max_iters": 50000, "lr_decay_iters": 50000}, "max_iters", "8.7 epochs"),
        ({"max_iters": 900, "lr_decay_iters": 900, "warmup_iters": 27}, "max_iters", "tokens per parameter"),
        ({"eval_interval": 8}, "eval_interval", "evaluation takes"),
        ({"dropout": 0.1}, "dropout", "at most once"),
        ({"init_from": __file__}, "init_from", "the model will be that of "),
        ({"dtype": "float16"}, "dtype", "loss scaling"),
        ({"compile": False, "batch_size": 4, "gradient_accumulation_steps": 128}, "compile", "compile is off"),
        ({"wandb_run_name": "gpt2-350M"}, "wandb_run_name", "says 350M, the shape has 123.6M"),
    ],
)
def test_each_mistake_is_named_alone(changes: dict[str, object], key: str, words: str) -> None:
    found = problems(**changes)
    assert [(problem.level, problem.where) for problem in found] == [("warning", key)]
    assert words in found[0].message
    assert found[0].fix


def test_a_step_that_the_recipe_takes_on_a_cpu_is_small_only_on_a_card() -> None:
    step = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "batch_size": 8}
    config = TrainConfig.unchecked(arch="modern", gradient_accumulation_steps=1, max_iters=225, **step)
    small = "2,048 tokens per step is small"
    on_cpu, on_card = (plan(config, config.shape(), gpu).problems for gpu in (None, find("4070")))
    assert not [problem for problem in on_cpu if problem.message.startswith(small)]
    assert [problem for problem in on_card if problem.message.startswith(small)]


def test_bf16_on_a_card_without_it_is_named() -> None:
    assert ("dtype", "warning") in [(p.where, p.level) for p in problems("2080 Ti", dtype="bfloat16", batch_size=4)]


def test_more_than_four_epochs_says_what_repeats_are_worth() -> None:
    (found,) = problems(max_iters=50000, lr_decay_iters=50000)
    assert "26.2B seen are worth 21" in found.message


def test_nothing_fits_says_a_smaller_model() -> None:
    found = problems("GTX 1650", n_layer=48, n_embd=1600, n_head=25, batch_size=1, gradient_accumulation_steps=512)
    (error,) = [problem for problem in found if problem.level == "error"]
    assert "smaller model" in error.fix


def test_a_smoke_test_of_a_few_steps_is_not_lectured() -> None:
    assert problems(max_iters=50, lr_decay_iters=50, warmup_iters=5) == []


@pytest.mark.parametrize(
    "comment",
    [
        "# GPT-2 124M on FineWeb",
        "# total number of tokens be 300B",
        "# these make the total batch size be ~0.5M",
        "# fineweb 10B, sample-10BT",
        "# 12 batch size * 1024 block size * 5 gradaccum * 8 GPUs = 491,520",
        "# about 125M parameters",
        "# A100 40GB, 24 GB",
        "# 13.7M parameters as nanoGPT counts them (vocabulary 257), 5.70M FLOPs per token",
    ],
)
def test_true_or_other_numbers_in_comments_are_no_claims(comment: str) -> None:
    assert problems(texts=(f"{comment}\nn_layer = 12\n",)) == []


@pytest.mark.parametrize("comment", ["# 350M model", "# GPT-2 medium (354M)", "# 1.5B parameters"])
def test_a_comment_that_claims_another_size_is_named(comment: str) -> None:
    (found,) = problems(texts=(f"n_layer = 12  {comment}\n",))
    assert "a comment says" in found.message


def test_errors_come_first() -> None:
    levels = [problem.level for problem in problems(n_embd=500, learning_rate=1.0)]
    assert levels == sorted(levels)
    assert levels[0] == "error"
