"""What a terminal of 80 columns, a pipe and NO_COLOR get."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from rich.text import Text

from gptfit.cli import available_verbs, main
from gptfit.config.keys import KEYS, TrainConfig
from gptfit.doctor import checks
from gptfit.errors import Problem
from gptfit.logs.events import Step
from gptfit.verbs.common import console, wrapped
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
    assert not [line for line in lines if len(line) > 80 and not line.startswith("as a page: ")]
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
    for words in ([], ["configs"], ["keys"], ["keys", *KEYS], ["gpus"], ["gpus", "4070"], ["gpus", "T4"]):
        assert main(words) == 0
        assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


def test_a_sentence_is_broken_between_words_and_a_command_in_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    line = (
        f"warning  disk       {'long ' * 9}words here; run `gptfit prepare x.parquet --out data/x` again-and-again soon"
    )
    monkeypatch.delenv("COLUMNS", raising=False)
    assert wrapped(line, 20) == line, "in a pipe it stays one line for grep"
    monkeypatch.setenv("COLUMNS", "80")
    first, second = wrapped(line, 20).split("\n")
    assert first.endswith("words here; run")
    assert second == f"{' ' * 20}`gptfit prepare x.parquet --out data/x` again-and-again soon"
    assert " ".join(wrapped(line, 20).split()) == " ".join(line.split())
    assert "\0" not in wrapped(f"do `{'gptfit ' * 30}`", 20)


def test_doctor_breaks_its_findings_between_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    finding = Problem(
        "warning", "compile", "nothing here compiles, so that training is slower", "install " + "g++ " * 30
    )
    monkeypatch.setattr(checks, "examine", lambda config, stage: [finding])
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines).split()) == " ".join(f"warning compile {finding.line}".split())
    assert all(line.startswith(" " * 20) for line in lines[1:])


def test_what_data_verbs_say_is_broken_between_words_and_their_next_line_never(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = tmp_path / f"a-{'long-' * 12}name.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, again and again. " * 900, encoding="utf-8")
    commands = [
        ["prepare", str(text), "--tokenizer", "bytes", "--out", str(tmp_path / "data")],
        ["inspect", str(tmp_path / "data")],
        ["tokenizer", "train", str(text), "--vocab-size", "280", "--out", str(tmp_path / "t.json")],
    ]
    for words in commands:
        assert main(words) == 0
        lines = capsys.readouterr().out.splitlines()
        too_long = [line for line in lines if len(line) > 80 and not line.startswith("next: ")]
        assert all(len(max(line.split(), key=len)) > 60 for line in too_long), "only a path may be longer"
        assert [line for line in lines if line.startswith("next: ")][:1] or words[0] == "inspect"


def test_a_proposal_and_a_plan_fit_eighty_columns_uncut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in (["propose", "--hours", "12", "--data", "openwebtext"], ["plan", "--batch_size=64"]):
        main([*words, "--gpu", "4070"])
        printed = capsys.readouterr().out.splitlines()
        lines = [line for line in printed if not line.startswith("next: ")]  # a command is not broken
        assert len(lines) > 10
        assert [line for line in lines if len(line) > 80 or line != line.rstrip() or "…" in line] == []
