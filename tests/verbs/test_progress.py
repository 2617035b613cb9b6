"""Long steps say how far they are and how long the rest takes, on a terminal and nowhere else."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest

from gptfit.data.train_bpe import train_tokenizer
from gptfit.verbs.progress_line import ProgressLine
from gptfit.verbs.ticker import waiting
from gptfit.verbs.tune_view import time_line


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_says_how_much_is_done_and_how_long_the_rest_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, seconds = Screen(), iter([0.0, 30.0, 30.01, 60.0])
    monkeypatch.setenv("COLUMNS", "80")
    bar = ProgressLine("val tokens", screen, lambda: next(seconds))
    bar(25, 100)
    bar(26, 100)  # too soon to draw again
    drawn = screen.getvalue()
    assert drawn == f"\r\033[Kval tokens {'━' * 6}{' ' * 18}  25 %, 1 min 30 s left"
    bar(100, 100)
    assert screen.getvalue() == drawn + "\r\033[K", "the line is free again"


def test_what_is_said_when_a_bar_breaks_off_has_a_line_of_its_own() -> None:
    screen, seconds = Screen(), iter([0.0, 30.0])
    with ProgressLine("val tokens", screen, lambda: next(seconds)) as bar:
        bar(25, 100)
    assert screen.getvalue().endswith("left\r\033[K")
    with ProgressLine("nothing yet", screen := Screen()):
        pass
    assert screen.getvalue() == ""


def test_a_bar_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, seconds = Screen(), iter([0.0, 30.0])
    monkeypatch.setenv("COLUMNS", "30")
    ProgressLine("validation tokens", screen, lambda: next(seconds))(1, 100)
    assert len(screen.getvalue().removeprefix("\r\033[K")) == 29


def test_a_pipe_gets_no_bar() -> None:
    pipe = io.StringIO()
    bar = ProgressLine("x", pipe)
    bar(1, 2)
    bar(2, 2)
    assert pipe.getvalue() == ""


def test_what_takes_its_time_says_so_on_a_screen_until_there_is_something_to_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """tune looked at the device for a minute without a word."""
    monkeypatch.setattr("sys.stderr", screen := Screen())
    with waiting("looking at the device") as ticker:
        while not screen.getvalue():
            time.sleep(0.02)
        ticker.clear()
        assert screen.getvalue() == "\r\033[Klooking at the device, 1 s\r\033[K"


def test_tune_says_how_much_of_its_minutes_is_left() -> None:
    assert time_line(150.0, 600.0) == f"{'━' * 6}{' ' * 20} 7 min 30 s left at most"
    assert time_line(700.0, 600.0) == f"{'━' * 26} ends after this trial"


def test_training_a_tokenizer_tells_how_far_it_has_read(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"document {n}: to fit a model to a card, know the card" for n in range(3000)))
    told: list[tuple[int, int]] = []
    train_tokenizer([str(text)], tmp_path / "bpe.json", 300, on_progress=lambda *now: told.append(now))
    assert told == sorted(told), "never backwards"
    assert told[0] == (0, 1000)
    assert told[-1] == (1000, 1000)
