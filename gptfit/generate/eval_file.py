"""eval.json beside a checkpoint: what `gptfit eval` found, for the model card and for scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gptfit.checkpoint.loaded_model import LoadedModel
from gptfit.files import write_whole

EVAL_FILE = "eval.json"


def save_results(opened: LoadedModel, results: dict[str, Any]) -> Path | None:
    """Newer results replace those of the same name; results of another checkpoint are dropped. None if read-only."""
    path = _file_of(opened)
    kept = {**(read_results(opened) or {}), **results}
    text = json.dumps({"checkpoint": _identity(opened), "results": kept}, indent=2, allow_nan=False) + "\n"
    try:
        write_whole(path, text.encode())
    except OSError:
        return None
    return path


def read_results(opened: LoadedModel) -> dict[str, Any] | None:
    """What was found for this very checkpoint, or None."""
    try:
        found = json.loads(_file_of(opened).read_text(encoding="utf-8"))
        return dict(found["results"]) if found["checkpoint"] == _identity(opened) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _file_of(opened: LoadedModel) -> Path:
    folder = opened.path if opened.path.is_dir() else opened.path.parent
    return folder / EVAL_FILE


def _identity(opened: LoadedModel) -> dict[str, Any]:
    return {"file": opened.path.name, "step": opened.checkpoint.iter_num, "weights": opened.shape.n_weights}
