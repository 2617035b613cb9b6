"""The checks of `gptfit doctor --card`: each runs real work on the device and says whether it came out as it must."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gptfit.config.keys import TrainConfig
from gptfit.device.device import find_device
from gptfit.device.local_gpu import used_bytes
from gptfit.device.nvml import context_bytes
from gptfit.doctor import card_memory, card_numbers, card_runs, card_speed
from gptfit.doctor.verdict import Verdict

CheckFunction = Callable[..., Verdict]


@dataclass(frozen=True)
class Check:
    """`kinds` of device it applies to; `why_not` says for the others why it is skipped."""

    name: str
    run: CheckFunction
    limit_s: float = 60.0
    kinds: tuple[str, ...] = ("cpu", "cuda", "mps")
    why_not: str = ""
    is_timed: bool = False  # alone, as others would slow it
    one_thread: bool = True  # beside another on a CPU
    knows_context: bool = False  # is told the bytes that this process takes on a card by being there


ALL = (
    Check("build and driver", card_speed.build),
    Check("matrix products", card_speed.products, is_timed=True),
    Check("copies", card_speed.copies, is_timed=True),
    Check("memory counts", card_memory.counts, knows_context=True),
    Check("out of memory", card_memory.out_of_memory),
    Check("spilling", card_memory.spilling, kinds=("cuda",), why_not="a CPU's memory is main memory"),
    Check("attention", card_numbers.attention),
    Check("loss and gradients", card_numbers.loss_and_gradients),
    Check("compiled gpt2", card_runs.compiled_gpt2, limit_s=150.0, one_thread=False),
    Check("compiled modern", card_runs.compiled_modern, limit_s=150.0, one_thread=False),
    Check("prefetched batches", card_runs.batches),
    Check("float16 scale", card_numbers.scaler, kinds=("cuda",), why_not="float16 does nothing for a CPU"),
    Check("muon", card_numbers.muon),
    Check("resume", card_runs.resume, limit_s=90.0),
    Check("growth", card_memory.growth, limit_s=90.0),
    Check("sampling", card_numbers.sampling),
    Check("two processes", card_runs.two_processes, kinds=("cuda",), why_not="needs two cards", limit_s=90.0),
)
BY_NAME = {check.name: check for check in ALL}


def run_check(name: str, config: TrainConfig) -> Verdict:
    check, used_before = BY_NAME[name], used_bytes()
    device = find_device(config)
    return check.run(device, context_bytes(device, used_before, 0)) if check.knows_context else check.run(device)
