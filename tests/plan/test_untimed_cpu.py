"""A CPU of which nothing was timed: a speed from one product, with a wide range, and whether it fits in what is free."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from gptfit import api
from gptfit.cli import main
from gptfit.config.keys import TrainConfig
from gptfit.device import cpu_rate, host_memory
from gptfit.plan.resolve import on_card, setting_of
from gptfit.plan.untimed_cpu import process_memory, speed_by_product

ACCUMULATION = 4
RATE = 150e9  # about what torch's products reached on the machine of bench/calibration.json
SMALL = {"n_layer": 4, "n_embd": 128, "n_head": 4}
REAL_RATE = cpu_rate.product_rate
WORDS = [f"--{key}={value}" for key, value in SMALL.items()]


@pytest.fixture(autouse=True)
def fresh_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTFIT_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(cpu_rate, "product_rate", lambda: RATE)
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: 16 * 2**30)


def never() -> float:
    raise AssertionError("nothing is to be timed")


def bench_rows(repo: Path) -> list[dict[str, Any]]:
    rows = json.loads((repo / "bench" / "calibration.json").read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if row["shape"]["dtype"] == "float32"]


@pytest.mark.parametrize("words", [(), ("--gpu", "here"), ("--gpu", "cpu")])
def test_a_fresh_machine_has_a_speed_with_a_wide_range_at_once(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert main(["plan", *words, *WORDS]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "tokens/s (" in text
    assert "600,000 steps" in text
    assert "600,000 steps, 294.9B tokens in" in text
    assert "fits yes" in text
    assert "of 16.0 GiB free" in text
    assert "from a product timed now, wide range (`gptfit doctor --card` makes it exact)" in text


def test_json_and_the_python_api_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpu", "cpu", *WORDS, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rate = told["tokens_per_s"]
    assert rate["basis"] == "timed"
    assert rate["low"] < rate["value"] / 2
    assert rate["high"] > 2 * rate["value"]
    assert told["fits"] is True
    answer = api.plan(gpu="cpu", **SMALL)
    assert answer.speed is not None
    assert answer.speed.tokens_per_s.value == rate["value"]


def test_a_fresh_machine_is_proposed_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["propose", "--gpu", "cpu", "--data", "openwebtext", "--hours", "1"]) == 0
    assert "from a product timed now" in " ".join(capsys.readouterr().out.split())
    chosen = api.propose("openwebtext", 1, gpu="cpu").choice.plan
    assert chosen.hours is not None
    assert chosen.hours.high <= 1.01, "the slow end is kept"


def test_what_does_not_fit_into_main_memory_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: 2**28)
    assert main(["plan", "--gpu", "cpu", *WORDS]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "where this machine has 256 MiB free: out of memory" in text
    assert "a smaller batch_size or model" in text


def test_nothing_is_timed_for_a_named_card_and_nothing_by_torch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_rate, "product_rate", never)
    assert main(["plan", "--gpu", "4070"]) == 0
    assert "product" not in capsys.readouterr().out


def test_a_timing_that_fails_leaves_a_plan_without_a_speed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_rate, "product_rate", lambda: None)
    assert main(["plan", "--gpu", "cpu", *WORDS]) == 0
    assert "nothing was timed yet: `gptfit doctor --card` measures" in " ".join(capsys.readouterr().out.split())
    assert main(["propose", "--gpu", "cpu", "--hours", "12", "--data", "shakespeare_char"]) == 1
    assert "no speed of this machine's CPU is known yet" in capsys.readouterr().err


def test_a_library_that_fails_or_hangs_is_no_rate_and_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setitem(sys.modules, "numpy", None)  # as if it were not installed
    REAL_RATE.cache_clear()
    assert REAL_RATE() is None

    def hang(found: list[float]) -> None:
        asked.append(found)
        threading.Event().wait(60)

    monkeypatch.setattr(cpu_rate, "_time_products", hang)
    monkeypatch.setattr(cpu_rate, "PATIENCE_S", 0.01)
    REAL_RATE.cache_clear()
    assert REAL_RATE() is None
    assert REAL_RATE() is None
    REAL_RATE.cache_clear()
    assert len(asked) == 1


def test_the_share_of_a_product_holds_for_every_row_measured(repo: Path) -> None:
    """Measured steps of the bench lie inside the range that is printed, the rate being that machine's."""
    rows = bench_rows(repo)
    assert len(rows) >= 6
    for row in rows:
        config = TrainConfig(**row["shape"], device="cpu", gradient_accumulation_steps=ACCUMULATION)
        setting = setting_of(config, config.shape(), on_card(None))
        found = speed_by_product(setting, RATE)
        assert found is not None
        assert found.tokens_per_s.low < row["tokens_per_s"] < found.tokens_per_s.high, row["shape"]
        needs = process_memory(setting).device
        assert needs.low < row["peak_gib"] * 2**30 < needs.high, row["shape"]


def test_bfloat16_that_may_have_units_of_its_own_has_no_speed() -> None:
    assert api.plan(gpu="cpu", **SMALL, dtype="bfloat16").speed is None
