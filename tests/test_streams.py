"""Streams that are closed, full, or of another alphabet: the command does what it can and never shows a traceback."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gptfit.cli import main
from gptfit.train.clock import RunClock

posix_only = pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`gptfit` in the line is this interpreter's."""
    command = line.replace("gptfit", f"{sys.executable} -m gptfit")
    return subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


@posix_only
@pytest.mark.parametrize("redirection", [">&-", "<&-", "2>&-", ">&- 2>&- <&-"])
def test_closed_streams_are_no_trouble(redirection: str) -> None:
    done = shell(f"gptfit gpus 4070 {redirection}")
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


@posix_only
def test_an_error_with_closed_streams_keeps_its_exit_code() -> None:
    assert shell("gptfit gpus nosuchcard >&- 2>&- <&-").returncode == 1


@posix_only
def test_a_file_opened_where_stdout_was_is_not_written_into(tmp_path: Path) -> None:
    """With 1 closed, the first file opened would get that number, and prints would land in it."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nfrom gptfit.cli import main\nmain(['gpus', '4070'])\n"
        f"print(os.open({str(tmp_path / 'data')!r}, os.O_CREAT | os.O_WRONLY), file=sys.stderr)\n"
    )
    done = shell(f"{sys.executable} {script} >&-")
    assert done.stderr.strip().splitlines()[-1] not in ("0", "1", "2")


@posix_only
def test_letters_that_the_screen_lacks_are_replaced() -> None:
    done = shell(
        "gptfit propose --help; gptfit gpus 'naïve — card'", PYTHONIOENCODING="ascii", LC_ALL="C", PYTHONUTF8="0"
    )
    assert "Traceback" not in done.stderr
    assert "UnicodeEncodeError" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_behind_the_output_is_one_line() -> None:
    done = shell("gptfit gpus > /dev/full")
    assert done.returncode == 1
    assert (
        done.stderr
        == "gptfit: cannot write the output: no space left on device; free some space and run the same command again\n"
    )


@posix_only
def test_a_reader_that_goes_away_is_no_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gptfit plan | head -1`: rich alone would end with exit code 1."""

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    assert main(["plan", "--gpu=4070"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("columns", ["0", "-5", "abc", "9" * 20, "1"])
def test_any_width_that_the_environment_says_is_taken(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["plan", "--gpu=4070"]) == 0
    assert "tokens/s" in capsys.readouterr().out.replace("\n", "") or columns == "1"


def test_a_folder_that_was_deleted_under_the_shell_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(os, "getcwd", gone)
    assert main(["train"]) == 1
    assert capsys.readouterr().err == "gptfit: the folder you are in has been deleted; cd to another one\n"


def test_a_system_without_more_threads_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("gptfit.verbs.plan.run", refuse)
    assert main(["plan"]) == 1
    assert "allows no more threads" in capsys.readouterr().err
    RunClock().start().stop()
    monkeypatch.setattr("threading.Thread.start", refuse)
    RunClock().start().stop()


def test_a_user_without_a_home_can_plan() -> None:
    environment = {
        key: value for key, value in os.environ.items() if key not in ("HOME", "XDG_CACHE_HOME", "GPTFIT_CACHE")
    }
    done = subprocess.run(
        [sys.executable, "-m", "gptfit", "plan", "--gpu=4070"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@posix_only
def test_a_rank_that_is_no_number_is_one_line(tmp_path: Path) -> None:
    done = shell(f"gptfit train --device=cpu --out_dir={tmp_path / 'out'}", RANK="abc")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "RANK" in done.stderr
