"""A log with a million steps: how long it takes to read, to compare, to list and to page, and how large the page is.

python bench/runs.py [--steps 1000000]
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gptfit.compare.comparison import compare_runs
from gptfit.logs.open_run import open_run
from gptfit.pages.report import page_data
from gptfit.pages.run_list import Listing
from gptfit.pages.shell import data_block

T = TypeVar("T")
READ_LIMIT_S = 10.0  # issue: a log with a million steps is read in under 10 s
DATA_LIMIT_MB = 2.0  # and the page stays under 2 MB of data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logs = {
            "run.jsonl": write_ours(folder / "ours", steps),
            "nanoGPT stdout": write_nanogpt(folder / "log.txt", steps),
        }
        for kind, path in logs.items():
            size = path.stat().st_size / 1e6
            seconds, run = timed(lambda path=path: open_run(path))
            print(
                f"read {kind:15} {len(run.steps):>9,} steps {size:6.0f} MB  {seconds:5.2f} s  (limit {READ_LIMIT_S:g} s)"
            )
            seconds, comparison = timed(lambda run=run: compare_runs([run]))
            data = data_block(page_data([run], comparison))
            print(f"     facts {seconds:5.2f} s, page data {len(data) / 1e6:.2f} MB  (limit {DATA_LIMIT_MB:g} MB)")
        listing = Listing(folder)
        print(f"list the folder          {timed(listing.runs)[0]:6.2f} s, again {timed(listing.runs)[0]:6.2f} s")
        print(f"open the live page's run {timed(lambda: listing.open('ours/run.jsonl'))[0]:6.2f} s")


def timed(work: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def loss(step: int) -> float:
    return 3 + 7 / math.sqrt(1 + step / 100) + 0.05 * math.sin(step)


def write_ours(folder: Path, steps: int) -> Path:
    folder.mkdir()
    path = folder / "run.jsonl"
    config = {"n_layer": 12, "n_embd": 768, "batch_size": 8, "block_size": 1024, "max_iters": steps}
    with open(path, "w", encoding="utf-8") as file:
        file.write(
            json.dumps({"event": "header", "name": "million", "config": config, "tokens_per_step": 524288}) + "\n"
        )
        for step in range(steps):
            event = {
                "event": "step",
                "step": step,
                "loss": loss(step),
                "lr": 6e-4,
                "ms": 123.4,
                "tokens": step * 524288,
            }
            event |= {
                "tokens_per_s": 56100.3,
                "mfu": 0.82,
                "grad_norm": 0.45,
                "memory_gib": 9.1,
                "seconds": step * 0.1234,
            }
            file.write(json.dumps(event) + "\n")
            if step % 1000 == 0:
                file.write(
                    json.dumps({"event": "eval", "step": step, "train_loss": loss(step), "val_loss": loss(step)}) + "\n"
                )
    return path


def write_nanogpt(path: Path, steps: int) -> Path:
    with open(path, "w", encoding="utf-8") as file:
        for step in range(steps):
            if step % 1000 == 0:
                file.write(f"step {step}: train loss {loss(step):.4f}, val loss {loss(step):.4f}\n")
            file.write(f"iter {step}: loss {loss(step):.4f}, time 123.40ms, mfu {15.37 if step > 4 else -100:.2f}%\n")
    return path


if __name__ == "__main__":
    main()
