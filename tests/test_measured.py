"""The cache of measured facts survives crashes, strangers and concurrent writers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gptfit import measured
from gptfit.errors import RunError
from gptfit.measured import MeasuredLoss, MeasuredSpeed
from gptfit.plan.setting import Setting, speed_key
from gptfit.shape import ModelShape

SHAPE = ModelShape(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304)
KEY = speed_key(Setting(SHAPE, 8), "NVIDIA GeForce RTX 4070")
SPEED = MeasuredSpeed(KEY, "2.9.0", 56_200.0, 145.8, ms_per_update=9.0, allocated_gib=6.2, time=1.0)
LOSS = MeasuredLoss("fineweb", "gpt2", 123_587_328, 2_000_000_000, 1_000_000_000, "gpt2", "adamw", 3.51)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = measured.append([SPEED, LOSS], tmp_path / "deep" / "measured.jsonl")
    assert measured.read(path) == measured.Measurements((SPEED,), (LOSS,))


def test_no_file_is_an_empty_answer(tmp_path: Path) -> None:
    assert measured.read(tmp_path / "none") == measured.Measurements()


def test_the_newest_timing_of_a_setting_wins(tmp_path: Path) -> None:
    newer = replace(SPEED, tokens_per_s=57_000.0, time=2.0)
    found = measured.read(measured.append([newer, SPEED], tmp_path / "m")).speed(KEY)
    assert found == newer


def test_another_block_is_another_setting() -> None:
    modern = replace(SHAPE, arch="modern")
    keys = [speed_key(Setting(shape, 8, optimizer="muon"), "x") for shape in (modern, replace(modern, smear=False))]
    assert keys[0].ingredients == ""
    assert keys[1].ingredients == "smear=False"


def test_another_micro_batch_is_another_setting(tmp_path: Path) -> None:
    cache = measured.read(measured.append([SPEED], tmp_path / "m"))
    assert cache.speed(replace(KEY, micro_batch=16)) is None


def test_a_line_cut_by_a_crash_loses_only_itself(tmp_path: Path) -> None:
    path = measured.append([SPEED], tmp_path / "m")
    path.write_bytes(path.read_bytes() + b'{"measured": "speed", "ver')
    measured.append([LOSS], path)
    assert measured.read(path) == measured.Measurements((SPEED,), (LOSS,), skipped=1)


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe",
        b"[1]",
        b"null",
        b'{"measured": "speed"}',
        b'{"measured": "speed", "version": 1, "key": 3}',
        json.dumps({**measured._to_json(SPEED), "tokens_per_s": 0}).encode(),
        json.dumps({**measured._to_json(LOSS), "val_loss": "low"}).encode(),
        json.dumps({**measured._to_json(LOSS), "version": 2}).encode(),
    ],
)
def test_a_line_that_makes_no_sense_is_counted_and_skipped(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "m").write_bytes(line + b"\n")
    assert measured.read(tmp_path / "m") == measured.Measurements(skipped=1)


def test_a_key_of_a_later_version_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "m").write_text(json.dumps({**measured._to_json(SPEED), "watts": 200}) + "\n")
    assert measured.read(tmp_path / "m").speeds == (SPEED,)


def test_the_cache_moves_with_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTFIT_CACHE", str(tmp_path))
    assert measured.cache_file() == tmp_path / "measured.jsonl"
    monkeypatch.delenv("GPTFIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert measured.cache_file() == tmp_path / "x" / "gptfit" / "measured.jsonl"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="GPTFIT_CACHE"):
        measured.append([SPEED], tmp_path / "file" / "m")
