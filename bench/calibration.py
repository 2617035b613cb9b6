"""How well a calibrated plan predicts shapes it never saw, on this machine: tokens/s and peak memory, shape by shape.

    python bench/calibration.py            calibrate, then run every shape; alone on the machine, about 12 minutes
    python bench/calibration.py --predict  predict again from what is kept in bench/calibration.json

Writes bench/calibration.json; bench/accuracy.py puts the table into docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from gptfit.config.keys import TrainConfig
from gptfit.plan.calibration import Calibration, calibration_from_json, process_bytes, step_parts
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape
from gptfit.units import GIB

RESULTS = Path(__file__).resolve().parent / "calibration.json"
LIMIT_S = 240.0
ACCUMULATION = 4  # micro-steps per update
CONDITIONS = (
    "This record was made on a busy machine, at a higher priority than a dozen other programs, and its calibration "
    "minutes after its rows: run it alone for the figures that count."
)
AIM = "tokens/s: median 5 %, 90 % within 12 %; peak memory: 90 % within 10 %"


@dataclass(frozen=True)
class Unseen:
    """A shape and a way to run it that calibration does not time."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int
    batch_size: int
    arch: str
    optimizer: str
    dtype: str
    compile: bool

    @property
    def name(self) -> str:
        way = "compiled" if self.compile else "eager"
        size = f"{self.n_layer}x{self.n_embd} T{self.block_size} V{self.vocab_size} B{self.batch_size}"
        return f"{size} {self.arch} {self.optimizer} {self.dtype} {way}"

    def config(self) -> TrainConfig:
        return TrainConfig(**asdict(self), device="cpu", gradient_accumulation_steps=ACCUMULATION)


# None of them is timed by calibration, nor were they among the 24 that its constants for a CPU's heap come from.
SHAPES = (
    Unseen(3, 3, 192, 128, 512, 16, "gpt2", "adamw", "float32", True),
    Unseen(2, 2, 128, 256, 32768, 4, "gpt2", "adamw", "bfloat16", True),
    Unseen(4, 5, 320, 512, 4096, 2, "modern", "muon", "float32", True),
    Unseen(6, 4, 256, 1024, 1024, 4, "gpt2", "adamw", "bfloat16", True),
    Unseen(3, 7, 448, 256, 50304, 8, "modern", "muon", "bfloat16", True),
    Unseen(8, 4, 256, 512, 257, 4, "gpt2", "adamw", "float32", True),
    Unseen(5, 6, 384, 128, 8192, 32, "modern", "adamw", "bfloat16", True),
    Unseen(10, 3, 192, 256, 16384, 8, "gpt2", "muon", "bfloat16", True),
    Unseen(6, 9, 576, 256, 1024, 4, "modern", "muon", "float32", True),
    Unseen(9, 2, 128, 512, 4096, 8, "modern", "muon", "bfloat16", True),
    Unseen(8, 12, 768, 256, 50304, 2, "gpt2", "adamw", "bfloat16", True),
    Unseen(12, 8, 512, 128, 257, 8, "gpt2", "adamw", "float32", True),
    Unseen(2, 10, 640, 1024, 8192, 2, "modern", "muon", "bfloat16", True),
    Unseen(4, 11, 704, 512, 50304, 1, "gpt2", "adamw", "float32", True),
    Unseen(3, 5, 320, 128, 50304, 2, "gpt2", "adamw", "float32", False),
    Unseen(5, 4, 256, 512, 1024, 8, "modern", "muon", "bfloat16", False),
    Unseen(6, 3, 192, 1024, 257, 4, "gpt2", "adamw", "float32", False),
    Unseen(4, 10, 640, 256, 4096, 4, "modern", "muon", "bfloat16", False),
    Unseen(7, 5, 320, 256, 32768, 4, "modern", "adamw", "float32", False),
    Unseen(10, 6, 384, 128, 16384, 8, "gpt2", "muon", "bfloat16", False),
    Unseen(6, 12, 768, 256, 512, 2, "gpt2", "adamw", "bfloat16", False),
    Unseen(9, 7, 448, 256, 8192, 1, "gpt2", "adamw", "float32", False),
    Unseen(12, 3, 192, 128, 257, 32, "modern", "muon", "float32", False),
    Unseen(2, 6, 384, 1024, 50304, 4, "modern", "adamw", "bfloat16", False),
)


