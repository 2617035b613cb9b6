"""The only file that knows cpu, cuda and mps: name, peak rate, dtype, autocast, clocks and memory."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from gptfit.config.check import NEEDED_DTYPES
from gptfit.config.keys import TrainConfig
from gptfit.device.cpu_tiles import avoid_broken_tiles, tiles_are_broken
from gptfit.device.host_memory import free_host_bytes, limit_host_bytes, peak_host_bytes, reset_peak_host_bytes
from gptfit.device.lifted_products import lift_slow_products
from gptfit.errors import DeviceError
from gptfit.gpus import GPU, find, find_or_none

SPILL_MARGIN_BYTES = 512 * 1024**2  # left to the desktop, which grows while a run is on
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch's name for it, and its older one
OSRELEASE = Path("/proc/sys/kernel/osrelease")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BF16_CAPABILITY = (8, 0)  # Ampere is the first NVIDIA generation with bfloat16 units
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192, "mps": 4096}  # large enough to reach the full rate


@dataclass(frozen=True)
class Device:
    """Where a run computes, and in which number format."""

    torch_device: torch.device
    name: str
    dtype: str  # float32 | bfloat16 | float16
    gpu: GPU | None = None
    notes: tuple[str, ...] = ()
    baseline_bytes: int = 0  # in use on the card once this process has its context and before anything is there

    @property
    def kind(self) -> str:
        return self.torch_device.type

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def needs_scaler(self) -> bool:
        return self.dtype == "float16"

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.dtype == "float32":
            return contextlib.nullcontext()
        if self.kind == "cpu":
            lift_slow_products()
        return torch.autocast(self.kind, dtype=self.torch_dtype)

    def put(self, tensor: Tensor) -> Tensor:
        """Onto the device, without waiting where the hardware can copy on its own."""
        if self.kind == "cuda":
            return tensor.to(self.torch_device, non_blocking=True)
        return tensor.to(self.torch_device)

    def pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self.kind == "cuda" else tensor

    def synchronize(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize(self.torch_device)
        elif self.kind == "mps":
            torch.mps.synchronize()

    def seed(self, value: int) -> None:
        """As torch.manual_seed, for the CPU and this device alone: that one notes the caller's whole stack for every
        kind of device that was never started, which takes longer than a small step."""
        torch.default_generator.manual_seed(value)
        if self.kind == "cuda":
            torch.cuda.manual_seed(value)  # of the current one, which `find_device` set
        elif self.kind == "mps":
            torch.mps.manual_seed(value)

    def reset_peak_memory(self) -> None:
        if self.kind == "cuda":
            torch.cuda.reset_peak_memory_stats(self.torch_device)
        elif self.kind == "cpu":
            reset_peak_host_bytes()

    def peak_memory_bytes(self) -> int:
        """Since the last reset: what torch allocated on a card, the whole process on a CPU."""
        if self.kind == "cuda":
            return torch.cuda.max_memory_allocated(self.torch_device)
        return torch.mps.driver_allocated_memory() if self.kind == "mps" else peak_host_bytes()

    def free_memory_bytes(self) -> int:
        if self.kind == "cuda":
            return torch.cuda.mem_get_info(self.torch_device)[0]
        if self.kind == "mps":
            return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return free_host_bytes()

    def held_bytes(self) -> int:
        """What torch's allocator holds already and can give to tensors."""
        if self.kind == "cuda":
            return torch.cuda.memory_reserved(self.torch_device)
        return torch.mps.driver_allocated_memory() if self.kind == "mps" else 0

    def peak_reserved_bytes(self) -> int | None:
        """What torch's allocator held at its peak since the last reset; only a card has one."""
        return torch.cuda.max_memory_reserved(self.torch_device) if self.kind == "cuda" else None

    def peak_device_bytes(self, context_bytes: int = 0) -> int:
        """The whole process with context and libraries: on a card its context, and what came since that was made."""
        if self.kind != "cuda":
            return self.peak_memory_bytes()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        reserved = torch.cuda.max_memory_reserved(self.torch_device)
        given_back = reserved - torch.cuda.memory_reserved(self.torch_device)
        # Another program may have ended meanwhile; torch's own blocks are there for certain.
        return context_bytes + max(total - free + given_back - self.baseline_bytes, reserved)

    def total_memory_bytes(self) -> int:
        """All memory of the card; on a CPU what is free, because other programs use the rest."""
        if self.kind == "cuda":
            return torch.cuda.mem_get_info(self.torch_device)[1]
        return self.free_memory_bytes()

    def limit_memory(self, limit_bytes: int) -> None:
        """Make this process run out at `limit_bytes` instead of the machine."""
        if self.kind == "cuda":
            most = min(limit_bytes, spill_limit_bytes(self.torch_device) or limit_bytes)
            fraction = min(1.0, most / self.total_memory_bytes())
            torch.cuda.set_per_process_memory_fraction(fraction, self.torch_device)
        elif self.kind == "cpu":
            limit_host_bytes(limit_bytes)

    def release_memory(self) -> None:
        """Give cached blocks back, so that a smaller attempt finds one piece."""
        if self.kind == "cuda":
            torch.cuda.empty_cache()
        elif self.kind == "mps":
            torch.mps.empty_cache()

    def peak_rate(self) -> tuple[float, str]:
        """(TFLOPS, basis): the data sheet's figure for this number format, else a measured matrix product."""
        if self.gpu is not None:
            sheet = self.gpu.bf16_tflops if self.dtype != "float32" else self.gpu.tf32_tflops or self.gpu.fp32_tflops
            if sheet:
                return sheet, f"data sheet of {self.gpu.name}"
        return self.measure_matmul_tflops(), f"measured {self.dtype} matrix product"

    def measure_matmul_tflops(self) -> float:
        return _matmul_tflops(self.torch_device, self.torch_dtype)


