"""Each check of `gptfit doctor --card` can fail: what it says of a device that is not as it must be."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gptfit import measured
from gptfit.cli import main
from gptfit.config.keys import TrainConfig
from gptfit.device import device as devices
from gptfit.device.device import Device, find_device
from gptfit.doctor import card, card_memory, card_numbers, card_runs, card_speed
from gptfit.doctor.card import CardLine, CardReport
from gptfit.doctor.verdict import Verdict
from gptfit.gpus import find
from gptfit.model.cache import LayerCache
from gptfit.plan.calibration import memory_of, newest
from gptfit.plan.setting import Setting
from gptfit.plan.speed import from_calibration
from gptfit.tune.trials import Machine
from gptfit.units import GIB, MIB
from tests.cuda_stand_in import Card, install
from tests.plan.test_calibration import made

CPU = TrainConfig(device="cpu", dtype="float32", compile=False)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    """With less work than a card needs to show what it can."""
    monkeypatch.setattr(card_speed, "PRODUCT_SIZE", {"cpu": 32})
    monkeypatch.setattr(card_speed, "COPY_BYTES", {"cpu": MIB})
    monkeypatch.setattr(card_speed, "WARM_S", 0.01)
    monkeypatch.setattr(card_speed, "TIMED_S", 0.01)
    monkeypatch.setattr(card_memory, "PROBE_BYTES", 32 * MIB)
    return find_device(CPU)


def test_a_rate_below_the_data_sheet_is_a_warning_with_clock_and_power(
    cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card_speed, "card_readings", lambda device: {"clock_mhz": 900.0, "power_w": 80.0})
    assert card_speed.products(cpu).level == "ok", "no data sheet, no complaint"
    slow = card_speed.products(replace(cpu, dtype="bfloat16", gpu=find("RTX 4070")))
    assert (slow.level, "900 MHz, 80 W" in slow.text, "of the data sheet" in slow.text) == ("warning", True, True)
    assert "power limit" in slow.remedy
    copies = card_speed.copies(replace(cpu, gpu=find("RTX 4070")))
    assert (copies.level, copies.values["gb_per_s"] > 0) == ("warning", True)


@pytest.mark.parametrize(("name", "words"), [("WSL2", "WSL2"), ("Windows", "Windows (WDDM)"), ("Linux", "Linux")])
def test_the_system_whose_driver_lends_memory_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, words: str
) -> None:
    install(monkeypatch, Card())
    release = tmp_path / "osrelease"
    release.write_text("5.15.90.1-microsoft-standard-WSL2\n" if name == "WSL2" else "6.8.0-45-generic\n")
    monkeypatch.setattr(devices, "OSRELEASE", release)
    monkeypatch.setattr(sys, "platform", "win32" if name == "Windows" else "linux")
    verdict = card_speed.build(find_device(TrainConfig(device="cuda", dtype="bfloat16")))
    assert words in verdict.text


def test_counts_of_memory_that_disagree_are_a_warning(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: Iterator[int] = iter([GIB, GIB + 32 * MIB, GIB, GIB + 64 * MIB])
    monkeypatch.setattr(card_memory, "_shown", lambda device: next(shown))
    assert card_memory.counts(cpu).level == "ok"
    verdict = card_memory.counts(cpu)
    assert (verdict.level, "shown differ" in verdict.text) == ("warning", True)


def test_a_cap_that_does_not_hold_is_a_problem(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "limit_memory", lambda self, limit: None)
    monkeypatch.setattr(card_memory, "PROBE_BYTES", MIB)  # it is really computed
    verdict = card_memory.out_of_memory(cpu)
    assert (verdict.level, "running out is not noticed" in verdict.text) == ("error", True)


@pytest.mark.parametrize(
    ("refused_again", "afterwards", "level"),
    [(None, 101, "ok"), (None, 100 + 2 * MIB, "error"), ("CUDA out of memory", 0, "error")],
)
def test_after_running_out_a_step_must_need_what_it_needed_before(
    cpu: Device, monkeypatch: pytest.MonkeyPatch, refused_again: str | None, afterwards: int, level: str
) -> None:
    refusals, peaks = iter(["CUDA out of memory", refused_again]), iter([100, afterwards])
    monkeypatch.setattr(Device, "limit_memory", lambda self, limit: None)
    monkeypatch.setattr(card_memory, "_refused", lambda action: next(refusals))
    monkeypatch.setattr(card_memory, "_peak_of_step", lambda engine, batch: next(peaks))
    assert card_memory.out_of_memory(cpu).level == level


@pytest.mark.parametrize(("error", "level"), [(None, "error"), ("CUDA out of memory", "ok")])
def test_where_the_driver_lends_memory_the_cap_must_hold(
    cpu: Device, monkeypatch: pytest.MonkeyPatch, error: str | None, level: str
) -> None:
    monkeypatch.setattr(card_memory, "spill_limit_bytes", lambda device: 11 * GIB)
    monkeypatch.setattr(card_memory, "_fill", lambda device, kept, upto: error)
    verdict = card_memory.spilling(cpu)
    assert verdict.level == level
    assert error or "Sysmem Fallback" in verdict.remedy


def test_attention_without_the_flash_kernel_is_a_warning(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = {64: ["aten::_scaled_dot_product_flash_attention_for_cpu"], 128: ["aten::_scaled_dot_product_attention_math"]}
    monkeypatch.setattr(card_numbers, "_kernels", lambda device, size, dropout: ran[size])
    verdict = card_numbers.attention(cpu)
    assert (verdict.level, "head size 128" in verdict.text, "64" in verdict.text) == ("warning", True, False)


@pytest.mark.parametrize(
    ("again", "loss", "norm", "level"),
    [
        (0, 1e-6, 1e-6, "ok"),
        (1, 1e-6, 1e-6, "error"),
        (0, 0.01, 1e-6, "error"),
        (0, float("nan"), 1e-6, "error"),
        (0, 1e-6, 0.2, "error"),
        (0, 1e-6, float("nan"), "error"),
    ],
)
def test_a_model_compiled_again_or_with_other_losses_or_gradients_is_a_problem(
    cpu: Device, monkeypatch: pytest.MonkeyPatch, again: int, loss: float, norm: float, level: str
) -> None:
    monkeypatch.setattr(card_runs, "find_compile_problem", lambda device: None)
    monkeypatch.setattr(card_runs, "_compile_and_compare", lambda device, changes: (again, loss, norm))
    assert card_runs.compiled_gpt2(cpu).level == card_runs.compiled_modern(cpu).level == level


def test_a_step_that_eager_training_skipped_says_nothing_of_the_compiled_one() -> None:
    assert card_runs._difference(3.0, math.inf) == card_runs._difference(3.0, math.nan) == 0.0
    assert math.isnan(card_runs._difference(math.nan, 3.0))
    assert card_runs._difference(3.3, 3.0) == pytest.approx(0.1)


def test_a_float16_overflow_is_skipped_and_the_next_updates_go_on(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here with the loss scaled as on a card."""
    assert card_numbers.scaler(cpu).level == "ok"
    real = card_numbers.build_engine

    def stuck(*args: Any) -> Any:
        engine = real(*args)
        engine.update = lambda *_: SimpleNamespace(applied=False)
        return engine

    monkeypatch.setattr(card_numbers, "build_engine", stuck)
    assert card_numbers.scaler(cpu).level == "error"


