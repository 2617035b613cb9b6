"""A CPU that announces matrix tiles and dies by them trains without."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from gptfit.config.keys import TrainConfig
from gptfit.device import cpu_tiles
from gptfit.device.device import find_device

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def illegal_instruction() -> None:
    os.kill(os.getpid(), signal.SIGILL)


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setenv(cpu_tiles.LIMIT_VARIABLE, "")  # so that it is put back afterwards
    monkeypatch.delenv(cpu_tiles.LIMIT_VARIABLE)


def test_tiles_that_die_are_not_used(announced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_tiles, "_tile_product", illegal_instruction)
    device = find_device(TrainConfig(device="cpu"))
    assert os.environ[cpu_tiles.LIMIT_VARIABLE] == cpu_tiles.WITHOUT_TILES
    assert any("matrix tiles" in note for note in device.notes)


def test_tiles_that_work_are_left_alone(announced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_tiles, "_tile_product", lambda: None)
    assert not find_device(TrainConfig(device="cpu")).notes
    assert os.environ[cpu_tiles.LIMIT_VARIABLE] != cpu_tiles.WITHOUT_TILES


def test_another_error_of_the_product_is_no_reason(announced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_tiles, "_tile_product", lambda: 1 / 0)
    cpu_tiles.avoid_broken_tiles()
    assert not cpu_tiles.tiles_are_broken()


def test_a_limit_of_the_users_own_stays(announced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu_tiles.LIMIT_VARIABLE, "AVX2")
    monkeypatch.setattr(cpu_tiles, "_tile_product", illegal_instruction)
    cpu_tiles.avoid_broken_tiles()
    assert os.environ[cpu_tiles.LIMIT_VARIABLE] == "AVX2"


def test_a_16_bit_product_runs_on_this_machine() -> None:
    a = torch.ones(64, 64, dtype=torch.bfloat16)
    assert not cpu_tiles.dies(lambda: torch.mm(a, a))
