"""What `gptfit plan` says in the cases where a plain yes, a usual remedy or a card's words would mislead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gptfit import measured
from gptfit.cli import main
from gptfit.config.keys import TrainConfig
from gptfit.gpus import find
from gptfit.measured import MeasuredSpeed
from gptfit.plan.plan import plan
from gptfit.plan.setting import Setting, speed_key
from gptfit.shape import ModelShape

WIDTH = 80


@pytest.fixture(autouse=True)
def a_machine_without_a_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gptfit.verbs.gpu_and_data.local_gpu", lambda: None)
    monkeypatch.setenv("GPTFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", str(WIDTH))


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """One line, so that words may be looked for across the breaks of 80 columns."""
    assert main(list(words)) == code
    out, err = capsys.readouterr()
    assert max(map(len, out.splitlines()), default=0) <= WIDTH
    return " ".join((out + err).split())


def test_a_limit_inside_the_range_is_tight_with_a_chance(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "--gpu", "4070", "--program", "nanogpt")
    assert "fits tight, 76 % likely: 380 MiB to spare" in said(capsys, *words, "--batch_size=13")
    assert "fits yes, " in said(capsys, *words, "--batch_size=8")
    assert "fits no, " in said(capsys, *words, "--batch_size=20", code=1)


def test_the_chance_of_fitting_falls_with_the_batch_and_is_half_at_the_limit() -> None:
    def chance(rows: int) -> float:
        config = TrainConfig(batch_size=rows)
        found = plan(config, config.shape(), find("4070"), program="nanogpt").fit_chance
        assert found is not None
        return found

    assert chance(8) > 0.99 > chance(13) > 0.5 > chance(15) > chance(20)
    assert chance(20) < 0.01


def test_released_weights_that_do_not_fit_are_answered_with_a_smaller_release(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = said(capsys, "plan", "--gpu", "4070", "--init_from=gpt2-xl", code=1)
    assert "fewer layers" not in text
    assert "fix: init_from = 'gpt2-medium', which fits with batch_size = 1" in text
    remedy = ("--init_from=gpt2-medium", "--batch_size=1", "--chunked_loss=True", "--checkpoint_activations=True")
    assert "fits yes, " in said(capsys, "plan", "--gpu", "4070", *remedy)


def test_one_output_has_one_warm_up(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "plan", "--gpu", "4070", "--max_iters=1000", "--lr_decay_iters=1000")
    assert text.count("fix: use warmup_iters") == 1
    assert "use warmup_iters = 30" in text
    assert "use warmup_iters = 30" in said(
        capsys, "plan", "--gpu", "4070", "--max_iters=1000", "--lr_decay_iters=1000", "--warmup_iters=500"
    )


def test_an_evaluation_is_not_planned_as_training(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "--gpu", "4070", "--init_from=gpt2", "--eval_only=True")
    text = said(capsys, *words)
    assert "one evaluation, 6.55M tokens in" in text
    for unwanted in ("gradients", "optimizer", "600,000 steps", "epochs", "max_iters"):
        assert unwanted not in text
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["tokens"] == 0
    assert facts["hours"]["value"] < 0.1


def test_text_is_to_be_prepared_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("to be or not to be\n", encoding="utf-8")
    text = said(capsys, "plan", "--gpu", "4070", "--data", str(path), code=1)
    assert f"prepare it first: `gptfit prepare {path} --out data/notes`" in text


def test_a_card_that_does_not_exist_is_answered_with_those_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nearest: RTX 4070 Laptop 8GB, RTX 4070 12GB" in said(capsys, "plan", "--gpu", "4070 8GB", code=1)
    assert "on Apple M4 (10-core GPU)" in said(capsys, "plan", "--gpu", "M4", "--batch_size=2")


@pytest.mark.parametrize("words", [(), ("--gpu", "here"), ("--gpu", "cpu")])
def test_a_machine_without_a_card_is_planned_as_it_is(capsys: pytest.CaptureFixture[str], words: tuple[str]) -> None:
    text = said(capsys, "plan", *words, "--n_layer=4", "--n_embd=128", "--n_head=4")
    assert "on this machine's CPU" in text
    assert "nvidia-smi" not in text
    assert "NVIDIA" not in text
    assert "`gptfit doctor --card` makes it exact" in text


def test_a_cpu_with_one_timed_run_has_a_speed_for_others() -> None:
    shape = ModelShape(4, 2, 128, 256, 65)
    key = speed_key(Setting(shape, 16, dtype="float32", compile=False), "cpu (2 threads)")
    measured.append([MeasuredSpeed(key, "2.0", tokens_per_s=12_000.0, ms_per_micro_step=341.0)])
    config = TrainConfig(n_layer=8, n_head=4, n_embd=256, block_size=256, vocab_size=65)
    other = plan(config, config.shape(), None, measurements=measured.read())
    assert other.speed is not None
    rate = other.speed.tokens_per_s
    assert rate.basis == "fit"
    assert rate.value == pytest.approx(12_000 * shape.flops_per_token / other.shape.flops_per_token, rel=0.01)
    assert rate.low <= rate.value / 2
    assert other.seconds is not None


def test_the_gpu_table_fits_80_columns_with_every_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpus"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "GB/s" in lines[0]
    assert any(line.split()[-4:-2] == ["504", "58.3"] or " 504 " in line for line in lines if "RTX 4070 12GB" in line)
    assert not any("…" in line for line in lines)
