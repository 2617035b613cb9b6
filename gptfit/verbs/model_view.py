"""How sample, eval, export and chat open a model and what they say about it, on stderr so that a pipe gets the result alone."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

from gptfit.units import si
from gptfit.verbs.ticker import waiting

if TYPE_CHECKING:
    from gptfit.checkpoint.loaded_model import LoadedModel


def opened_model(name: str, data: str | None, device: str) -> LoadedModel:
    """With a sign of life: torch and the weights take their time."""
    with waiting(f"opening {name}"):
        from gptfit.checkpoint.loaded_model import open_model

        return open_model(name, data, device)


def describe(opened: LoadedModel) -> str:
    shape, checkpoint = opened.shape, opened.checkpoint
    step = f", step {checkpoint.iter_num:,}" if checkpoint.iter_num else ""
    loss = f", val loss {checkpoint.best_val_loss:.4f}" if _is_real(checkpoint.best_val_loss) else ""
    return (
        f"{opened.path}: {shape.arch}, {si(shape.parameters)} parameters, {shape.n_layer} x {shape.n_embd}{step}{loss}; "
        f"{opened.tokenizer.name} tokenizer; {opened.device.name}"
    )


def _is_real(loss: float) -> bool:
    """nanoGPT writes 1e9 before the first evaluation."""
    return math.isfinite(loss) and loss < 1e9


def note(line: str) -> None:
    """Broken between words on a terminal, but a command to paste is not; a file or pipe gets one line."""
    if sys.stderr.isatty() and not line.startswith("next: "):
        width = max(20, shutil.get_terminal_size().columns)
        line = textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
    print(line, file=sys.stderr, flush=True)
