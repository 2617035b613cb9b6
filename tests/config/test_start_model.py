"""The model behind init_from: released sizes as published, a run's from its log, a folder's from its config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gptfit.cli import main
from gptfit.config.start_model import known_shape
from gptfit.shape import ModelShape


@pytest.mark.parametrize(
    ("name", "weights"),  # what transformers counts in the released files
    [("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080), ("gpt2-xl", 1_557_611_200)],
)
def test_released_models_have_their_published_sizes(name: str, weights: int) -> None:
    shape = known_shape(name)
    assert shape is not None
    assert sum(weight.size for weight in shape.weights()) == weights


def test_a_run_and_a_folder_say_what_they_are(tmp_path: Path) -> None:
    modern = ModelShape(3, 2, 32, 64, 257, arch="modern", smear=False)
    (tmp_path / "run").mkdir()
    header = {"event": "header", "name": "run", "config": {}, "shape": vars(modern)}
    (tmp_path / "run" / "run.jsonl").write_text(json.dumps(header) + "\n")
    assert known_shape(str(tmp_path / "run")) == modern
    (tmp_path / "hf").mkdir()
    facts = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 16, "vocab_size": 65}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(facts))
    assert known_shape(str(tmp_path / "hf")) == ModelShape(2, 2, 32, 16, 65, bias=True)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"n_layer": null}', "\x00"])
def test_what_cannot_be_known_is_not_guessed(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert known_shape(str(tmp_path)) is None
    assert known_shape("gpt2-huge") is None


def test_plan_plans_the_weights_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--gpu", "4070", "--init_from=gpt2-medium", "--n_layer=3", "--batch_size=1", "--json"]
    assert main(words) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["weights"] == 354_823_168
    assert planned["loss"]["basis"] == "published", "the law is for runs from scratch"
    assert not [problem for problem in planned["problems"] if problem["where"] in ("init_from", "vocab_size")]


@pytest.mark.parametrize(
    ("key", "changed"), [("block_size", "--block_size=2048"), ("init_from", "--init_from=gpt2-mediun")]
)
def test_plan_refuses_what_train_would(capsys: pytest.CaptureFixture[str], key: str, changed: str) -> None:
    assert main(["plan", "--gpu", "4070", "--init_from=gpt2-medium", "--batch_size=1", changed, "--json"]) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert [problem["where"] for problem in problems if problem["level"] == "error"] == [key]