@cache
def _matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """The best of a few square products: the rate nothing on this device can beat for long."""
    size = MATMUL_SIZE[device.type]
    a = torch.ones(size, size, dtype=dtype, device=device)
    seconds = []
    for _ in range(8):
        began = time.perf_counter()
        torch.mm(a, a)[0, 0].item()  # reading one number waits for the product
        seconds.append(time.perf_counter() - began)
    return float(2 * size**3 / min(seconds) / 1e12)


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Float32 products with all of their digits, where training lets a card round them to TF32's eleven bits."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def find_device(config: TrainConfig, local_rank: int | None = None) -> Device:
    """Resolve `device`, `dtype` and `gpu`; an impossible wish is one line with the fix."""
    grow_segments()
    avoid_broken_tiles()
    torch_device = _torch_device(config.device, local_rank)
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
        limit = spill_limit_bytes(torch_device)
        if limit is not None:
            torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info(torch_device)[1], torch_device)
        # Float32 products through TF32, as nanoGPT sets it.
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    gpu, name = _gpu_row(config.gpu, torch_device)
    wish = NEEDED_DTYPES.get(config.matmul, config.dtype) if config.dtype == "auto" else config.dtype
    dtype, notes = _dtype(wish, torch_device, gpu)
    if torch_device.type == "cpu" and dtype != "float32" and tiles_are_broken():
        notes = (*notes, "this CPU announces matrix tiles (AMX) that do not run here; its AVX-512 computes instead")
    choose_attention(config.attention, torch_device, DTYPES[dtype])
    return Device(torch_device, name, dtype, gpu, notes, _used_bytes(torch_device))


# Which of torch's switches each choice of `attention` leaves on.
ATTENTION_KERNELS = {"flash": ("flash",), "cudnn": ("cudnn",), "math": ("math",)}


def choose_attention(wish: str, device: torch.device, dtype: torch.dtype) -> None:
    """For this process from now on, compiled code too. A kernel that does not run here is refused before training starts."""
    switches = {
        "flash": torch.backends.cuda.enable_flash_sdp,
        "cudnn": torch.backends.cuda.enable_cudnn_sdp,
        "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
        "math": torch.backends.cuda.enable_math_sdp,
    }
    for name, switch in switches.items():
        switch(name in ATTENTION_KERNELS.get(wish, switches))
    if wish == "auto":
        return
    problem = None if wish != "cudnn" or device.type == "cuda" else "cuDNN is for NVIDIA cards"
    if problem is None:
        x = torch.zeros(1, 2, 64, 64, device=device, dtype=dtype, requires_grad=True)
        try:
            torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
    if problem is not None:
        choose_attention("auto", device, dtype)
        words = f"attention = '{wish}' does not run on {device.type} in {str(dtype).removeprefix('torch.')}: {problem}"
        raise DeviceError(words, fix="use attention = 'auto'")


