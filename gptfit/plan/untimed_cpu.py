"""This machine's CPU before anything was timed on it: a step from the rate of one product, memory from what torch keeps."""

from __future__ import annotations

from dataclasses import replace

from gptfit.estimate import Estimate
from gptfit.plan.calibration import Calibration, memory_of
from gptfit.plan.memory import Memory
from gptfit.plan.setting import Setting
from gptfit.plan.speed import HOST_GBS, HOST_UPDATE_BYTES, Speed, muon_flops, speed_of_step

# Of the products' rate, reached by a micro-step: 0.65 to 0.92 of 150 GFLOPS in 12 float32 shapes of bench/calibration.py,
# measured on 2026-11-17 on a quiet machine (docs/formulas.md).
SHARE = 0.8
BLOCK_S = 0.4e-3  # what a block takes at any size, as calibrated there: 0.35 to 0.6 ms
# Those rows lie within 1.6 either way; the rest is for other CPUs, whose products torch and numpy may not time alike.
ERROR = 2.5
MEMORY_ERROR = 0.2  # 0.10 with a process of this machine's own measured (docs/accuracy.md)
# A process of torch's, and bytes kept for backward per token and channel: a property of torch, the same calibration's.
CONTEXT_BYTES = {"eager": 337e6, "compiled": 426e6}
SAVED_BYTES = {"gpt2 float32": 64.1, "gpt2 bfloat16": 36.1, "modern float32": 76.2, "modern bfloat16": 50.7}
UNTIMED = Calibration(
    device="",
    torch="",
    costs={},
    update_costs={},
    saved_bytes={f"{kind} {way}": saved for kind, saved in SAVED_BYTES.items() for way in ("eager", "compiled")},
    context_bytes=CONTEXT_BYTES,
)


def speed_by_product(setting: Setting, flops_per_s: float) -> Speed | None:
    """At the rate of a product timed now; None in bfloat16, which a CPU has units for or computes in float32."""
    if setting.dtype == "bfloat16":
        return None
    shape = setting.shape
    micro_s = shape.flops_per_token * setting.micro_tokens / (SHARE * flops_per_s) + BLOCK_S * shape.n_layer
    update_s = HOST_UPDATE_BYTES * shape.n_weights / (HOST_GBS * 1e9)
    if setting.optimizer == "muon":
        update_s += muon_flops(setting) / flops_per_s
    step_s = micro_s * setting.accumulation + update_s
    return speed_of_step(setting, None, step_s, micro_s, {}, 1 - 1 / ERROR, ERROR - 1, "timed")


def process_memory(setting: Setting) -> Memory:
    """Of the whole process."""
    known = setting if setting.dtype == "bfloat16" else replace(setting, dtype="float32")  # float16 is float32 there
    found = memory_of(known, UNTIMED)
    allocated, device = (Estimate.within(total.value, MEMORY_ERROR, "fit") for total in (found.allocated, found.device))
    return Memory(found.parts, allocated, device)
