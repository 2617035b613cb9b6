"""A small Parquet file of real English from this Python installation: its reference manual and docstrings."""

from __future__ import annotations

import ast
import inspect
import io
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from gptfit.errors import DataError
from gptfit.files import write_whole

SHORTEST_DOCUMENT = 200  # characters; shorter docstrings teach little and are mostly boilerplate
ROWS_PER_GROUP = 500
# Tests and vendored code are long and repetitive; they would be most of the text.
SKIPPED_FOLDERS = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "__pycache__")
)


def write_stdlib_parquet(path: Path) -> int:
    """Writes FineWeb's two main columns, `text` and `url`; returns the number of documents.

    A file that holds the same already is left alone, date and all, so that `prepare` knows its work is done.
    """
    rows = [{"text": text, "url": name} for name, text in stdlib_documents()]
    if not rows:
        raise DataError(
            "this Python installation carries no documentation", fix="give `gptfit prepare` a file of your own"
        )
    made = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), made, row_group_size=ROWS_PER_GROUP, compression="zstd")
    if not (path.is_file() and path.read_bytes() == made.getvalue()):
        write_whole(path, made.getvalue())
    return len(rows)


def stdlib_documents() -> Iterator[tuple[str, str]]:
    """(name, text) of every topic of the reference manual, then of every documented module, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for name, text in sorted(_manual_topics(root / "pydoc_data" / "topics.py").items()):
        yield f"manual/{name}", text
    for file in sorted(_sources(root)):
        text = _docstrings(file)
        if len(text) >= SHORTEST_DOCUMENT:
            yield file.relative_to(root).as_posix(), text


def _manual_topics(file: Path) -> dict[str, str]:
    """The manual is stored as one dict literal; it is read as data, not imported."""
    for node in _parse(file).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics = ast.literal_eval(node.value)
            return {str(name): str(text) for name, text in topics.items()}
    return {}


def _sources(root: Path) -> Iterator[Path]:
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(set(inner) - SKIPPED_FOLDERS)
        for name in names:
            if name.endswith(".py") and not (folder.endswith("pydoc_data") and name == "topics.py"):
                yield Path(folder, name)


def _docstrings(file: Path) -> str:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(_parse(file)) if isinstance(node, kinds)]
    texts = [inspect.cleandoc(text) for node in nodes if (text := ast.get_docstring(node, clean=False))]
    return "\n\n".join(text for text in texts if text)


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])  # a missing or odd file is one document less