def _used_bytes(device: torch.device) -> int:
    """Of a card, by CUDA's count; NVML's has driver memory besides, and one must not be taken from the other."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def is_wsl() -> bool:
    return OSRELEASE.is_file() and "microsoft" in OSRELEASE.read_text(encoding="utf-8").lower()


def grow_segments() -> None:
    """Let torch's allocator grow its blocks in place: less memory is held that nothing lives in.

    Read when the allocator first works, so before anything is on the card. Native Linux only: WSL2's driver refuses it
    (pytorch/pytorch#192330), Windows does not have it. A user's own setting stays.
    """
    if sys.platform == "linux" and not is_wsl() and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        for name in ALLOCATOR_VARIABLES:
            os.environ[name] = "expandable_segments:True"


def spill_limit_bytes(device: torch.device) -> int | None:
    """Where the driver lends main memory instead of saying that the card is full (Windows, WSL2), what is free less a
    margin; None where running out is an error that training recovers from."""
    if sys.platform != "win32" and not is_wsl():
        return None
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    return int(min(max(free + held - SPILL_MARGIN_BYTES, total // 16), total))


def _torch_device(wish: str, local_rank: int | None) -> torch.device:
    kind = wish.partition(":")[0]
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        wish = kind
    if kind == "cuda" and not torch.cuda.is_available():
        raise DeviceError(_no_cuda(wish))
    if kind == "mps" and not torch.backends.mps.is_available():
        raise DeviceError("device = 'mps' needs a Mac with Apple silicon", fix="use --device=auto")
    if kind == "cuda" and local_rank is not None:
        wish = f"cuda:{local_rank}"
    device = torch.device(wish)
    if kind == "cuda":
        device = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
        if device.index >= torch.cuda.device_count():
            raise DeviceError(f"device = '{wish}' does not exist", fix=f"this machine has {torch.cuda.device_count()}")
    return device


def missing_code(device: torch.device) -> tuple[str, str] | None:
    """What is wrong where this torch build cannot run on the card, and the remedy.

    Code of the card's generation runs, of no later version than its own ('sm_86' on 8.9); so does what the driver compiles
    ('compute_90' on 12.0).
    """
    major, minor = torch.cuda.get_device_capability(device)
    kinds = [name.rstrip("af").partition("_") for name in torch.cuda.get_arch_list()]
    code = [divmod(int(number), 10) for kind, _, number in kinds if kind == "sm"]
    compiled_here = [divmod(int(number), 10) for kind, _, number in kinds if kind == "compute"]
    runs = any(of[0] == major and of[1] <= minor for of in code) or any(of <= (major, minor) for of in compiled_here)
    if runs or not code:
        return None
    is_old = (major, minor) < min(code)
    who_has = "an older torch build has" if is_old else "pytorch.org/get-started/locally has a build with"
    return "this torch build has no code for this card", f"{who_has} code for compute capability {major}.{minor}"


def _no_cuda(wish: str) -> str:
    """The usual cause first: a CPU-only torch wheel on a machine that has a card."""
    head = f"device = '{wish}' but torch {torch.__version__} sees no CUDA"
    if torch.version.cuda is None:
        card = " although an NVIDIA card is here" if has_nvidia_driver() else ""
        return f"{head}: this is a CPU-only build{card}; install a CUDA build of torch (pytorch.org shows the line for your system), or use --device=cpu"
    if not has_nvidia_driver():
        return f"{head}: no NVIDIA driver is loaded; install the driver, or use --device=cpu"
    return f"{head} {torch.version.cuda} device; check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use --device=cpu"


def has_nvidia_driver() -> bool:
    return shutil.which("nvidia-smi") is not None or os.path.exists("/proc/driver/nvidia/version")


def _dtype(wish: str, device: torch.device, gpu: GPU | None) -> tuple[str, tuple[str, ...]]:
    if device.type == "cpu" and wish == "float16":
        return "float32", ("float16 does nothing for a CPU, as in nanoGPT; using float32",)
    if wish != "auto":
        return wish, (_no_units(device),) if wish == "bfloat16" and not has_bf16(device) else ()
    if has_bf16(device):
        return "bfloat16", ()
    # A GTX card has no tensor cores (no 16-bit rate in the table): float16 would be slower there than float32.
    has_tensor_cores = device.type == "cuda" and (gpu is None or gpu.bf16_tflops is not None)
    return ("float16" if has_tensor_cores else "float32"), ()


def _no_units(device: torch.device) -> str:
    if device.type == "cpu":
        return (
            "this CPU has no bfloat16 units: products are computed in float32 and rounded; --dtype=float32 is as fast"
        )
    return "this device has no bfloat16 units; it will be emulated and slow"


def has_bf16(device: torch.device) -> bool:
    """Whether bfloat16 is faster here, not merely possible."""
    if device.type == "cuda":
        return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= BF16_CAPABILITY
    if device.type == "cpu":
        return _cpu_has_bf16()
    return False


def _cpu_has_bf16() -> bool:
    """AVX512-BF16 or AMX; without them bfloat16 is no faster than float32."""
    if hasattr(torch.cpu, "get_capabilities"):
        has = torch.cpu.get_capabilities()
        return bool(has.get("avx512_bf16") or has.get("amx_bf16"))
    # torch before 2.11 knows the same under names of its own.
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _gpu_row(wish: str, device: torch.device) -> tuple[GPU | None, str]:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        vram_gib = torch.cuda.get_device_properties(device).total_memory / 1024**3
        return (find(wish) if wish else find_or_none(name, vram_gib)), name
    return None, cpu_name() if device.type == "cpu" else f"Apple {platform.machine()}"


def cpu_name() -> str:
    """'Intel(R) Xeon(R) Processor, 2 threads'."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
