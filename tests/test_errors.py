"""An error has a message, where it is, and a fix; nobody takes them apart again."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest

from gptfit.config.read import load_config
from gptfit.errors import ConfigError, DataError, GptfitError, Problem

from .sources import FILES, name_of, nodes, text_of


def test_an_error_is_one_line_of_its_parts() -> None:
    error = DataError("is empty", where="train.bin", fix="prepare the data again")
    assert str(error) == "train.bin: is empty; prepare the data again"
    assert (error.message, error.where, error.fix) == ("is empty", "train.bin", "prepare the data again")
    assert str(DataError("is empty")) == "is empty"


def test_an_error_survives_the_way_out_of_a_worker_process() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("no", where="a.py:1", fix="yes", key="seed")))
    assert (str(error), error.fix, error.where, error.key) == ("a.py:1: no; yes", "yes", "a.py:1", "seed")


def test_an_error_becomes_a_finding_with_its_fix() -> None:
    found = DataError("is empty; quite", where="train.bin", fix="prepare it; then train").as_problem("data")
    assert found == Problem("error", "data", "train.bin: is empty; quite", "prepare it; then train")
    assert found.as_json() == {
        "level": "error",
        "where": "data",
        "message": "train.bin: is empty; quite",
        "fix": "prepare it; then train",
    }


def test_a_config_error_says_the_file_and_line_apart(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("seed = 1\nn_embd = 512\n")
    with pytest.raises(ConfigError) as caught:
        load_config([file])
    assert caught.value.where == f"{file}:2"
    assert caught.value.fix == "use n_head = 8 (head size 64)"
    assert caught.value.key == "n_embd"


def test_no_code_splits_a_message_to_find_its_remedy() -> None:
    ways = ('partition("; ")', 'split("; ")', "partition(';')", 'partition(";")')
    found = [f"{name_of(file)}: {way}" for file in FILES for way in ways if way in text_of(file)]
    assert found == [], "use GptfitError.fix"


def hidden_remedies(file: Path) -> list[str]:
    """`raise DataError("is empty; prepare it again")` should be `raise DataError("is empty", fix="prepare it again")`."""
    family = {kind.__name__ for kind in (GptfitError, *GptfitError.__subclasses__())}
    found = []
    for node in nodes(file):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in family and node.args:
            message = node.args[0]
            parts = message.values if isinstance(message, ast.JoinedStr) else [message]
            if any("; " in str(part.value) for part in parts if isinstance(part, ast.Constant)):
                found.append(f"{file.name}:{node.lineno}")
    return found


def test_no_error_hides_its_remedy_in_its_message(tmp_path: Path) -> None:
    careless = tmp_path / "careless.py"
    careless.write_text('raise DataError("is empty; prepare it again")\n')
    assert hidden_remedies(careless) == ["careless.py:1"]
    assert [line for file in FILES for line in hidden_remedies(file)] == []


def test_every_error_of_the_family_takes_the_same_parts() -> None:
    for kind in GptfitError.__subclasses__():
        assert kind("m", where="w", fix="f").args == ("w: m; f",)
