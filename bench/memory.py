"""The memory ladder measured: what each rung saves beside what the plan says, and what it costs.

python bench/memory.py                        two tables: rung, predicted saving, measured saving, slowdown
python bench/memory.py --write docs/memory.md

Saving: the peak of a step of the real engine, eager and in bfloat16, on fake tensors: torch's tracker counts every tensor
that is alive, none is computed, so the sizes are real ones. What a rung keeps in host memory is counted and taken off.
Slowdown: seconds of a step of a smaller model on this machine's CPU, float32, rungs and none in turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gptfit.config.keys import TrainConfig
from gptfit.plan import memory
from gptfit.plan.ladder import RUNGS
from gptfit.plan.resolve import Place, setting_of
from gptfit.plan.setting import Setting
from gptfit.units import MIB

MEASURED = {"compile": False, "dtype": "bfloat16", "device": "cpu", "chunked_loss": False}
MODELS: dict[str, dict[str, Any]] = {
    "124M (12 x 768), micro-batch 8, AdamW": {
        "n_layer": 12, "n_head": 12, "n_embd": 768, "batch_size": 8, "gradient_accumulation_steps": 2, "vocab_size": 50304,
    },
    "350M (24 x 1024), micro-batch 8, modern with Muon": {
        "n_layer": 24, "n_head": 16, "n_embd": 1024, "batch_size": 8, "gradient_accumulation_steps": 2,
        "vocab_size": 50304, "arch": "modern", "optimizer": "muon",
    },
}  # fmt: skip
TIMED: dict[str, Any] = {
    "n_layer": 6, "n_head": 8, "n_embd": 512, "block_size": 256, "batch_size": 4, "gradient_accumulation_steps": 4,
    "vocab_size": 16384, "compile": False, "dtype": "float32", "device": "cpu", "chunked_loss": False,
}  # fmt: skip
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="FILE", help="write the tables as a page")
    args = parser.parse_args()
    slow = slowdowns()
    print("timed; what follows only counts", file=sys.stderr, flush=True)
    lines = list(HEAD)
    for name, model in MODELS.items():
        lines += ["", f"## {name}", "", *table(model, slow)]
    print("\n".join(lines))
    if args.write:
        Path(args.write).write_text("\n".join(lines) + "\n", encoding="utf-8")


HEAD = (
    "# What each rung of the memory ladder saves and costs",
    "",
    "Made by `python bench/memory.py --write docs/memory.md`. Predicted: `plan/memory.py`. Measured: the peak of a step of the",
    "engine, eager and in bfloat16, on fake tensors: torch's memory tracker counts every tensor alive, none is computed. What a",
    "rung keeps in host memory is taken off. Slowdown: a step of a 6 x 512 model on a CPU, in float32, beside one without",
    "rungs, median of three in turns; on a card the plan's own figure counts, as a CPU has no PCIe and no tensor cores.",
)


def table(model: dict[str, Any], slow: dict[str, float]) -> list[str]:
    from _tracked import device_peak

    plain = device_peak(config(model))
    says = memory.predict(setting(model)).allocated.value
    lines = [f"Without rungs: {says / MIB:,.0f} MiB predicted, {plain / MIB:,.0f} MiB measured.", ""]
    lines += ["| rung | predicted | measured | measured / predicted | slowdown |", "|---|---:|---:|---:|---:|"]
    for rung in RUNGS:
        keys = {**model, rung.key: rung.value}
        predicted = says - memory.predict(setting(keys)).allocated.value
        saved = plain - device_peak(config(keys))
        lines.append(
            f"| `{rung.words}` | {predicted / MIB:,.0f} MiB | {saved / MIB:,.0f} MiB "
            f"| {saved / predicted:.2f} | {slow[rung.words]:.2f} x |"
        )
    return lines


def config(keys: dict[str, Any]) -> TrainConfig:
    return TrainConfig(**{**MEASURED, **keys})


def setting(keys: dict[str, Any]) -> Setting:
    found = config(keys)
    return setting_of(found, found.shape(), Place("cuda", "bfloat16"))


def slowdowns() -> dict[str, float]:
    """Seconds of a step with each rung over those without, all timed in turns."""
    steps = {rung.words: Stepper({rung.key: rung.value}) for rung in RUNGS}
    steps["none"] = Stepper({})
    for _ in range(ROUNDS + 1):  # the first is a warm-up
        for stepper in steps.values():
            stepper.step()
    median = {words: statistics.median(stepper.seconds[1:]) for words, stepper in steps.items()}
    return {words: seconds / median["none"] for words, seconds in median.items()}


class Stepper:
    """An engine that times its own steps."""

    def __init__(self, keys: dict[str, Any]) -> None:
        import torch

        from gptfit.device.device import find_device
        from gptfit.train.engine import build_engine

        self.config = TrainConfig(**{**TIMED, **keys})
        self.engine = build_engine(self.config, self.config.shape(), find_device(self.config))
        ids = torch.randint(0, self.config.vocab_size, (self.config.batch_size, self.config.block_size + 1))
        self.batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        self.seconds: list[float] = []

    def step(self) -> None:
        import torch

        from gptfit.schedule import knobs

        began, micro_steps = time.perf_counter(), self.config.gradient_accumulation_steps
        total = torch.zeros(())
        for micro in range(micro_steps):
            loss = self.engine.forward_micro_step(self.batch, micro == micro_steps - 1)
            self.engine.backward_micro_step(loss, micro_steps)
            total += loss.detach()
        self.engine.update(total, micro_steps, knobs(self.config, len(self.seconds)))
        self.seconds.append(time.perf_counter() - began)


if __name__ == "__main__":
    main()
