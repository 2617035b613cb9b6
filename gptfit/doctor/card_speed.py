"""Card checks of the build and of raw speed: architecture and driver, matrix products, copies."""

from __future__ import annotations

import sys
import time
from statistics import median

import torch

from gptfit.device.device import Device, has_nvidia_driver, is_wsl, missing_code
from gptfit.device.local_gpu import used_bytes
from gptfit.device.nvml import card_readings, driver_version
from gptfit.doctor.verdict import Verdict

INSTALL = "pytorch.org/get-started/locally shows the line for this system"
PRODUCT_SIZE = {"cpu": 1024, "cuda": 8192, "mps": 4096}
COPY_BYTES = {"cpu": 256 * 2**20, "cuda": 2**30, "mps": 2**28}
WARM_S, TIMED_S = 1.0, 2.0
LEAST_OF_SHEET = 0.6  # of the data sheet's rate or bandwidth; less means heat, power or another program


def build(device: Device) -> Verdict:
    """The wheel has code for this card; CUDA and the driver's library mean the same card."""
    built = f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    if device.kind != "cuda":
        if has_nvidia_driver():
            return Verdict(
                "error", f"{built}: a CPU-only build beside an NVIDIA card", f"install a CUDA build: {INSTALL}"
            )
        return Verdict("ok", f"{built}; {device.name}")
    major, minor = torch.cuda.get_device_capability(device.torch_device)
    uuid = f"GPU-{torch.cuda.get_device_properties(device.torch_device).uuid}"
    system = "WSL2" if is_wsl() else "Windows (WDDM)" if sys.platform == "win32" else "Linux"
    values = {"capability": f"{major}.{minor}", "uuid": uuid, "driver": driver_version(), "system": system}
    text = f"{built}, driver {values['driver'] or 'unknown'}, compute capability {major}.{minor}, {system}"
    if problem := missing_code(device.torch_device):
        return Verdict("error", f"{text}: {problem[0]}", problem[1], values)
    known = used_bytes()
    if known and uuid not in known:
        remedy = "set CUDA_DEVICE_ORDER=PCI_BUS_ID and name the card in CUDA_VISIBLE_DEVICES by its UUID"
        return Verdict("warning", f"{text}: NVML does not know the card that CUDA uses", remedy, values)
    return Verdict("ok", text, values=values)


def products(device: Device) -> Verdict:
    """Random numbers: zeros and ones draw less power and run faster than training ever will."""
    size = PRODUCT_SIZE[device.kind]
    a, b = (torch.randn(size, size, device=device.torch_device).to(device.torch_dtype) for _ in range(2))
    _repeat(lambda: torch.mm(a, b), device, WARM_S)
    seconds = _repeat(lambda: torch.mm(a, b), device, TIMED_S)
    tflops = 2 * size**3 / seconds / 1e12
    readings = card_readings(device)
    values = {"tflops": tflops, "dtype": device.dtype, "size": size, **readings}
    told = "".join(
        f", {readings[key]:.0f} {unit}" for key, unit in (("clock_mhz", "MHz"), ("power_w", "W")) if key in readings
    )
    text = f"{tflops:.3g} TFLOPS in {device.dtype}, warm{told}"
    sheet = device.gpu.bf16_tflops if device.gpu and device.dtype != "float32" else None
    if sheet and tflops < LEAST_OF_SHEET * sheet:
        remedy = "look for heat, a low power limit or another program in `nvidia-smi`"
        return Verdict("warning", f"{text}: {tflops / sheet:.0%} of the data sheet", remedy, values)
    return Verdict("ok", text, values=values)


def copies(device: Device) -> Verdict:
    source = torch.ones(COPY_BYTES[device.kind] // 4, device=device.torch_device)
    target = torch.empty_like(source)
    _repeat(lambda: target.copy_(source), device, 0.2)
    seconds = _repeat(lambda: target.copy_(source), device, 0.8)
    gbs = 2 * source.nbytes / seconds / 1e9
    text, values = f"{gbs:.3g} GB/s read and written", {"gb_per_s": gbs}
    sheet = device.gpu.bandwidth_gbs if device.gpu else None
    if sheet and gbs < LEAST_OF_SHEET * sheet:
        return Verdict(
            "warning", f"{text}: {gbs / sheet:.0%} of the data sheet", "look for another program on the card", values
        )
    return Verdict("ok", text, values=values)


def _repeat(action: object, device: Device, seconds: float) -> float:
    """Median seconds of one call over about so long."""
    assert callable(action)
    times: list[float] = []
    while sum(times) < seconds:
        began = time.perf_counter()
        action()
        device.synchronize()
        times.append(time.perf_counter() - began)
    return median(times)
