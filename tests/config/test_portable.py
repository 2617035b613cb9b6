"""`portable = True`: what llama.cpp cannot compute is off, whoever would have turned it on, and it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptfit.config.keys import DEFAULTS, INGREDIENTS, PORTABLE, TrainConfig
from gptfit.config.read import COMMAND_LINE, load_config
from gptfit.config.recipe import DataSize, limits, modern_keys, strange_keys
from gptfit.config.write import render
from gptfit.errors import ConfigError

MODERN = ["--arch=modern", "--portable=True"]


def test_the_command_line_alone_turns_off_what_is_on_by_default() -> None:
    loaded = load_config([], MODERN)
    assert strange_keys(loaded.config.shape()) == {}
    assert loaded.notes == ("portable = True: qk_norm = False, smear = False",)
    assert (loaded.sources["portable"], loaded.sources["smear"]) == (COMMAND_LINE, "portable")


def test_a_file_gives_way_to_the_command_line_and_its_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("arch = 'modern'\nbigram = True\nsmear = True\n")
    loaded = load_config([file], ["--portable=True"])
    assert strange_keys(loaded.config.shape()) == {}
    assert f"{file}:2: bigram is left out, for portable = True" in loaded.notes
    assert "portable = True: qk_norm = False" in loaded.notes


@pytest.mark.parametrize("ingredient", ["bigram=True", "qk_norm=True", "logit_softcap=15.0", "positions='learned'"])
def test_both_at_once_is_an_error_that_names_the_key(ingredient: str, tmp_path: Path) -> None:
    key, value = ingredient.split("=")
    file = tmp_path / "mine.py"
    file.write_text(f"arch = 'modern'\nportable = True\n{key} = {value}\n")
    for paths, typed, where in (((), [*MODERN, f"--{ingredient}"], COMMAND_LINE), ((file,), [], f"{file}:3")):
        with pytest.raises(ConfigError) as error:
            load_config(paths, typed)
        assert str(error.value).startswith(f"{where}: {key} = {value} is nothing llama.cpp can compute")
        assert str(error.value).endswith(f"use {key} = {PORTABLE[key]!r}, or leave portable out")


def test_gpt2_is_portable_as_it_is() -> None:
    assert load_config([], ["--portable=True"]).notes == ()


def test_the_recipe_leaves_out_the_same_and_keeps_its_way_to_train() -> None:
    plain, portable = (TrainConfig.unchecked(n_embd=128, n_layer=3, portable=p) for p in (False, True))
    data = DataSize(257, 10_000_000)
    usual, other = (modern_keys(config, (), (), data) for config in (plain, portable))
    changed = {key for key in usual.keys() | other.keys() if usual.get(key) != other.get(key)}
    assert {key: other[key] for key in changed} == {key: PORTABLE[key] for key in changed}
    assert changed >= {"qk_norm", "smear", "bigram", "value_embeddings"}
    config = TrainConfig(**plain.as_dict() | {"portable": True} | other)
    assert "llama.cpp (GGUF) run it" in limits(config.shape())
    assert "--portable=True" in limits(TrainConfig(**plain.as_dict() | usual).shape())


def test_a_written_portable_config_reads_back_equal(tmp_path: Path) -> None:
    config = load_config([], MODERN).config
    (tmp_path / "mine.py").write_text(render(config))
    assert load_config([tmp_path / "mine.py"]).config == config


def test_every_ingredient_that_is_no_initialisation_or_fold_has_a_portable_value() -> None:
    # These change where training starts, or go into the weights: export/arcee.py
    assert set(INGREDIENTS) - set(PORTABLE) == {"zero_init", "mlp_init", "tied_head", "qk_scale"}
    assert all(type(PORTABLE[key]) is type(DEFAULTS[key]) for key in PORTABLE)
