"""The plan page: its figures are the command's, its remedies work, and nothing asked of it ends in a traceback."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from gptfit.cli import main
from gptfit.pages.live import watch_app
from gptfit.verbs.make_plan import plan_arguments
from gptfit.verbs.plan_page import plan_site


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    parser = argparse.ArgumentParser()
    plan_arguments(parser)
    site = plan_site(parser.parse_args(["--gpu", "4070"]))
    return TestClient(watch_app(tmp_path, ("testserver",), plan=site))


def ask(client: TestClient, **asked: object) -> dict[str, Any]:
    answer = client.get("/api/plan", params={name: str(value) for name, value in asked.items()})
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def test_the_page_says_what_the_command_says(client: TestClient, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"n_layer": 24, "n_head": 16, "n_embd": 1024, "batch_size": 2, "chunked_loss": True}
    main(["plan", "--gpu", "3090", "--json", *(f"--{key}={value}" for key, value in keys.items())])
    command = json.loads(capsys.readouterr().out)
    shown = ask(client, gpu="RTX 3090 24GB", **keys)
    assert {key: shown[key] for key in command} == command


def test_the_command_to_copy_plans_what_the_page_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cards, their number and the data were left out of it."""
    parser = argparse.ArgumentParser()
    plan_arguments(parser)
    site = plan_site(parser.parse_args(["--gpu", "4090+3090", "--nodes", "2", "--data", "openwebtext"]))
    for asked in ({"batch_size": "4", "hours": "10"}, {"data": "shakespeare", "gpu": "RTX 3060 12GB"}):
        shown = site.answer(asked)
        main([*shlex.split(shown["command"])[1:], "--json"])
        command = json.loads(capsys.readouterr().out)
        assert {key: shown[key] for key in command} == command
    assert "\ndataset = 'shakespeare'\n" in shown["config"]


def test_what_a_remedy_changes_makes_it_fit_with_the_same_step(client: TestClient) -> None:
    large = {"n_layer": 36, "n_head": 20, "n_embd": 1280, "tokens_per_step": 491520}
    before = ask(client, **large)
    assert before["fits"] is False
    (change,) = (problem["change"] for problem in before["problems"] if problem["level"] == "error")
    after = ask(client, **{**large, **change})
    assert after["fits"] is True
    assert after["tokens_per_step"] == before["tokens_per_step"]


def test_every_remedy_that_is_a_button_ends_its_problem(client: TestClient) -> None:
    odd = {"n_embd": 780, "n_head": 12, "vocab_size": 50257, "compile": False, "dtype": "float16", "dropout": 0.1}
    odd |= {"learning_rate": 0.1, "max_iters": 1000, "warmup_iters": 400, "lr_decay_iters": 5000}
    buttons = [problem for problem in ask(client, **odd)["problems"] if "change" in problem]
    assert {p["where"] for p in buttons} >= {"n_head", "vocab_size", "compile", "dtype", "dropout", "learning_rate",
                                             "warmup_iters", "lr_decay_iters"}  # fmt: skip
    for problem in buttons:
        after = ask(client, **{**odd, **problem["change"]})["problems"]
        assert (problem["where"], problem["level"]) not in [(p["where"], p["level"]) for p in after]


def test_hours_become_steps_that_take_them(client: TestClient) -> None:
    shown = ask(client, hours=10)
    assert shown["hours"]["value"] == pytest.approx(10, rel=0.01)
    assert "lr_decay_iters" in shown["config"]


def test_the_curve_ends_where_the_plan_does(client: TestClient) -> None:
    shown = ask(client, hours=20)
    assert shown["curve"]["loss"][-1] == pytest.approx(shown["loss"]["value"])
    assert shown["curve"]["tokens"][-1] == pytest.approx(shown["tokens"])
    assert shown["curve"]["loss"] == sorted(shown["curve"]["loss"], reverse=True)


def test_in_another_vocabulary_than_gpt2s_bits_per_byte_come_first_and_the_curve_ends_there(client: TestClient) -> None:
    """Repeats under strong weight decay cost less; the curve was that of the usual one, in nats."""
    asked = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "vocab_size": 65, "batch_size": 64}
    shown = ask(client, data="shakespeare_char", **asked, tokens_per_step=16384, max_iters=2000, weight_decay=1.0)
    bits = shown["bits_per_byte"]["value"]
    assert [figure for figure, what, _ in shown["numbers"] if what.startswith("bits per byte")] == [f"{bits:.3f}"]
    assert (shown["curve"]["loss"][-1], shown["curve_unit"]) == (pytest.approx(bits), "bits per byte")
    assert ask(client, hours=20)["curve_unit"] == "loss"


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"hours": "many"}, "hours"),
        ({"hours": "-3"}, "hours"),
        ({"n_layer": "-1"}, "n_layer"),
        ({"n_layer": "x" * 5000}, "n_layer"),
        ({"gpu": "RTX 9999"}, "not in the table"),
        ({"dataset": "/etc"}, "command line"),
        ({"init_from": "/etc/passwd"}, "command line"),
        ({"out_dir": "x"}, "command line"),
    ],
)
def test_a_senseless_question_is_answered_in_one_line(client: TestClient, asked: dict[str, str], word: str) -> None:
    shown = ask(client, **asked)
    said = shown.get("error") or " ".join(p["message"] for p in shown["problems"] if p["level"] == "error")
    assert word in said
    assert "\n" not in said


def test_a_config_that_cannot_start_is_shown_with_its_remedy(client: TestClient) -> None:
    shown = ask(client, n_embd=512, n_head=12)
    assert shown["headline"] == "This config cannot start."
    assert "n_head = 8" in shown["problems"][0]["fix"]
