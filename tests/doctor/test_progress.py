"""`gptfit doctor` judges the config as given and shows that it is at work."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gptfit.config.keys import TrainConfig
from gptfit.doctor import checks
from gptfit.verbs.ticker import Ticker

MakeConfig = Callable[..., TrainConfig]


def memory_of(config: TrainConfig) -> str:
    return next(finding.message for finding in checks.examine(config) if finding.where == "memory")


def test_memory_is_that_of_the_batch_and_the_data_as_given(small_config: MakeConfig) -> None:
    one, many = (memory_of(small_config(batch_size=rows, compile=False)) for rows in (1, 512))
    assert "with batch_size 1" in one
    assert "with batch_size 512" in many
    assert one.split("about")[1] != many.split("about")[1]


def test_a_config_that_does_not_compile_is_not_held_up_by_the_compiler(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "find_compile_problem", lambda device: pytest.fail("was asked"))
    found = {finding.where: finding for finding in checks.examine(small_config(compile=False))}
    assert "compile = False" in found["compile"].message


def test_findings_come_one_by_one_and_slow_checks_are_announced(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    seen: list[str] = []

    def compiles(device: object) -> None:
        assert heard[-1] == "compiling a small function"
        assert {"python", "torch", "device"} <= set(seen), "what is known is said before the slow check is over"

    monkeypatch.setattr(checks, "find_compile_problem", compiles)
    for finding in checks.examine(small_config(), heard.append):
        seen.append(finding.where)
    assert seen[-1] == "data"


class _Stream(io.StringIO):
    """Lets a test wait for what is written."""

    def __init__(self, is_screen: bool) -> None:
        super().__init__()
        self.is_screen, self.written = is_screen, threading.Semaphore(0)

    def isatty(self) -> bool:
        return self.is_screen

    def flush(self) -> None:
        self.written.release()


@pytest.mark.parametrize("is_screen", [True, False])
def test_the_ticker_says_what_is_being_done_until_it_is_over(is_screen: bool) -> None:
    stream = _Stream(is_screen)
    with Ticker(stream, every_seconds=0.01) as ticker:
        ticker.now("compiling")
        for _ in range(3):
            assert stream.written.acquire(timeout=30)
        ticker.clear()
    text = stream.getvalue()
    if is_screen:
        assert text.count("\rcompiling, 0 s".replace("\r", "\r\033[K")) >= 3
        assert text.endswith("\r\033[K")
    else:
        assert text.startswith("compiling ....")
        assert text.endswith("\n")


def test_the_ticker_is_silent_about_what_is_quick(tmp_path: Path) -> None:
    stream = _Stream(False)
    with Ticker(stream, every_seconds=1000) as ticker:
        ticker.now("looking")
    assert stream.getvalue() == ""


def test_the_ticker_draws_a_bar_where_it_is_known_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ticker = Ticker(_Stream(True))
    ticker.now("computing merges", expected_s=40)
    assert ticker._line(10.0) == f"computing merges {'━' * 6}{' ' * 18}  25 %, about 30 s left"
    assert ticker._line(41.0).endswith(" 99 %, any moment now"), "an estimate is not the end"
    ticker.now("writing")
    assert ticker._line(3.0) == "writing, 3 s", "nobody knows"
