"""How fast a card multiplies matrices: its data sheet, corrected for power and for how real training uses it."""

from __future__ import annotations

from dataclasses import dataclass

from gptfit.estimate import Estimate
from gptfit.gpus import GPU


@dataclass(frozen=True)
class RateConstants:
    """Fractions of the data sheet's dense rate, fitted by bench/fit_speed.py; docs/formulas.md argues each."""

    # GeForce cards run float32 accumulation at half rate, so their tensor cores are never starved of power, and
    # they boost above the data sheet's clock.
    geforce: float = 1.0
    # Full-rate cards: what they would reach without a power limit ...
    full_rate: float = 0.959
    # ... which halves where the card has this many watts per TFLOPS (HBM and larger dies need fewer).
    half_power_gddr: float = 0.857
    half_power_hbm: float = 0.558
    amd: float = 0.32
    apple: float = 0.55


FITTED = RateConstants()

HBM_CAPABILITIES = ("6.0", "7.0", "8.0", "9.0", "10.0")


def peak_tflops(gpu: GPU) -> Estimate | None:
    """The dense 16-bit rate MFU is taken against: the data sheet's, else the middle of published measurements."""
    if gpu.bf16_tflops:
        return Estimate(gpu.bf16_tflops, gpu.bf16_tflops, gpu.bf16_tflops, "spec")
    if gpu.measured_low_tflops and gpu.measured_high_tflops and gpu.measured_dtype != "fp32":
        low, high = gpu.measured_low_tflops, gpu.measured_high_tflops
        return Estimate((low + high) / 2, low, high, "published")
    if gpu.fp32_tflops:  # no tensor cores: float32 is the fastest a training run can go
        return Estimate(gpu.fp32_tflops, gpu.fp32_tflops, gpu.fp32_tflops, "spec")
    return None


def matmul_tflops(gpu: GPU, dtype: str, constants: RateConstants = FITTED) -> Estimate | None:
    """What the matmuls of a GPT reach on this card in this dtype."""
    peak = _dtype_peak(gpu, dtype)
    if peak is None:
        return None
    fraction = _fraction(gpu, constants)
    return peak.map(fraction)


def relative_error(gpu: GPU, compiled: bool) -> tuple[float, float]:
    """How far below and above a prediction nine of ten runs fall, from the cross-validation in docs/accuracy.md."""
    if gpu.is_laptop:
        return 0.50, 0.20  # the maker sets the power limit; the same chip varies by a factor of two
    if not gpu.is_nvidia:
        return 0.45, 0.45
    if not compiled:
        return 0.25, 0.25
    return (0.15, 0.15) if gpu.is_geforce else (0.25, 0.25)


def is_hbm(gpu: GPU) -> bool:
    return gpu.compute_capability in HBM_CAPABILITIES


def _dtype_peak(gpu: GPU, dtype: str) -> Estimate | None:
    if dtype == "float32":
        # nanoGPT and gptfit allow TF32 where the card has it.
        rate = gpu.tf32_tflops or gpu.fp32_tflops
        return Estimate(rate, rate, rate, "spec") if rate else peak_tflops(gpu)
    return peak_tflops(gpu)


def _fraction(gpu: GPU, constants: RateConstants) -> float:
    if gpu.compute_capability == "mps":
        return constants.apple
    if not gpu.is_nvidia:
        return constants.amd
    if gpu.is_geforce or not gpu.bf16_tflops:
        return constants.geforce
    half = constants.half_power_hbm if is_hbm(gpu) else constants.half_power_gddr
    watts_per_tflops = (gpu.board_watts or gpu.bf16_tflops) / gpu.bf16_tflops
    return constants.full_rate * watts_per_tflops / (watts_per_tflops + half)
