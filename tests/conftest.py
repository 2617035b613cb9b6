"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from gptfit.device import cpu_rate
from gptfit.files import cache_folder

REPO = Path(__file__).resolve().parent.parent
# Compiled once, not again by each of the many processes that tests start.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Two test processes share two cores: one thread each. Set before anything imports torch or numpy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Compiled code is kept between test runs, although each run has a gptfit cache of its own.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
# Started in the background or under nohup, a program rightly ignores these, and so would every command a test starts.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (getattr(signal, "SIGHUP", 0), signal.SIG_DFL)):
    if number and signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)
pytest_plugins = ["tests.small_runs", "tests.made_logs"]  # fixtures for every room


# A deadline is a timed assertion, and so is the check for slow examples; machines are noisy.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# A submission is judged by the same examples each time; every developer's own run draws new ones.
settings.register_profile("judged", settings.get_profile("untimed"), derandomize=True)
settings.load_profile("judged" if os.environ.get("CI") else "untimed")


TESTS_BETWEEN_FREEZES = 20


def pytest_configure() -> None:
    """As `find_device` does it, for tests that multiply without asking for a device."""
    from gptfit.device.cpu_tiles import avoid_broken_tiles  # with torch, which reads the number of threads

    avoid_broken_tiles()


def pytest_collection_finish() -> None:
    """What was imported stays: every run a test makes collects garbage, and need not look through all of it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def imported_later_stays_too(worker_counter: Iterator[int]) -> Iterator[None]:
    """The same of what tests import as they come: a tenth of a second for each of a run's collections."""
    yield
    if next(worker_counter) % TESTS_BETWEEN_FREEZES == 0:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def worker_counter() -> Iterator[int]:
    return itertools.count(1)


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


@pytest.fixture(autouse=True)
def known_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for this machine's CPU does not depend on how busy it is."""
    monkeypatch.setattr(cpu_rate, "product_rate", lambda: 100e9)
