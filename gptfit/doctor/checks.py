"""The checks of `gptfit doctor`: each finds ok, a warning or a problem, and for the last two the remedy."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from gptfit.checkpoint.store import make_run_folder
from gptfit.config.keys import TrainConfig
from gptfit.dataset import data_folder, read_dataset
from gptfit.device.compiler import find_compile_problem
from gptfit.device.device import Device, find_device, has_bf16, has_nvidia_driver, missing_code
from gptfit.device.nvml import driver_version
from gptfit.errors import GptfitError, Level, Problem
from gptfit.plan.memory import predict
from gptfit.plan.resolve import setting_of
from gptfit.train.place import place_of
from gptfit.train.setup import open_data
from gptfit.units import count, gib

INSTALL_CUDA_BUILD = "install a CUDA build of torch: pytorch.org/get-started/locally shows the line for this system"
CHECKPOINTS_ON_DISK = 4  # last, best, the one before, and the one being written
CHECKPOINT_BYTES_PER_WEIGHT = 12  # float32 weight and AdamW's two states


def examine(config: TrainConfig, announce: Callable[[str], None] = lambda doing: None) -> Iterator[Problem]:
    """Every check of this config in the order a run would trip over it; `announce` hears of each before it begins."""
    yield _python()
    yield _torch_build()
    try:
        device = find_device(config)
    except GptfitError as error:
        yield from (error.as_problem("device"), _data(config), _disk(config))
        return
    for check in DEVICE_CHECKS:
        announce("checking the device")
        yield check(device)
    if config.compile:
        announce("compiling a small function")
        yield _compiler(device)
    else:
        yield Problem("ok", "compile", "compile = False in this config, so it was not tried")
    announce("reading the data")
    data = _data(config)
    yield _memory(config, device)
    yield _disk(config)
    yield data


def _python() -> Problem:
    return Problem("ok", "python", sys.version.split()[0])


def _torch_build() -> Problem:
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else "CPU only"
    text = f"{torch.__version__}, built for {built_for}"
    if has_nvidia_driver() and torch.version.cuda is None:
        return Problem("error", "torch", f"{text}, but this machine has an NVIDIA card", INSTALL_CUDA_BUILD)
    return Problem("ok", "torch", text)


def _device(device: Device) -> Problem:
    if device.kind == "cpu":
        where = "no NVIDIA card was found" if not has_nvidia_driver() else "the card is not used"
        return Problem("warning", "device", f"{device.name} ({where})", "fine for small models; large ones want a GPU")
    if device.kind == "cuda":
        return _card(device)
    return Problem("ok", "device", device.name)


def _card(device: Device) -> Problem:
    """The card, its driver, and whether this torch build has code for it."""
    major, minor = torch.cuda.get_device_capability(device.torch_device)
    text = f"{device.name}, compute capability {major}.{minor}, driver {driver_version() or 'unknown'}"
    if problem := missing_code(device.torch_device):
        return Problem("error", "device", f"{text}: {problem[0]}", problem[1])
    return Problem("ok", "device", text)


def _gpu_row(device: Device) -> Problem:
    if device.gpu is not None:
        return Problem("ok", "gpu table", f"{device.gpu.name}, {device.gpu.bf16_tflops} TFLOPS")
    if device.kind == "cpu":
        rate = device.measure_matmul_tflops()
        return Problem("ok", "gpu table", f"not a GPU; a {device.dtype} matrix product runs at {rate:.3g} TFLOPS here")
    return Problem(
        "warning", "gpu table", f"{device.name} is not in the table", "name the card it equals with --gpu=NAME"
    )


def _number_format(device: Device) -> Problem:
    if has_bf16(device.torch_device):
        return Problem("ok", "bfloat16", "; ".join(("in hardware", f"dtype is {device.dtype}", *device.notes)))
    # On a CPU that has no units for it, float32 is the right choice and nothing is wrong.
    level: Level = "ok" if device.kind == "cpu" else "warning"
    remedy = "" if level == "ok" else "float16 with loss scaling is used instead" if device.kind == "cuda" else ""
    return Problem(level, "bfloat16", f"not in this hardware; dtype is {device.dtype}", remedy)


def _flash_attention(device: Device) -> Problem:
    """Runs the flash kernel alone; torch otherwise falls back in silence."""
    dtype = device.torch_dtype if device.kind != "cuda" or device.dtype != "float32" else torch.float16
    x = torch.ones(1, 2, 64, 64, dtype=dtype, device=device.torch_device)
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            scaled_dot_product_attention(x, x, x, is_causal=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:80]
        return Problem(
            "warning", "attention", f"no flash kernel ({reason})", "slower and with more memory, but it works"
        )
    return Problem("ok", "attention", "the flash kernel runs")


def _compiler(device: Device) -> Problem:
    problem = find_compile_problem(device)
    if problem:
        return Problem("warning", "compile", f"does not work: {problem}", "training is eager and slower, or install it")
    return Problem("ok", "compile", "torch.compile compiled and ran a small function")


DEVICE_CHECKS: tuple[Callable[[Device], Problem], ...] = (
    _device,
    _gpu_row,
    _number_format,
    _flash_attention,
)


def _memory(config: TrainConfig, device: Device) -> Problem:
    """Free memory against what the plan expects of the config as it is, and of one window at a time."""
    free = device.free_memory_bytes()
    setting = setting_of(config, config.shape(_data_vocabulary(config)), place_of(device))
    needed, least = (predict(changed).allocated.value for changed in (setting, replace(setting, micro_batch=1)))
    text = f"{gib(free)} free, this model needs about {gib(needed)} with batch_size {config.batch_size}"
    if free < least:
        return Problem("error", "memory", text, "close other programs or use a smaller model; see `gptfit propose`")
    if free < needed:
        return Problem("warning", "memory", text, f"use a smaller batch_size; with 1 it needs {gib(least)}")
    return Problem("ok", "memory", text)


def _disk(config: TrainConfig) -> Problem:
    try:
        folder = nearest_existing(Path(config.out_dir))
        if folder == Path(config.out_dir):
            make_run_folder(config.out_dir)
    except GptfitError as error:
        return error.as_problem("disk")
    free = shutil.disk_usage(folder).free
    needed = CHECKPOINTS_ON_DISK * CHECKPOINT_BYTES_PER_WEIGHT * config.shape(_data_vocabulary(config)).n_weights
    text = f"{gib(free)} free at {folder}, a run keeps about {gib(needed)} of checkpoints"
    if free < needed:
        return Problem("error", "disk", text, "make room or set another --out_dir")
    return Problem("ok", "disk", text)


def _data_vocabulary(config: TrainConfig) -> int | None:
    """Of the data as it is; what is wrong with it is the data check's to say."""
    folder = data_folder(config.dataset, config.data_root)
    try:
        return read_dataset(folder).model_vocab_size if folder.is_dir() else None
    except GptfitError:
        return None


def nearest_existing(folder: Path) -> Path:
    """Where a folder that does not exist yet will be created."""
    for candidate in (folder, *folder.resolve().parents):
        if candidate.is_dir():
            return candidate
    return Path()


def _data(config: TrainConfig) -> Problem:
    folder = data_folder(config.dataset, config.data_root)
    if not folder.is_dir():
        return Problem(
            "warning", "data", f"{folder} does not exist", f"`gptfit prepare SOURCE --out {folder}` makes it"
        )
    try:
        data = open_data(config)
    except GptfitError as error:
        return error.as_problem("data")
    sizes = ", ".join(f"{count(file.n_tokens)} {name}" for name, file in data.files.items())
    return Problem("ok", "data", f"{folder}: {sizes} tokens, vocabulary {count(data.shape.vocab_size)}")
