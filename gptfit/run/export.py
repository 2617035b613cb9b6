"""Export: a finished model as a folder or file for other programs, checked before it gets its name."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from gptfit.errors import RunError
from gptfit.run.files import check_free_space
from gptfit.run.opened import Opened
from gptfit.wholefile import TEMPORARY, sync_folder

BYTES_PER_WEIGHT = 4  # float32
SLACK_BYTES = 16 * 1024**2  # tokenizer, code and card beside the tensors


@dataclass(frozen=True)
class Exported:
    """Where it is, and what was compared to know that it is right."""

    path: Path
    checks: tuple[str, ...]
    notes: tuple[str, ...] = ()


def export(opened: Opened, to: str, out: str | None = None) -> Exported:
    """Written under a temporary name, verified there, then renamed: what has the final name is whole and right."""
    target = Path(out) if out else _default_target(opened, to)
    _check_target(target, is_file=to == "gguf")
    temporary = target.with_name(target.name + TEMPORARY)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        check_free_space(target.parent, BYTES_PER_WEIGHT * opened.shape.n_weights + SLACK_BYTES, "the export")
        _remove(temporary)
        found = _write(opened, to, temporary)
        if target.is_dir():
            target.rmdir()  # empty, as checked
        os.replace(temporary, target)
    # A failed write is an OSError from python, a SafetensorError or a RuntimeError from those that write tensors.
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = str(error).splitlines()[0][:120]
        raise RunError(f"{target}: could not be written ({reason}); nothing was left behind") from None
    finally:
        _remove(temporary)
    sync_folder(target.parent)
    return Exported(target, found.checks, found.notes)


def _write(opened: Opened, to: str, path: Path) -> Exported:
    if to == "hf":
        from gptfit.run.export_hf import write_hf

        return write_hf(opened, path)
    if to == "gguf":
        from gptfit.run.export_gguf import write_gguf

        return write_gguf(opened, path)
    from gptfit.run.export_nanogpt import write_nanogpt

    return write_nanogpt(opened, path)


def _default_target(opened: Opened, to: str) -> Path:
    folder = opened.path if opened.path.is_dir() else opened.path.parent
    return folder / ("model.gguf" if to == "gguf" else to)


def _check_target(target: Path, is_file: bool) -> None:
    if target.is_dir() and (is_file or any(target.iterdir())):
        what = "is a folder; name a file with --out" if is_file else "is not empty; choose another folder with --out"
        raise RunError(f"{target}: {what}")
    if target.exists() and not target.is_dir():
        raise RunError(f"{target}: exists; move it away or choose another name with --out")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
