"""The checks of `gptfit doctor`: each finds ok, a warning or a problem, and for the last two the remedy."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch.nn.functional import scaled_dot_product_attention

from gptfit.config import TrainConfig
from gptfit.dataset import data_folder
from gptfit.errors import GptfitError
from gptfit.plan.memory import predict
from gptfit.plan.setting import Setting
from gptfit.run.compiler import find_compile_problem
from gptfit.run.device import Device, find_device, has_bf16, has_nvidia_driver
from gptfit.run.files import make_run_folder
from gptfit.run.nvml import driver_version
from gptfit.run.setup import open_data
from gptfit.units import count, gib

Level = Literal["ok", "warning", "problem"]
CHECKPOINTS_ON_DISK = 4  # last, best, the one before, and the one being written
CHECKPOINT_BYTES_PER_WEIGHT = 12  # float32 weight and AdamW's two states


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    subject: str
    level: Level
    text: str
    remedy: str = ""


def examine(config: TrainConfig) -> list[Finding]:
    """Every check in the order a run would trip over it."""
    findings = [_python(), _torch_build()]
    try:
        device = find_device(config)
    except GptfitError as error:
        what, _, remedy = str(error).rpartition("; ")
        return [*findings, Finding("device", "problem", what, remedy), _data(config), _disk(config)]
    findings += [check(device) for check in DEVICE_CHECKS]
    return [*findings, _memory(config, device), _disk(config), _data(config)]


def _python() -> Finding:
    return Finding("python", "ok", sys.version.split()[0])


def _torch_build() -> Finding:
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else "CPU only"
    text = f"{torch.__version__}, built for {built_for}"
    if has_nvidia_driver() and torch.version.cuda is None:
        return Finding(
            "torch", "problem", f"{text}, but this machine has an NVIDIA card", "install a CUDA build of torch"
        )
    return Finding("torch", "ok", text)


def _device(device: Device) -> Finding:
    if device.kind == "cpu":
        where = "no NVIDIA card was found" if not has_nvidia_driver() else "the card is not used"
        return Finding("device", "warning", f"{device.name} ({where})", "fine for small models; large ones want a GPU")
    if device.kind == "cuda":
        return _card(device)
    return Finding("device", "ok", device.name)


def _card(device: Device) -> Finding:
    """The card, its driver, and whether this torch build has code for it."""
    major, minor = torch.cuda.get_device_capability(device.torch_device)
    text = f"{device.name}, compute capability {major}.{minor}, driver {driver_version() or 'unknown'}"
    # 'sm_86' -> 86; newer cards run older code through PTX, older cards run nothing.
    built_for = [int(name[3:]) for name in torch.cuda.get_arch_list() if name[:3] == "sm_" and name[3:].isdecimal()]
    if built_for and 10 * major + minor < min(built_for):
        return Finding("device", "problem", f"{text}: too old for this torch build", "install an older torch build")
    return Finding("device", "ok", text)


def _gpu_row(device: Device) -> Finding:
    if device.gpu is not None:
        return Finding("gpu table", "ok", f"{device.gpu.name}, {device.gpu.bf16_tflops} TFLOPS")
    if device.kind == "cpu":
        rate = device.measure_matmul_tflops()
        return Finding("gpu table", "ok", f"not a GPU; a {device.dtype} matrix product runs at {rate:.3g} TFLOPS here")
    return Finding(
        "gpu table", "warning", f"{device.name} is not in the table", "name the card it equals with --gpu=NAME"
    )


def _number_format(device: Device) -> Finding:
    if has_bf16(device.torch_device):
        return Finding("bfloat16", "ok", f"in hardware; dtype is {device.dtype}")
    # On a CPU that has no units for it, float32 is the right choice and nothing is wrong.
    level: Level = "ok" if device.kind == "cpu" else "warning"
    remedy = "" if level == "ok" else "float16 with loss scaling is used instead" if device.kind == "cuda" else ""
    return Finding("bfloat16", level, f"not in this hardware; dtype is {device.dtype}", remedy)


def _flash_attention(device: Device) -> Finding:
    """Runs the flash kernel alone; torch otherwise falls back in silence."""
    dtype = device.torch_dtype if device.kind != "cuda" or device.dtype != "float32" else torch.float16
    x = torch.ones(1, 2, 64, 64, dtype=dtype, device=device.torch_device)
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            scaled_dot_product_attention(x, x, x, is_causal=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:80]
        return Finding(
            "attention", "warning", f"no flash kernel ({reason})", "slower and with more memory, but it works"
        )
    return Finding("attention", "ok", "the flash kernel runs")


def _compiler(device: Device) -> Finding:
    problem = find_compile_problem(device)
    if problem:
        return Finding("compile", "warning", f"does not work: {problem}", "training is eager and slower, or install it")
    return Finding("compile", "ok", "torch.compile compiled and ran a small function")


DEVICE_CHECKS: tuple[Callable[[Device], Finding], ...] = (
    _device,
    _gpu_row,
    _number_format,
    _flash_attention,
    _compiler,
)


def _memory(config: TrainConfig, device: Device) -> Finding:
    """Free memory against what the plan expects of one window at a time."""
    free = device.free_memory_bytes()
    smallest = Setting(config.shape(), micro_batch=1, dtype=device.dtype, optimizer=config.optimizer)
    needed = predict(smallest).allocated.value
    text = f"{gib(free)} free, this model needs about {gib(needed)} with batch_size 1"
    if free < needed:
        return Finding("memory", "problem", text, "close other programs or use a smaller model; see `gptfit propose`")
    return Finding("memory", "ok", text)


def _disk(config: TrainConfig) -> Finding:
    try:
        folder = nearest_existing(Path(config.out_dir))
        if folder == Path(config.out_dir):
            make_run_folder(config.out_dir)
    except GptfitError as error:
        what, _, remedy = str(error).rpartition("; ")
        return Finding("disk", "problem", what, remedy)
    free = shutil.disk_usage(folder).free
    needed = CHECKPOINTS_ON_DISK * CHECKPOINT_BYTES_PER_WEIGHT * config.shape().n_weights
    text = f"{gib(free)} free at {folder}, a run keeps about {gib(needed)} of checkpoints"
    if free < needed:
        return Finding("disk", "problem", text, "make room or set another --out_dir")
    return Finding("disk", "ok", text)


def nearest_existing(folder: Path) -> Path:
    """Where a folder that does not exist yet will be created."""
    for candidate in (folder, *folder.resolve().parents):
        if candidate.is_dir():
            return candidate
    return Path()


def _data(config: TrainConfig) -> Finding:
    folder = data_folder(config.dataset, config.data_root)
    if not folder.is_dir():
        return Finding(
            "data", "warning", f"{folder} does not exist", f"`gptfit prepare SOURCE --out {folder}` makes it"
        )
    try:
        data = open_data(config)
    except GptfitError as error:
        what, _, remedy = str(error).rpartition("; ")
        return Finding("data", "problem", what, remedy)
    sizes = ", ".join(f"{count(file.n_tokens)} {name}" for name, file in data.files.items())
    return Finding("data", "ok", f"{folder}: {sizes} tokens, vocabulary {count(data.shape.vocab_size)}")
