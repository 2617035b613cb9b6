"""Writes docs/tutorial.md anew: runs the commands of its blocks in an empty folder and puts down what they print now.

python tools/tutorial.py            the whole journey, a few minutes
python tools/tutorial.py --plans    only what comes out the same everywhere: plans and proposals for a card, seconds

A block is ```console with one `$ command`; a comment before it says what may differ from one machine to the next:
nothing (the default), `numbers differ`, `words differ`. A ```python block with a title is a file the commands read.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from gptfit.cli import main as gptfit
from gptfit.data.stdlib_text import stdlib_documents

PAGE = Path(__file__).resolve().parent.parent / "docs" / "tutorial.md"
SOURCE = "library.parquet"
COLUMNS = "88"  # what fits beside a page's navigation
SHOWN_FOLDER = "/home/you/story"
BLOCK = re.compile(
    r"(?:<!-- (?P<kind>[a-z ]+) -->\n)?```console\n\$ (?P<command>(?:[^\n]*\\\n)*[^\n]*)\n(?P<output>.*?)```", re.DOTALL
)
FILE = re.compile(r'```python title="(?P<name>[^"]+)"\n(?P<text>.*?)```', re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One command of the page and what the page says it prints."""

    command: str
    output: str
    kind: str

    def differences(self, printed: str) -> list[str]:
        """What the page says and the command does not."""
        if self.kind == "words differ":
            return [] if printed.strip() else [self.command]
        if self.kind == "numbers differ":
            now = {_start(line) for line in printed.splitlines()}
            return [line for line in self.output.splitlines() if _start(line) not in now and not _is_rest(line)]
        return [] if printed == self.output else [*self.output.splitlines(), "is now:", *printed.splitlines()]


def blocks(page: str) -> list[Block]:
    return [Block(found["command"], found["output"], found["kind"] or "") for found in BLOCK.finditer(page)]


def files(page: str) -> dict[str, str]:
    return {found["name"]: found["text"] for found in FILE.finditer(page)}


def journey(
    page: str, folder: Path, instead: dict[str, str] | None = None, most_documents: int | None = None
) -> Iterator[tuple[Block, str]]:
    """Every block with what its command prints in `folder`; `instead` are other texts for some of the page's files."""
    write_source(folder / SOURCE, most_documents)
    write_files(page, folder, instead or {})
    for block in blocks(page):
        yield block, run(block.command, folder).replace(str(folder.resolve()), SHOWN_FOLDER)


def write_files(page: str, folder: Path, instead: dict[str, str]) -> None:
    for name, text in (files(page) | instead).items():
        (folder / name).write_text(text, encoding="utf-8")


def write_source(path: Path, most_documents: int | None) -> None:
    """The reader's Parquet file: this Python's manual and docstrings, or the first few of them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = [
        {"text": text, "url": name} for name, text in islice(stdlib_documents(), most_documents)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def run(command: str, folder: Path) -> str:
    """What a command prints on both streams, in `folder`; a failure it does not announce is an error here."""
    words = shlex.split(command.replace("\\\n", " "))
    words, filtered = (words[: words.index("|")], words[words.index("|") + 1 :]) if "|" in words else (words, [])
    assert words[0] == "gptfit", command
    os.environ.pop("COLUMNS", None)  # a pipe has none
    if not filtered:
        os.environ["COLUMNS"] = COLUMNS
    printed = watched(words, folder) if words[1] == "watch" else called(words, folder)
    return _filter(printed, filtered)


def called(words: list[str], folder: Path) -> str:
    """In this process, which has torch already."""
    out = io.StringIO()
    with chdir(folder), redirect_stdout(out), redirect_stderr(out):
        code = gptfit(words[1:])
    printed = re.sub(r"[^\n]*\r(?!\n)", "", out.getvalue())  # progress that was written over
    allowed = (0, 1) if words[1] == "plan" else (0,)  # 1: it does not fit, which is an answer
    assert code in allowed, f"{shlex.join(words)}: {printed}"
    return printed


def watched(words: list[str], folder: Path) -> str:
    """`watch` serves until Ctrl-C: its list is asked for once, then it is pressed."""
    server = subprocess.Popen(
        [sys.executable, "-m", "gptfit", *words[1:]], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    printed = server.stdout.readline() + server.stdout.readline()
    address = re.search(r"http://\S+", printed)
    assert address, printed
    with urllib.request.urlopen(f"{address[0]}api/runs", timeout=60) as answer:
        assert b"out-library" in answer.read()
    server.send_signal(signal.SIGINT)
    server.wait(timeout=60)
    server.stdout.close()
    return printed


def _filter(printed: str, words: list[str]) -> str:
    lines = printed.splitlines(keepends=True)
    match words:
        case []:
            return printed
        case ["grep", "-E", pattern]:
            return "".join(line for line in lines if re.search(pattern, line))
        case ["head", count]:
            return "".join(lines[: int(count.removeprefix("-"))])
    raise AssertionError(words)


def _start(line: str) -> str:
    """A line as far as it is the same everywhere: up to its first figure or colon."""
    return re.split(r"[\d:]", line, maxsplit=1)[0].strip()


def _is_rest(line: str) -> bool:
    """Of a sentence that was broken, where its figures made it too long."""
    return line.startswith(" " * 5)


def rewritten(page: str, folder: Path, only_plans: bool) -> str:
    if only_plans:
        write_files(page, folder, {})
        now = {block.command: run(block.command, folder) for block in blocks(page) if not block.kind}
    else:
        now = {block.command: printed for block, printed in journey(page, folder)}

    def replace(found: re.Match[str]) -> str:
        head = f"<!-- {found['kind']} -->\n" if found["kind"] else ""
        return f"{head}```console\n$ {found['command']}\n{now.get(found['command'], found['output'])}```"

    return BLOCK.sub(replace, page)


def main() -> None:
    only_plans = sys.argv[1:] == ["--plans"]
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(GPTFIT_CACHE=f"{folder}/cache", NO_COLOR="1")
        place = Path(folder) / "story"
        place.mkdir()
        page = rewritten(PAGE.read_text(encoding="utf-8"), place, only_plans)
        PAGE.write_text(page, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
