"""Writes the file map in README.md from the files' own first lines, so that the map cannot lie.

`python tools/readme_map.py` rewrites it; `--check` only says whether it is current.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
START, END = "<!-- file map: written by tools/readme_map.py -->", "<!-- end of file map -->"


def file_map() -> str:
    package = REPO / "gptfit"
    lines = ["```text", "gptfit/"]
    lines += [_line(file, 2) for file in _modules(package)]
    for folder in ("data", "plan", "model", "run", "view", "verbs"):
        lines.append(f"  {folder + '/':<22}{_first_line(package / folder / '__init__.py')}")
        lines += [_line(file, 4) for file in _modules(package / folder)]
    return "\n".join([*lines, "```"])


def _modules(folder: Path) -> list[Path]:
    return sorted(f for f in folder.glob("*.py") if f.name != "__init__.py")


def _line(file: Path, indent: int) -> str:
    return f"{' ' * indent}{file.name:<{24 - indent}}{_first_line(file)}"


def _first_line(file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def main() -> int:
    readme = REPO / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    current = f"{before}{START}\n{file_map()}\n{END}{after}"
    if "--check" in sys.argv[1:]:
        return 0 if current == text else 1
    readme.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