@dataclass(frozen=True)
class Row:
    """A shape as measured; `chunked_loss` is what 'auto' meant there."""

    shape: Unseen
    tokens_per_s: float
    peak_gib: float
    chunked_loss: bool
    compiled: bool
    seconds: float = 0.0

    def setting(self) -> Setting:
        shape = self.shape
        return Setting(
            ModelShape(shape.n_layer, shape.n_head, shape.n_embd, shape.block_size, shape.vocab_size, arch=shape.arch),
            micro_batch=shape.batch_size,
            accumulation=ACCUMULATION,
            dtype=shape.dtype,
            compile=self.compiled,
            chunked_loss=self.chunked_loss,
            optimizer=shape.optimizer,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--predict", action="store_true", help="measure nothing; use what is kept")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not args.predict:
        from gptfit.doctor.calibration import calibrate  # here, as the page of errors is written without torch

        began = time.monotonic()
        found = calibrate(TrainConfig(device="cpu"), lambda stage: print(f"  {stage}", file=sys.stderr))
        seconds = time.monotonic() - began
        rows = list(measure_all())
        kept = {"seconds": seconds, "calibration": found.as_json(), "rows": [asdict(row) for row in rows]}
        args.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    show(*read(args.out))
    return 0


def read(path: Path = RESULTS) -> tuple[Calibration, list[Row], float]:
    """(calibration, rows, seconds that calibrating took)."""
    values = json.loads(path.read_text(encoding="utf-8"))
    rows = [Row(**{**row, "shape": Unseen(**row["shape"])}) for row in values["rows"]]
    return calibration_from_json(values["calibration"]), rows, values["seconds"]


def measure_all() -> Iterator[Row]:
    for shape in SHAPES:
        began = time.monotonic()
        row = measure(shape)
        if row is not None:
            print(
                f"  {shape.name}: {row.tokens_per_s:,.0f} tokens/s",
                f"{time.monotonic() - began:.0f} s",
                file=sys.stderr,
            )
            yield row


def measure(shape: Unseen) -> Row | None:
    """A real trial in a process of its own, as `tune` runs it."""
    from gptfit.tune.session import find_machine, make_measure
    from gptfit.tune.space import base_variant
    from gptfit.tune.trials import Candidate, timing_from_json

    began, config = time.monotonic(), shape.config()
    machine = find_machine(config)
    run = make_measure(config, config.shape(), machine)
    ended = run(Candidate(shape.batch_size, base_variant(config, machine)), False, LIMIT_S, lambda stage: None)
    if ended.outcome != "ok":
        print(f"  {shape.name}: {ended.outcome} {ended.message}", file=sys.stderr)
        return None
    timing = timing_from_json(ended.values)
    step_ms = timing.ms_per_micro_step * ACCUMULATION + timing.ms_per_update
    tokens = shape.batch_size * shape.block_size * ACCUMULATION
    return Row(
        shape,
        tokens_per_s=1e3 * tokens / step_ms,
        peak_gib=timing.device_gib or math.nan,
        chunked_loss=timing.chunked_loss,
        compiled=timing.compiled,
        seconds=time.monotonic() - began,
    )


@dataclass(frozen=True)
class Predicted:
    row: Row
    tokens_per_s: float
    peak_gib: float

    @property
    def speed_error(self) -> float:
        return self.tokens_per_s / self.row.tokens_per_s - 1

    @property
    def memory_error(self) -> float:
        return self.peak_gib / self.row.peak_gib - 1


def predict(calibration: Calibration, rows: list[Row]) -> list[Predicted]:
    found = []
    for row in rows:
        setting = row.setting()
        seconds = sum(step_parts(setting, calibration).values())
        found.append(Predicted(row, setting.tokens_per_step / seconds, process_bytes(setting, calibration) / GIB))
    return found


def spread(errors: list[float]) -> tuple[float, float]:
    """The median, and what nine of ten stay within."""
    sizes = sorted(map(abs, errors))
    return sizes[len(sizes) // 2], sizes[max(0, math.ceil(0.9 * len(sizes)) - 1)]


def summary(found: list[Predicted]) -> str:
    speed, memory = spread([p.speed_error for p in found]), spread([p.memory_error for p in found])
    return (
        f"{len(found)} shapes: tokens/s median error {speed[0]:.1%}, 90 % within {speed[1]:.1%}; "
        f"peak memory median {memory[0]:.1%}, 90 % within {memory[1]:.1%}"
    )


def show(calibration: Calibration, rows: list[Row], seconds: float) -> None:
    found = predict(calibration, rows)
    for p in found:
        print(
            f"{p.row.shape.name:<66} {p.row.tokens_per_s:>9,.0f} {p.tokens_per_s:>9,.0f} {p.speed_error:>+7.1%}"
            f"   {p.row.peak_gib:6.2f} {p.peak_gib:6.2f} {p.memory_error:>+7.1%}"
        )
    print(f"calibrated in {seconds:.0f} s; {summary(found)}")
    print(f"to reach: {AIM}")


if __name__ == "__main__":
    sys.exit(main())
