"""What the harness must find: a command that writes its file in place and removes nothing."""

from __future__ import annotations

from pathlib import Path

from .commands import contents
from .harness import Command, Server

SCRIPT = """
import os, sys
out, half = sys.argv[1] + "/out.txt", sys.argv[1] + "/half.txt"
if not os.path.exists(out):
    open(half, "w").write("half")
    open(out, "w").write("whole")
    os.unlink(half)
"""


def careless_command() -> Command:
    def prepare(folder: Path, server: Server) -> None:
        (folder / "script.py").write_text(SCRIPT)

    return Command("careless", lambda folder: ["run-script", str(folder / "script.py"), str(folder)], prepare, contents)
