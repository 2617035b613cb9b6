"""torch.compile with a probe first: a machine without a working compiler trains eagerly and is told why."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gptfit.model.base import LanguageModel
from gptfit.run.device import Device

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def find_compile_problem(device: Device) -> str | None:
    """Why torch.compile cannot work here, or None after it really compiled and ran a small function."""
    if device.kind == "mps":
        return "torch.compile for Apple GPUs is experimental"
    if device.kind == "cpu" and not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")):
        return "there is no C++ compiler; install g++"
    keep_compiled_code()
    try:
        compiled = torch.compile(_probe)
        compiled(torch.ones(8, device=device.torch_device))
    # A broken toolchain fails in any of torch's layers; all of their errors are RuntimeErrors or OSErrors.
    except (RuntimeError, OSError, ImportError) as error:
        return first_line(error)
    return None


def first_line(error: Exception) -> str:
    """The compiler's errors are pages long; the first line says what failed, after one that says where."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:160]


def _probe(x: Tensor) -> Tensor:
    return torch.sin(x) * 2 + 1


def keep_compiled_code() -> None:
    """Cache compiled code where a reboot does not delete it; torch's default is the temporary folder."""
    if CACHE_VARIABLE not in os.environ:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        os.environ[CACHE_VARIABLE] = str(Path(base) / "gptfit" / "inductor")


def compile_model(model: LanguageModel, device: Device) -> Callable[[Tensor, Tensor], Tensor]:
    """The model as a fast function: on a CPU its blocks, on a card the whole of it.

    A chunked loss stays outside the graph: its memory is managed by hand.
    """
    if device.kind == "cpu":
        return _compile_blocks(model)
    if model.loss_chunk_tokens:
        model.trunk = torch.compile(model.hidden)
        return model
    return torch.compile(model)


def _compile_blocks(model: LanguageModel) -> LanguageModel:
    """Each block by itself: they share one piece of code, so that a first start takes the same time at any depth.

    A step was 1 to 3 % slower than in one graph (6 x 256, two cores). A card keeps that graph: the plan is fitted on it.
    """
    for block in model.transformer["h"].children():
        # Else the smaller last batch of an evaluation would leave training with slower code for any size of batch.
        block.compile(dynamic=False)
    if not model.dropout_rate:
        model.trunk = partial(_hidden_by_training_graph, model)
    return model


def _hidden_by_training_graph(model: LanguageModel, idx: Tensor) -> Tensor:
    """Without dropout evaluation computes what training does; code of its own would take as long to compile again."""
    with torch.enable_grad():
        hidden = model.hidden(idx)
    return hidden if torch.is_grad_enabled() else hidden.detach()
