"""A wheel, unpacked into an empty environment outside the repository, without torch: what works and what is said."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from gptfit.install import TRAIN_EXTRA, install_line, missing_library

REPO = Path(__file__).resolve().parent.parent
# Where the other libraries are found, with torch and what comes with it out of sight unless a test wants it.
NO_TORCH = f"""
import os, sys
from importlib.abc import MetaPathFinder
class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {TRAIN_EXTRA!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
if "WITH_TORCH" not in os.environ:
    sys.meta_path.insert(0, Absent())
"""
# Every command in one process, its exit code after it.
COMMANDS = """
import sys
from gptfit.cli import main
for words in {commands}:
    print("$", *words, flush=True)
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    print("EXIT", code, flush=True)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of the empty environment."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=REPO,
        check=True,
        capture_output=True,
    )
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "env"), "platbase": str(folder / "env")}))
    zipfile.ZipFile(wheel).extractall(site)
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (site / "sitecustomize.py").write_text(NO_TORCH)
    return folder / "env" / "bin" / "python"


def run(python: Path, folder: Path, *commands: list[str]) -> list[tuple[str, int]]:
    """What each command printed, stderr among it, and its exit code."""
    done = subprocess.run(
        [str(python), "-c", COMMANDS.format(commands=list(commands))],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
    )
    parts = done.stdout.split("\nEXIT ")
    assert len(parts) == len(commands) + 1, done.stdout
    codes = [int(part.splitlines()[0]) for part in parts[1:]]
    return list(zip(parts[:-1], codes, strict=True))


@pytest.mark.skipif(sys.platform == "win32", reason="the environment's python has another place there")
def test_all_but_training_works_from_a_wheel_without_torch(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("To fit a model to a card, know the card.\n\n" * 2000)
    log = (REPO / "tests" / "logs" / "small").glob("*")
    commands = [
        ["--version"],
        ["plan", "--gpu", "4070"],
        ["inspect", "text.txt"],
        ["prepare", "text.txt", "--tokenizer", "bytes", "--out", "data/mine"],
        ["propose", "--gpu", "4070", "--data", "data/mine", "--hours", "1", "--write", "mine.py"],
        ["plan", "mine.py", "--gpu", "4070"],
        [
            "compare",
            *sorted(str(path) for path in log if path.suffix == ".txt"),
            "--gpu",
            "4070",
            "--html",
            "page.html",
        ],
        ["configs"],
        ["gpus", "4070"],
        ["keys", "n_layer"],
    ]
    for words, (printed, code) in zip(commands, run(installed, tmp_path, *commands), strict=True):
        assert code == 0, f"{words}: {printed}"
    assert (tmp_path / "page.html").stat().st_size > 100_000, "plotly's code is inside the page"


@pytest.mark.skipif(sys.platform == "win32", reason="the environment's python has another place there")
@pytest.mark.parametrize("verb", ["train", "sample", "doctor", "quickstart"])
def test_a_missing_torch_is_one_line_with_the_command(installed: Path, tmp_path: Path, verb: str) -> None:
    (tmp_path / "run").mkdir()
    words = [verb] if verb != "sample" else [verb, "run", "--prompt", "x"]
    ((printed, code),) = run(installed, tmp_path, words)
    assert code == 1
    assert printed.splitlines()[1:] == [
        f"gptfit: torch is not installed, and this command needs it; {install_line(sys.platform)}"
    ]


@pytest.mark.slow  # six commands that each import torch
@pytest.mark.skipif(sys.platform == "win32", reason="the environment's python has another place there")
def test_a_wheel_in_an_empty_folder_runs_quickstart(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(installed), "-m", "gptfit", "quickstart", "--steps", "2"],
        cwd=tmp_path,
        env={**os.environ, "WITH_TORCH": "1", "GPTFIT_CACHE": str(tmp_path / "cache"), "COLUMNS": "80"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "quickstart" / "run" / "report.html").is_file()
    assert '  gptfit propose --gpu "RTX 4070" --data data/mine --hours 12 --write configs/mine.py' in done.stdout, (
        "a command to paste stays on one line"
    )


def test_a_module_of_ours_that_is_missing_is_not_put_down_to_the_user() -> None:
    assert missing_library(ModuleNotFoundError("no", name="gptfit.trian")) is None
    assert missing_library(ModuleNotFoundError("no", name="torch.nn")) is not None


def test_windows_is_told_where_the_cuda_build_is() -> None:
    assert "pytorch.org" in install_line("win32")
    assert "pytorch.org" not in install_line("linux")


def test_the_train_extra_is_what_the_words_say() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [requirement.partition(">")[0] for requirement in project["optional-dependencies"]["train"]]
    assert tuple(named) == TRAIN_EXTRA
    assert not set(named) & {requirement.partition(">")[0] for requirement in project["dependencies"]}
