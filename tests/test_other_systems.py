"""What other systems have and have not: files opened without changing line ends, no fork, no resource, no SIGKILL."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gptfit import files
from gptfit.files import FolderLock
from gptfit.train.faults import _watched, exit_code

from .sources import FILES, nodes, text_of

# Names of the standard library that Windows does not have.
POSIX_ONLY = {
    "os": {"fork", "sysconf", "getuid", "geteuid", "mkfifo", "killpg", "setsid", "pread", "pwrite", "O_NOFOLLOW"},
    "signal": {"SIGKILL", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGCONT", "alarm"},
}
POSIX_NAMES = set().union(*POSIX_ONLY.values())
POSIX_MODULES = {"fcntl", "resource", "termios", "pwd", "grp", "pty"}


GUARDS = ("win32", "sys.platform", "os.name", "ImportError", "# Windows")


def unasked_names(file: Path) -> list[str]:
    """`os.pread` only after hasattr, `resource` only in a function, branch or try that keeps Windows out of it."""
    asked = {
        node.args[1].value
        for node in nodes(file)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("hasattr", "getattr")
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
    }
    guarded = guarded_lines(file)
    found = []
    for node in nodes(file):
        if isinstance(node, ast.Attribute) and node.attr in POSIX_NAMES - asked:
            if node.attr in POSIX_ONLY.get(ast.unparse(node.value), ()) and node.lineno not in guarded:
                found.append(f"{file.name}:{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Import) and node.lineno not in guarded:
            found += [f"{file.name}:{node.lineno}: {name.name}" for name in node.names if name.name in POSIX_MODULES]
    return found


def guarded_lines(file: Path) -> set[int]:
    lines, found = text_of(file).splitlines(), set()
    for node in nodes(file):
        if isinstance(node, ast.FunctionDef | ast.If | ast.IfExp | ast.Try | ast.Assign):
            span = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if any(word in lines[number - 1] for number in span for word in GUARDS):
                found |= set(span)
    return found


def test_names_that_windows_lacks_are_asked_for_first(tmp_path: Path) -> None:
    careless = tmp_path / "careless.py"
    careless.write_text("import fcntl\nimport os\nos.fork()\n")
    assert unasked_names(careless) == ["careless.py:1: fcntl", "careless.py:3: os.fork"]
    partly = tmp_path / "partly.py"
    partly.write_text("import os\nif os.name != 'nt':\n    os.fork()\ndef other():\n    os.fork()\n")
    assert unasked_names(partly) == ["partly.py:5: os.fork"], "a guard speaks for its own branch"
    assert [line for file in FILES for line in unasked_names(file)] == []


def test_files_are_opened_as_bytes_everywhere() -> None:
    """Without O_BINARY Windows turns the byte 10 of a token into two bytes."""
    for file in (file for file in FILES if "os.open" in text_of(file)):
        for node in nodes(file):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != "os.open" or len(node.args) < 2:
                continue
            flags = ast.unparse(node.args[1])
            is_nothing = "devnull" in ast.unparse(node.args[0]) or "folder" in ast.unparse(node.args[0])
            assert "BINARY" in flags or is_nothing, f"{file.name}:{node.lineno}: {flags}"


def test_token_files_are_bytes_where_the_system_has_a_text_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a flag of its own for O_BINARY, as on Windows, every os.open of prepare's token files carries it."""
    import importlib

    import numpy as np

    from gptfit.data import bins

    flag, seen = 1 << 30, []
    original = os.open
    monkeypatch.setattr(os, "O_BINARY", flag, raising=False)

    def windows_open(path: str, flags: int, mode: int = 0o777) -> int:
        seen.append(flags)
        return original(path, flags & ~flag, mode)

    kept = {module: dict(vars(module)) for module in (files, bins)}  # a reload makes other classes of the same name
    try:
        importlib.reload(files)
        importlib.reload(bins)
        monkeypatch.setattr(os, "open", windows_open)
        written = bins.TokenFileWriter(tmp_path / "train.bin", 0)
        written.append(np.array([10, 2570, 13], np.uint16))
        written.close()
    finally:
        monkeypatch.undo()
        for module, names in kept.items():
            vars(module).update(names)
    assert seen
    assert all(flags & flag for flags in seen)
    assert (tmp_path / "train.bin.part").read_bytes() == np.array([10, 2570, 13], np.uint16).tobytes()


def test_a_system_without_hang_ups_is_watched_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(signal, "SIGHUP", raising=False)
    assert _watched() == [signal.SIGINT, signal.SIGTERM]
    assert (exit_code("SIGINT"), exit_code("SIGTERM"), exit_code("max_iters")) == (130, 143, 0)


def test_a_lock_is_a_file_and_a_second_process_is_told_whose(tmp_path: Path) -> None:
    """By filelock, which has a lock for every system; the old one of prepare did nothing on Windows."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom gptfit.files import FolderLock\nfrom gptfit.errors import GptfitError\n"
        "try:\n    FolderLock(Path(sys.argv[1]), 'training into', 'wait')\nexcept GptfitError as error:\n    print(error)"
    )
    with FolderLock(tmp_path, "training into", "wait"):
        said = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
        )
        assert f"process {os.getpid()} is training into this folder" in said.stdout
    assert not list(tmp_path.iterdir()), "a lock that was let go leaves nothing behind"
