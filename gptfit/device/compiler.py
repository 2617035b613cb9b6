"""torch.compile with a probe first: a machine without a working compiler trains eagerly and is told why."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from gptfit.device.device import Device
from gptfit.files import cache_folder
from gptfit.model.base import LanguageModel

REMEDIES = {
    "C++": "install g++",
    "C": "install a C compiler, e.g. apt install gcc",
    "headers": "install Python's headers, e.g. apt install python3-dev",
    "Triton": "install torch's CUDA build again, which brings it",
    "Triton on Windows": "pip install triton-windows",
}
# How a failed start of the compiler says what it missed -> the remedy's name.
MISSED_TOOLS = (
    ("Python.h", "headers"),
    ("Failed to find C compiler", "C"),
    ("cannot find -lcuda", "Triton"),
    ("No module named 'triton'", "Triton"),
    ("TritonMissing", "Triton"),
)
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
X86 = ("x86_64", "AMD64")
AVX2_BITS = 256
PROBE_SIZE = 256  # elements: enough for every vector unit to be used


def find_compile_problem(device: Device) -> str | None:
    """Why torch.compile cannot work here, or None after it really compiled and ran a small function."""
    if device.kind == "mps":
        return "torch.compile for Apple GPUs is experimental"
    if device.kind == "cpu" and not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")):
        return f"there is no C++ compiler; {REMEDIES['C++']}"
    if device.kind == "cuda" and find_spec("triton") is None:
        return f"there is no Triton; {REMEDIES['Triton on Windows' if sys.platform == 'win32' else 'Triton']}"
    keep_compiled_code()
    if device.kind != "cpu" or platform.machine() not in X86:
        return _probe_problem(device)
    # torch would first build and load a little program for each kind of vector unit there is, for ten seconds and more; the
    # probe is such a program for the best of them. Where that fails, the next is one that every compiler knows.
    import torch._inductor.config as inductor  # takes as long as torch itself, and eager runs need it not

    before = inductor.cpp.vec_isa_ok, inductor.cpp.simdlen
    problem: str | None = None
    for bits in (inductor.cpp.simdlen, AVX2_BITS):
        inductor.cpp.vec_isa_ok, inductor.cpp.simdlen = True, bits
        problem = _probe_problem(device)
        if problem is None:
            return None
        torch.compiler.reset()
    inductor.cpp.vec_isa_ok, inductor.cpp.simdlen = before
    return problem


def _probe_problem(device: Device) -> str | None:
    try:
        compiled = torch.compile(_probe)
        compiled(torch.ones(PROBE_SIZE, device=device.torch_device))
    # A broken toolchain fails in any of torch's layers; all of their errors are RuntimeErrors or OSErrors.
    except (RuntimeError, OSError, ImportError) as error:
        return _with_remedy(error)
    return None


def _with_remedy(error: Exception) -> str:
    """What failed and what to install, where the text says which tool was missed."""
    text, line = str(error), first_line(error)
    if sys.platform == "win32" and "riton" in text:
        return f"{line}; {REMEDIES['Triton on Windows']}"
    tool = next((tool for words, tool in MISSED_TOOLS if words in text), None)
    return f"{line}; {REMEDIES[tool]}" if tool else line


def first_line(error: Exception) -> str:
    """The compiler's errors are pages long; the first line says what failed, after one that says where."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:160]


def _probe(x: Tensor) -> Tensor:
    return torch.sin(x) * 2 + 1


def keep_compiled_code() -> None:
    """Cache compiled code where a reboot does not delete it; torch's default is the temporary folder."""
    if CACHE_VARIABLE not in os.environ:
        os.environ[CACHE_VARIABLE] = str(cache_folder() / "inductor")


def compile_model(
    model: LanguageModel, device: Device, fuses_loss: bool = True, by_blocks: bool = False
) -> Callable[[Tensor, Tensor], Tensor]:
    """The model as a fast function: on a CPU its blocks, on a card the whole of it unless blocks are gathered one by one.

    A chunked loss stays outside the graph: its memory is managed by hand.
    """
    if not by_blocks and device.kind != "cpu":
        return compile_whole(model, fuses_loss)
    model.loss_is_fused = device.kind != "cpu" and fuses_loss and bool(model.loss_chunk_tokens)
    return compile_blocks(model)


def compile_whole(model: LanguageModel, fuses_loss: bool = True) -> Callable[[Tensor, Tensor], Tensor]:
    """One graph; of the hidden states only where the loss is computed in chunks."""
    if model.loss_chunk_tokens:
        model.trunk = torch.compile(model.hidden)
        model.loss_is_fused = fuses_loss
        return model
    return torch.compile(model)


def compile_blocks(model: LanguageModel) -> LanguageModel:
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
