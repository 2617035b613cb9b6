"""The memory ladder measured on this machine: what each rung saves beside what the plan says, and what it costs.

python bench/memory.py            a table: rung, predicted saving, measured saving, slowdown

Each rung trains a few steps in a process of its own; the peak is the largest resident size the system saw. A CPU's host
memory is its device memory, so optimizer_device='cpu' is counted instead: the bytes of state that leave the device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

from gptfit.config.keys import TrainConfig
from gptfit.plan import memory
from gptfit.plan.ladder import RUNGS
from gptfit.plan.resolve import Place, setting_of
from gptfit.units import MIB

STEPS = 4
BASE: dict[str, Any] = {
    "n_layer": 8, "n_head": 8, "n_embd": 512, "block_size": 512, "batch_size": 8, "vocab_size": 16384,
    "gradient_accumulation_steps": 2, "compile": False, "dtype": "bfloat16", "device": "cpu", "chunked_loss": False,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(json.loads(args.child))))
        return
    plain = run({})
    print(
        f"plain: predicted {predicted({}) / MIB:,.0f} MiB, measured {plain['peak'] / MIB:,.0f} MiB above an idle process"
    )
    print(f"{'rung':<32}{'predicted':>12}{'measured':>12}{'of it':>8}{'slowdown':>10}")
    for rung in RUNGS:
        keys = {rung.key: rung.value}
        found = run(keys)
        says = predicted({}) - predicted(keys)
        saved = found["left"] if rung.key == "optimizer_device" else plain["peak"] - found["peak"]
        if rung.key == "optimizer_device":
            says = memory.kept_state_bytes(setting({}))
        ratio, slow = saved / says if says else float("nan"), found["seconds"] / plain["seconds"]
        print(f"{rung.words:<32}{says / MIB:>8,.0f} MiB{saved / MIB:>8,.0f} MiB{ratio:>8.2f}{slow:>9.2f}x")


def run(keys: dict[str, Any]) -> dict[str, float]:
    words = [sys.executable, __file__, "--child", json.dumps(keys)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def setting(keys: dict[str, Any]) -> Any:
    config = TrainConfig(**{**BASE, **keys})
    return replace(setting_of(config, config.shape(), Place("cpu", "bfloat16")), compile=False)


def predicted(keys: dict[str, Any]) -> float:
    return memory.predict(setting(keys)).allocated.value


def measure(keys: dict[str, Any]) -> dict[str, float]:
    import torch

    from gptfit.device.device import find_device
    from gptfit.device.host_memory import peak_host_bytes, reset_peak_host_bytes
    from gptfit.schedule import knobs
    from gptfit.train.engine import build_engine
    from gptfit.train.kept_state import KeptStateOptimizer

    config = TrainConfig(**{**BASE, **keys})
    device = find_device(config)
    warm_up(torch)
    reset_peak_host_bytes()
    idle = peak_host_bytes()
    engine = build_engine(config, config.shape(), device)
    ids = torch.randint(0, config.vocab_size, (config.batch_size, config.block_size + 1))
    batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    times = []
    for step in range(STEPS):
        began = time.perf_counter()
        loss_sum = torch.zeros(())
        for micro in range(config.gradient_accumulation_steps):
            loss = engine.forward_micro_step(batch, micro == config.gradient_accumulation_steps - 1)
            engine.backward_micro_step(loss, config.gradient_accumulation_steps)
            loss_sum += loss.detach()
        engine.update(loss_sum, config.gradient_accumulation_steps, knobs(config, step))
        times.append(time.perf_counter() - began)
    kept = engine.optimizer
    left = kept.kept_bytes() if isinstance(kept, KeptStateOptimizer) and kept.is_on_host else 0
    return {"peak": peak_host_bytes() - idle, "seconds": statistics.median(times[1:]), "left": left}


def warm_up(torch: Any) -> None:
    """The libraries' own buffers, which every rung has."""
    x = torch.randn(64, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (x @ x).sum().backward()


if __name__ == "__main__":
    main()
