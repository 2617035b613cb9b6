"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
# Two test processes share two cores: one thread each. Set before anything imports torch or numpy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def repo() -> Path:
    return REPO


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real text, logs and facts that live beside the repository on the developers' machines."""
    folder = REPO.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs ../shared, which a stranger's clone does not have")
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tests measure must not reach the user's cache, nor the other way round."""
    monkeypatch.setenv("GPTFIT_CACHE", str(tmp_path_factory.getbasetemp() / "gptfit-cache"))
