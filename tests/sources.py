"""The package's own files, each read and parsed once for all tests that look at the code."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "gptfit"
FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(text_of(file))


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """Everything in a file, at any depth."""
    return tuple(ast.walk(parsed(file)))


def name_of(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()
