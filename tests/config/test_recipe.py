"""The modern recipe's numbers, and how `--recipe modern` meets files and the command line."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from gptfit.config.keys import TrainConfig
from gptfit.config.read import Loaded
from gptfit.config.recipe import (
    DataSize,
    adamw_rate,
    head_count,
    least_tokens_per_step,
    length_keys,
    matrix_rate,
    modern_keys,
    optimal_tokens,
    second_edition,
    tokens_per_step,
    training_keys,
)
from gptfit.errors import UsageError
from gptfit.gpus import find
from gptfit.plan.plan import plan
from gptfit.shape import ModelShape
from gptfit.verbs.common import config_arguments, load, recipe_argument
from tests.test_dataset import bins


def load_words(*words: str) -> TrainConfig:
    return loaded_words(*words).config


def load_notes(*words: str) -> tuple[str, ...]:
    return loaded_words(*words).notes


def loaded_words(*words: str) -> Loaded:
    parser = argparse.ArgumentParser()
    config_arguments(parser)
    recipe_argument(parser)
    args, rest = parser.parse_known_args(words)
    args.overrides = rest
    return load(args)


def test_gpt2_small_gets_track_3s_horizon_and_step() -> None:
    shape = TrainConfig(arch="modern").shape()
    tokens = optimal_tokens(shape)
    assert tokens == pytest.approx(1.70e9, rel=0.01)
    assert tokens_per_step(tokens) == 524_288


def test_a_narrow_model_on_a_cpu_takes_smaller_steps_and_a_card_does_not() -> None:
    assert [least_tokens_per_step(width, 257, 100e3, is_cpu=True) for width in (64, 128, 192, 256, 768)] == [
        256,
        512,
        512,
        1024,
        2048,
    ]
    assert least_tokens_per_step(128, 257, 100e3, is_cpu=False) == 4_096


def test_a_run_with_updates_enough_takes_larger_steps() -> None:
    assert [least_tokens_per_step(64, 65, tokens, is_cpu=True) for tokens in (1e5, 2e5, 3e5, 5e5, 1e9)] == [
        256,
        512,
        1024,
        2048,
        2048,
    ]


def test_a_large_vocabulary_takes_larger_steps() -> None:
    assert [least_tokens_per_step(128, entries, 100e3, is_cpu=True) for entries in (257, 4_096, 50_304)] == [
        512,
        1024,
        2048,
    ]


def test_an_untied_head_counts_once_in_the_horizon() -> None:
    tied = ModelShape(12, 12, 768, 1024, 50304)
    modern = ModelShape(12, 12, 768, 1024, 50304, arch="modern")
    assert modern.parameters > 1.25 * tied.parameters
    assert modern.tied_parameters == pytest.approx(tied.tied_parameters, rel=1e-3)
    assert modern.flops_per_token == pytest.approx(tied.flops_per_token, rel=1e-3)


def test_the_heads_rate_falls_with_the_width() -> None:
    narrow, wide = (ModelShape(12, 4, width, 64, 1000, arch="modern") for width in (192, 768))
    assert adamw_rate("head", narrow) == pytest.approx(4 * adamw_rate("head", wide))
    assert adamw_rate("embedding", narrow) == adamw_rate("embedding", wide)


def test_the_heads_rate_falls_with_the_tokens_per_entry_of_the_vocabulary() -> None:
    bytes_, words = (ModelShape(3, 2, 128, 128, size, arch="modern") for size in (257, 4_096))
    assert adamw_rate("head", bytes_, 512) == adamw_rate("head", bytes_), "every byte is in every batch"
    assert adamw_rate("head", words, 1_024) == pytest.approx(adamw_rate("head", words) / 2)
    assert adamw_rate("head", words, 256) == adamw_rate("head", words, 128), "frequent entries are in every batch"
    assert adamw_rate("head", words, 256) > adamw_rate("head", words, 1_024) * 0.8
    assert adamw_rate("embedding", words, 1_024) == adamw_rate("embedding", words)


def test_a_tied_embedding_has_the_heads_rate() -> None:
    gpt2 = ModelShape(12, 12, 768, 1024, 50304)
    assert adamw_rate("embedding", gpt2) == adamw_rate("head", gpt2)


@pytest.mark.parametrize(("n_embd", "heads"), [(384, 6), (768, 12), (1536, 12), (96, 3), (100, 1)])
def test_heads_are_64_channels_and_128_in_wide_models(n_embd: int, heads: int) -> None:
    assert head_count(n_embd) == heads


def test_a_files_model_batch_and_horizon_stay_and_its_rates_do_not(tmp_path: Path) -> None:
    file = tmp_path / "char.py"
    file.write_text(
        "n_layer = 6\nn_head = 6\nn_embd = 384\nblock_size = 256\nbatch_size = 64\ngradient_accumulation_steps = 1\n"
        "max_iters = 5000\nlr_decay_iters = 5000\nlearning_rate = 1e-3\nmin_lr = 1e-4\nwarmup_iters = 100\ndropout = 0.2\n"
    )
    config = load_words("--recipe", "modern", str(file), "--weight_decay=0.2")
    assert (config.n_layer, config.n_head, config.batch_size, config.max_iters, config.dropout) == (6, 6, 64, 5000, 0.2)
    assert (config.arch, config.optimizer, config.schedule, config.lr_decay_iters) == ("modern", "muon", "wsd", 5000)
    assert config.learning_rate == matrix_rate(64 * 256) == 0.0151
    assert config.weight_decay == 0.2


def test_without_the_option_nothing_changes() -> None:
    assert load_words("--n_layer=6") == TrainConfig(n_layer=6)


def test_a_resumed_run_keeps_its_own_keys() -> None:
    assert load_words("--recipe=modern", "--init_from=resume").arch == "gpt2"


def test_the_recipe_divides_its_step_into_whole_micro_batches() -> None:
    for batch_size in (1, 7, 12, 64, 600):
        config = TrainConfig(batch_size=batch_size)
        keys = modern_keys(config, ["batch_size"], [])
        TrainConfig(**{**config.as_dict(), **keys})  # checked at birth
        assert keys["tokens_per_step"] % (batch_size * 1024) == 0


@pytest.mark.parametrize(("words", "message"), [
    (["--qk_norm=False"], "qk_norm = False needs arch = 'modern'"),
    (["--arch=modern", "--bias=True"], "bias = True, but arch = 'modern' has none"),
    (["--arch=modern", "--norm=batch"], "norm = 'batch' is not known; use one of rms, layer"),
    (["--arch=modern", "--n_embd=66", "--n_head=3"], "rotary positions need a head size that is a multiple of 4"),
    (["--arch=modern", "--logit_softcap=-1"], "logit_softcap = -1.0 is out of range"),
])  # fmt: skip
def test_a_switch_that_cannot_work_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(Exception, match=message.replace("(", r"\(")) as error:
        load_words(*words)
    assert "\n" not in str(error.value)


def test_a_plan_warns_of_a_rate_that_was_tuned_for_adamw() -> None:
    def warned(**changes: object) -> set[str]:
        config = TrainConfig(optimizer="muon", **changes)  # type: ignore[arg-type]
        return {problem.where for problem in plan(config, config.shape(), find("RTX 4070 12GB")).problems}

    assert "learning_rate" in warned()
    assert "learning_rate" not in warned(learning_rate=0.02)


def test_the_recipe_and_somebodys_weights_are_two_models() -> None:
    with pytest.raises(UsageError, match="leave one of them out"):
        load_words("--recipe=modern", "--init_from=gpt2")


def test_momentum_remembers_as_large_a_part_of_a_short_run_as_of_a_long_one() -> None:
    shape = ModelShape(12, 12, 768, 1024, 50304, arch="modern")
    long = length_keys(3_000, shape)
    assert (long["momentum"], long["momentum_end"]) == (0.97, 0.9), "nanochat's"
    assert length_keys(600, shape)["momentum"] == 0.95
    assert length_keys(80, shape)["momentum"] == length_keys(300, shape)["momentum"] == 0.9


def test_layer_scalars_are_for_many_updates_or_a_deep_model_of_words_that_need_not_be_portable() -> None:
    deep = ModelShape(6, 4, 256, 256, 4096, arch="modern")
    flat, bytewise = replace(deep, n_layer=3), replace(deep, vocab_size=257)
    assert second_edition(deep, max_iters=288)["layer_scalars"]
    for other in (flat, bytewise):
        assert second_edition(other, max_iters=3_000)["layer_scalars"]
        assert not second_edition(other, max_iters=320)["layer_scalars"]
    assert not second_edition(deep, portable=True, max_iters=3_000)["layer_scalars"]


def test_a_short_run_begins_to_decay_later() -> None:
    short, long = (training_keys(updates, 2_048)["decay_fraction"] for updates in (288, 3_000))
    assert (short, long) == (0.4, 0.6)


def test_tables_are_in_the_second_edition_where_they_are_small_and_the_data_is_not_read_often() -> None:
    small, large = (ModelShape(*size, 1024, 50304, arch="modern") for size in ((6, 6, 384), (12, 12, 768)))
    assert second_edition(small)["value_embeddings"] == "tables"
    assert second_edition(large)["value_embeddings"] == "none"
    assert second_edition(replace(large, vocab_size=8192))["value_embeddings"] == "tables"
    assert second_edition(small)["bigram"]
    assert not second_edition(replace(large, n_layer=24, n_embd=1536))["bigram"]
    often = second_edition(small, epochs=6)
    assert (often["value_embeddings"], often["bigram"]) == ("projections", False)
    TrainConfig(arch="modern", optimizer="muon", schedule="wsd", **often)


def test_many_epochs_are_noticed_from_data_and_horizon() -> None:
    config = TrainConfig.unchecked(max_iters=1000, batch_size=8, gradient_accumulation_steps=1)
    given = ("max_iters", "batch_size", "gradient_accumulation_steps")
    once, often = (modern_keys(config, given, (), DataSize(4096, tokens, True)) for tokens in (8_000_000, 1_000_000))
    assert "shuffle_documents" not in once
    assert once["weight_decay"] == 0.05
    assert (often["shuffle_documents"], often["dropout"]) == (True, 0.1)
    assert "average_tail" not in once
    assert often["average_tail"] == pytest.approx(1 / 8.192, abs=1e-3)  # its last epoch
    assert often["weight_decay"] == pytest.approx(0.05 * 8.192, abs=1e-3)
    assert not modern_keys(config, given, (), DataSize(4096, 1_000_000, False))["shuffle_documents"]
    assert modern_keys(config, given, ("dropout",), DataSize(4096, 1_000_000, True)).get("dropout") is None


def test_what_a_file_or_the_command_line_says_of_an_ingredient_stays() -> None:
    config = TrainConfig.unchecked(n_layer=4, n_embd=128, max_iters=100)
    assert "bigram" not in modern_keys(config, ("bigram",), ())
    assert "normuon" not in modern_keys(config, (), ("normuon",))
    assert modern_keys(config, (), ())["normuon"]


def test_the_recipe_says_that_it_saw_many_epochs(tmp_path: Path) -> None:
    folder = bins(tmp_path, train=2_000)
    words = ("--recipe=modern", f"--dataset={folder}", "--batch_size=2", "--block_size=16", "--tokens_per_step=32")
    few, many = (load_notes(*words, f"--max_iters={steps}") for steps in (100, 1_000))
    assert not any("epochs of this data" in note for note in few)
    assert any("16.0 epochs of this data" in note for note in many)
