"""`gptfit doctor` finds what would stop a run, and says the remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gptfit.config.keys import TrainConfig
from gptfit.device import compiler
from gptfit.doctor import checks
from gptfit.doctor.checks import examine
from gptfit.errors import Problem

MakeConfig = Callable[..., TrainConfig]


@pytest.fixture
def findings(small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Problem]]:
    monkeypatch.setattr(checks, "find_compile_problem", lambda device: None)
    return lambda **changes: {finding.where: finding for finding in examine(small_config(**changes))}


def test_a_ready_machine_has_no_problem(findings: Callable[..., dict[str, Problem]]) -> None:
    found = findings()
    assert [name for name, finding in found.items() if finding.level == "error"] == []
    assert found["data"].message.endswith("5,000 train, 1,000 val tokens, vocabulary 65")
    assert list(found) == [
        "python",
        "torch",
        "device",
        "gpu table",
        "bfloat16",
        "attention",
        "compile",
        "memory",
        "disk",
        "data",
    ]


def test_broken_data_is_a_problem_with_a_remedy(
    findings: Callable[..., dict[str, Problem]], token_folder: Path
) -> None:
    np.full(5000, 99, dtype=np.uint16).tofile(token_folder / "train.bin")
    data = findings()["data"]
    assert data.level == "error"
    assert "token id 99 at position 0" in data.message
    assert "vocab_size" in data.fix


def test_missing_cuda_is_a_problem_and_the_rest_is_still_checked(findings: Callable[..., dict[str, Problem]]) -> None:
    found = findings(device="cuda:7")
    assert found["device"].level == "error"
    assert found["disk"].level == "ok"


def test_a_model_larger_than_memory_is_a_problem(
    findings: Callable[..., dict[str, Problem]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks.Device, "free_memory_bytes", lambda self: 1000)
    assert findings()["memory"].level == "error"


def test_a_machine_without_a_compiler_is_told_to_install_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from gptfit.device.device import find_device

    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    problem = compiler.find_compile_problem(find_device(TrainConfig(device="cpu")))
    assert problem == "there is no C++ compiler; install g++"
