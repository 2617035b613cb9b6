"""The plain lines of a captured terminal: encodings, colour codes, overwritten lines and wrapping undone."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from gptfit.errors import RunError
from gptfit.files import read_plain, reading_remedy, reason_of

T = TypeVar("T")

# Escape sequences a terminal acts on: CSI (colours, cursor), OSC (titles, links), and two-character ones. ECMA-48.
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),  # what `python train.py > log.txt` writes in Windows PowerShell
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# A terminal of 40 columns cuts nanochat's longest line (about 170 characters) into this many pieces.
MOST_PIECES = 5
MOST_BYTES = 2**33  # of a log that is read whole


def read_log_text(path: Path) -> str:
    """The whole file as text, or RunError when it is empty, unreadable or not text."""
    try:
        raw = read_plain(path, MOST_BYTES)
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({reason_of(error)})", fix=reading_remedy(error)) from None
    if not raw.strip():
        raise RunError(f"{path}: the log is empty", fix="nothing was written to it yet, or the redirect went elsewhere")
    for bom, encoding in _BOMS:
        if raw.startswith(bom):
            return raw.decode(encoding, errors="replace")
    if b"\0" in raw[:65536]:
        raise RunError(
            f"{path}: a binary file, not a log", fix="pass run.jsonl, its folder, or the text training printed"
        )
    return raw.decode("utf-8", errors="replace")


def clean_lines(text: str) -> list[str]:
    """Lines without escape codes; a carriage return ends a line, as each overwrite was a print of its own."""
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.split("\n")


def unwrapped(lines: list[str], start: int, parse: Callable[[str], T | None]) -> Iterator[tuple[T, int]]:
    """What `parse` makes of lines[start] joined with 1, 2, ... following lines, and how many were joined.

    A terminal wraps at its width, through words and numbers alike, so pieces are joined with nothing between.
    """
    joined = lines[start]
    for extra in range(1, MOST_PIECES):
        if start + extra >= len(lines) or not lines[start + extra]:
            return
        joined += lines[start + extra]
        found = parse(joined)
        if found is not None:
            yield found, extra
