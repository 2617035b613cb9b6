"""eval.json beside a checkpoint: what `gptfit eval` found, for the model card and for scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gptfit import sane
from gptfit.checkpoint.loaded_model import LoadedModel
from gptfit.files import read_plain, write_whole

EVAL_FILE = "eval.json"


def save_results(opened: LoadedModel, results: dict[str, Any]) -> Path:
    """Newer results replace those of the same name; results of another checkpoint are dropped.

    An OSError where the disk refuses: also to show the earlier ones, which would be lost.
    """
    path = _file_of(opened)
    kept = {**(read_results(opened) or {}), **results}
    text = json.dumps({"checkpoint": _identity(opened), "results": kept}, indent=2, allow_nan=False) + "\n"
    write_whole(path, text.encode())
    return path


def read_results(opened: LoadedModel) -> dict[str, Any] | None:
    """What was found for this very checkpoint, or None: also where somebody changed the file into something else."""
    try:
        found = sane.mapping(json.loads(read_plain(_file_of(opened))), "eval.json")
        if found["checkpoint"] != _identity(opened):
            return None
        results = sane.mapping(found["results"], "results")
        return {task: _values(task, values) for task, values in results.items()}
    except (FileNotFoundError, ValueError, KeyError, RecursionError):
        return None


def _values(task: str, values: Any) -> dict[str, float | int | None]:
    found = sane.mapping(values, task)
    return {key: value if value is None else _finite(value, key) for key, value in found.items()}


def _finite(value: Any, key: str) -> float | int:
    found = sane.number(value, key, -1e18, 1e18)
    return value if isinstance(value, int) else found


def _file_of(opened: LoadedModel) -> Path:
    folder = opened.path if opened.path.is_dir() else opened.path.parent
    return folder / EVAL_FILE


def _identity(opened: LoadedModel) -> dict[str, Any]:
    return {"file": opened.path.name, "step": opened.checkpoint.iter_num, "weights": opened.shape.n_weights}