def test_matrices_that_are_not_made_orthogonal_are_a_problem(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert card_numbers.muon(cpu).level == "ok"
    monkeypatch.setattr(card_numbers, "orthogonalize", lambda matrices: matrices)
    assert card_numbers.muon(cpu).level == "error"


def test_memory_that_grows_is_a_warning(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([GIB, GIB, GIB, GIB + 64 * MIB])
    monkeypatch.setattr(card_memory, "STEPS", 4)
    monkeypatch.setattr(card_memory, "_host_bytes", lambda: next(taken))
    assert card_memory.growth(cpu).level == "ok"
    assert card_memory.growth(cpu).level == "warning"


def test_a_cache_that_forgets_is_a_problem(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LayerCache.attend

    def forgetful(self: LayerCache, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        return real(self, q, k, torch.zeros_like(v), scale)

    monkeypatch.setattr(LayerCache, "attend", forgetful)
    assert card_numbers.sampling(cpu).level == "error"


def test_numbers_that_are_none_are_never_right(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """They compare as false with everything, and `max` drops them where they do not come first."""
    real = card_numbers.token_loss
    monkeypatch.setattr(card_numbers, "token_loss", lambda *a, **k: real(*a, **k) * (float("nan") if a[3] else 1.0))
    assert card_numbers.loss_and_gradients(cpu).level == "error"
    monkeypatch.setattr(card_numbers, "orthogonalize", lambda matrices: matrices * float("nan"))
    monkeypatch.setattr(card_numbers.torch.linalg, "svdvals", lambda matrices: matrices)  # refuses such matrices
    assert card_numbers.muon(cpu).level == "error"
    monkeypatch.setattr(LayerCache, "attend", lambda self, q, k, v, scale=None: v * float("nan"))
    assert card_numbers.sampling(cpu).level == "error"


def test_two_processes_that_fail_say_their_last_word(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ended = SimpleNamespace(returncode=1, stderr="...\nncclUnhandledCudaError\n\n")
    monkeypatch.setattr(card_runs.subprocess, "run", lambda *_, **__: ended)
    verdict = card_runs.two_processes(cpu)
    assert (verdict.level, "ncclUnhandledCudaError" in verdict.text) == ("error", True)
    ended.returncode = 0
    assert card_runs.two_processes(cpu).level == "ok"


@pytest.mark.parametrize(
    ("slower", "larger", "level"), [(1.05, 1.0, "ok"), (1.5, 1.0, "warning"), (1.0, 1.3, "warning")]
)
def test_two_short_runs_must_be_in_the_ranges_of_the_calibrated_plan(
    monkeypatch: pytest.MonkeyPatch, slower: float, larger: float, level: str
) -> None:
    setting = Setting(card.CHECKED, 2, accumulation=4, dtype="float32", compile=False)
    speed, memory = from_calibration(setting, made()).tokens_per_s, memory_of(setting, made()).device
    seconds = setting.tokens_per_step / speed.value * slower
    row = card._against_plan(setting, made(), seconds, memory.value * larger)
    assert row["speed_error"] == pytest.approx(slower - 1)
    monkeypatch.setattr(card, "_short_run", lambda *_: row)
    line = card._plan_against_runs(CPU, machine(), made(), lambda stage: None)
    assert (line.verdict.level, len(line.verdict.values["runs"])) == (level, 2)


def machine() -> Machine:
    return Machine("AMD EPYC, 2 threads", "cpu", "float32", False, "2.13", 2, 2, GIB, GIB)


@pytest.mark.parametrize("as_json", [False, True])
def test_the_report_is_a_file_to_send_and_a_calibration_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, as_json: bool
) -> None:
    monkeypatch.setenv("GPTFIT_CACHE", str(tmp_path / "cache"))
    lines = (CardLine("muon", Verdict("ok", "fine"), 1.0), CardLine("spilling", Verdict("skipped", "a CPU"), 0.0))
    report = CardReport(machine(), lines, made(), 2.0)
    monkeypatch.setattr(card, "examine_card", lambda *_: report)
    out = tmp_path / "card.json"
    assert main(["doctor", "--card", "--device=cpu", f"--out={out}", *(["--json"] if as_json else [])]) == 0
    sent = json.loads(out.read_text())
    assert [check["level"] for check in sent["checks"]] == ["ok", "skipped"]
    assert newest(measured.read(), None) == made()
    said = capsys.readouterr().out
    assert json.loads(said) == sent if as_json else "1 ok, 0 warnings, 0 problems, 1 skipped" in said
    assert as_json or ("attach it" in said and said.endswith("\nnext: gptfit plan --gpu here\n"))
