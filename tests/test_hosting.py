"""What other machines run: the workflow files, the Dockerfile and the notebook, as far as they can be checked here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((REPO / ".github" / "workflows").glob("*.yml"))


def test_the_workflows_are_what_the_host_understands() -> None:
    words = ["--builtin-schema", "vendor.github-workflows", *map(str, WORKFLOWS)]
    done = subprocess.run([sys.executable, "-m", "check_jsonschema", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(WORKFLOWS) == 2


def test_the_workflow_tests_folders_that_exist_on_the_pythons_we_promise() -> None:
    text = (REPO / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    named = re.findall(r"\btests/[\w/.]+", text)
    assert named
    assert [name for name in named if not (REPO / name).exists()] == []
    oldest = re.search(r'requires-python = ">=([\d.]+)"', (REPO / "pyproject.toml").read_text(encoding="utf-8"))
    assert oldest is not None
    assert text.count(f'["{oldest[1]}", ') == 2


def test_the_dockerfile_copies_what_the_wheel_is_made_of() -> None:
    lines = (REPO / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert {"pyproject.toml", "README.md", "LICENSE", "configs", "gptfit", "constraints.txt"} == set(copied)
    assert [name for name in copied if not (REPO / name).exists()] == []
    hidden = (REPO / ".dockerignore").read_text(encoding="utf-8").split()
    assert not set(hidden) & set(copied)


def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell after the other in one namespace, as a kernel does."""
    notebook = json.loads((REPO / "notebooks" / "journey.ipynb").read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells):
        exec(compile(cell, f"cell {number}", "exec"), names)
    assert (tmp_path / "journey" / "run" / "ckpt.pt").exists()
    assert not any(cell.get("outputs") for cell in notebook["cells"]), "results belong to whoever runs it"
