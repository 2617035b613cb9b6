"""What a terminal of 80 columns, a pipe and NO_COLOR get."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rich.text import Text

from gptfit.cli import available_verbs, main
from gptfit.config.keys import KEYS, TrainConfig
from gptfit.logs.events import Step
from gptfit.verbs.common import console
from gptfit.verbs.train_view import LiveView, live_figures
from tests.made_logs import LARGE_LOG, SMALL_LOG, MakeRun

STEP = Step(
    step=123_455,
    loss=3.1234,
    ms=9344.0,
    tokens_per_s=134_100.0,
    mfu=0.823,
    memory_gib=11.2,
    epoch=12.34,
    power_w=199.0,
    temperature_c=71.0,
)


class Terminal(io.StringIO):
    """A screen that keeps what is written to it."""

    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> Terminal:
    """From inside a test: before it begins, pytest puts its own stdout back."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    return screen


def drawn(text: str) -> list[str]:
    """The lines as they stand on the screen, without what moves the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n").split("\n")


@pytest.mark.parametrize("columns", [60, 80, 100, 140])
def test_the_live_line_is_no_wider_than_the_terminal_and_is_not_cut(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    terminal = open_terminal(monkeypatch, columns)
    with LiveView(TrainConfig(max_iters=600_000, lr_decay_iters=600_000)) as view:
        view.report(STEP)
        view._bar.refresh()
    lines = [line.rstrip() for line in drawn(terminal.getvalue()) if "/600000" in line]
    assert lines
    assert max(map(len, lines)) <= columns
    assert all("…" not in line for line in lines)
    assert "loss 3.1234" in lines[-1]
    if columns >= 80:
        assert "left " in lines[-1]
        assert "tok/s" in lines[-1]


def test_figures_that_do_not_fit_are_left_out_the_least_first() -> None:
    assert live_figures(STEP, 600_000, 24) == "loss 3.1234"
    everything = live_figures(STEP, 600_000)
    assert everything.startswith("loss 3.1234  left ")
    assert everything.endswith("199 W 71 °C")


def test_no_color_means_plain_on_a_terminal_too(monkeypatch: pytest.MonkeyPatch, make_run: MakeRun) -> None:
    terminal = open_terminal(monkeypatch, 80)
    runs = [str(make_run("a")), str(make_run("b", ms=100.0))]
    assert main(["compare", *runs]) == 0
    assert "\x1b[" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    terminal.seek(0)
    terminal.truncate()
    assert main(["compare", *runs]) == 0
    assert "\x1b" not in terminal.getvalue()


def test_piped_tables_honour_columns_and_have_no_blanks_at_their_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["compare", str(SMALL_LOG), str(LARGE_LOG)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if line != line.rstrip()]
    assert not [line for line in lines if len(line) > 80]
    monkeypatch.delenv("COLUMNS")
    assert main(["compare", str(SMALL_LOG), str(LARGE_LOG)]) == 0
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("- ")]
    assert max(map(len, found)) > 120, "a sentence for grep stays on its line"


def test_a_piped_console_trims_what_any_verb_prints(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(Text("padded   \nand more  "))
    assert capsys.readouterr().out == "padded\nand more\n"


@pytest.mark.parametrize("verb", available_verbs())
def test_help_fits_eighty_columns(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


def test_what_is_listed_fits_eighty_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in (["configs"], ["keys"], ["keys", *KEYS], ["gpus"], ["gpus", "4070"], ["gpus", "T4"]):
        assert main(words) == 0
        assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []
