"""A command for a person to paste into a terminal: words with blanks in them are quoted as this system's shell wants."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable


def command(words: Iterable[object]) -> str:
    """One line of the words, numbers and paths among them."""
    texts = [str(word) for word in words]
    if os.name == "nt":
        from subprocess import list2cmdline

        return list2cmdline(texts)
    return shlex.join(texts)
