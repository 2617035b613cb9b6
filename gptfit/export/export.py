"""Export: a finished model as a folder or file for other programs, checked before it gets its name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from gptfit.checkpoint.loaded_model import LoadedModel
from gptfit.errors import RunError
from gptfit.export.result import Exported
from gptfit.files import check_room, publish_tree, reason_of, remove_leftovers, remove_tree, temporary_name

BYTES_PER_WEIGHT = 4  # float32
FORMATS = ("hf", "gguf", "nanogpt")
DTYPES = ("float32", "float16")
FOR_NOW = "for-now"  # the name, but for its ending, of a folder that is written to be sent
SLACK_BYTES = 2**20  # code and card beside the tensors
BYTES_PER_TOKEN = 100  # of a vocabulary's files; GPT-2's take 70


def export(opened: LoadedModel, to: str, out: str | None = None, dtype: str = "float32") -> Exported:
    """Written under a temporary name, verified there, then renamed: what has the final name is whole and right."""
    target = Path(out) if out else _default_target(opened, to)
    _check_target(target, is_file=to == "gguf")
    temporary = temporary_name(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent, re.escape(target.name))
        beside = BYTES_PER_TOKEN * opened.tokenizer.vocab_size + SLACK_BYTES
        check_room(target.parent, BYTES_PER_WEIGHT * opened.shape.n_weights + beside, "the export")
        found = _write(opened, to, temporary, dtype)
        if target.is_dir():
            target.rmdir()  # empty, as checked
        publish_tree(temporary, target)
    # A failed write is an OSError from python, a SafetensorError or a RuntimeError from those that write tensors.
    except (OSError, RuntimeError, SafetensorError) as error:
        raise RunError(f"{target}: could not be written ({reason_of(error)})", fix="nothing was left behind") from None
    finally:
        remove_tree(temporary)
    return Exported(target, found.checks, found.notes)


@contextmanager
def exported_for_now(opened: LoadedModel, to: str, out: str | None = None) -> Iterator[Exported]:
    """An export that is gone afterwards, on the disk of the run, which has room for it; kept where `out` names a place."""
    if out:
        yield export(opened, to, out)
        return
    target = temporary_name(_default_target(opened, FOR_NOW))
    remove_leftovers(target.parent, rf"{FOR_NOW}(?:\.[0-9a-f-]+\.tmp)?")
    try:
        yield export(opened, to, str(target))
    finally:
        remove_tree(target)


def _write(opened: LoadedModel, to: str, path: Path, dtype: str) -> Exported:
    if to == "hf":
        from gptfit.export.hf import write_hf

        return write_hf(opened, path)
    if to == "gguf":
        from gptfit.export.gguf import write_gguf

        return write_gguf(opened, path, dtype)
    from gptfit.export.nanogpt import write_nanogpt

    return write_nanogpt(opened, path)


def _default_target(opened: LoadedModel, to: str) -> Path:
    folder = opened.path if opened.path.is_dir() else opened.path.parent
    return folder / ("model.gguf" if to == "gguf" else to)


def _check_target(target: Path, is_file: bool) -> None:
    if target.is_dir() and (is_file or any(target.iterdir())):
        what = "is a folder; name a file with --out" if is_file else "is not empty; choose another folder with --out"
        raise RunError(f"{target}: {what}")
    if target.exists() and not target.is_dir():
        raise RunError(f"{target}: exists", fix="move it away or choose another name with --out")
