"""What OpenMP itself says it will do, where torch brings GNU's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gptfit.threads import ASLEEP, LOOKS, POLICY, SPINS

STARTED = "from gptfit.cli import main; main(['--version']); import torch"


def spins(**environment: str) -> str:
    plain = {name: value for name, value in os.environ.items() if name not in (POLICY, SPINS)}
    run = subprocess.run(
        [sys.executable, "-c", STARTED],
        env=plain | {"OMP_DISPLAY_ENV": "verbose"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = [line.split("'")[1] for line in run.stderr.splitlines() if SPINS in line]
    if not found:
        pytest.skip("torch has another OpenMP here")
    return found[0]


def test_a_waiting_thread_soon_gives_its_core_away() -> None:
    assert spins() == LOOKS


def test_what_the_user_wants_is_left_alone() -> None:
    assert spins(**{SPINS: "77"}) == "77"
    assert spins(**{POLICY: "ACTIVE"}) not in (LOOKS, "0")
    assert spins(**ASLEEP) == "0"
