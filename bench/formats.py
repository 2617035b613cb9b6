"""Number formats beside bfloat16: where a small model ends with each, over seeds. A CPU emulates what a card's units do.

python bench/formats.py --data DATA [--seeds 1,2,3] [--steps 250] [--small] [--formats bf16,stream,fp8,fp16acc] [--keep FILE.jsonl]

The loss is that of the whole validation split's first windows, the same for all. A format is within the noise where the
mean of its seeds is no further from bfloat16's than two standard errors of the difference.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

FORMATS: dict[str, dict[str, str]] = {
    "bf16": {},
    "stream": {"residual_dtype": "bfloat16"},
    "fp8": {"matmul": "fp8"},
    "fp16acc": {},  # emulated below: a CPU has no such switch
}
SIZE: dict[str, Any] = {
    "n_layer": 6, "n_head": 4, "n_embd": 256, "block_size": 128, "batch_size": 8, "gradient_accumulation_steps": 1,
    "learning_rate": 2e-3, "min_lr": 2e-4, "warmup_iters": 20, "beta2": 0.99, "dtype": "bfloat16", "compile": False,
    "device": "cpu",
}  # fmt: skip
SMALL = {"n_layer": 4, "n_embd": 128}
EVAL_BATCHES = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a prepared folder")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--small", action="store_true", help="4 x 128 instead of 6 x 256")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--keep", help="append each run to this file, and take those that are there already")
    args = parser.parse_args()
    found: dict[str, list[float]] = {}
    for seed in map(int, args.seeds.split(",")):
        for name in args.formats.split(","):
            loss = kept_or_run(args, name, seed)
            print(f"seed {seed}  {name:<8} val loss {loss:.4f}", flush=True)
            found.setdefault(name, []).append(loss)
    print("\n".join(table(found)))


def kept_or_run(args: argparse.Namespace, name: str, seed: int) -> float:
    size = SMALL if args.small else {}
    this = {"format": name, "seed": seed, "steps": args.steps, "data": Path(args.data).name, **size}
    keep = Path(args.keep) if args.keep else None
    for line in keep.read_text(encoding="utf-8").splitlines() if keep and keep.is_file() else ():
        record = json.loads(line)
        if this.items() <= record.items():
            return float(record["val_loss"])
    loss = final_loss(Path(args.data), name, seed, args.steps, **size)
    if keep:
        with keep.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**this, "val_loss": loss}) + "\n")
    return loss


def table(found: dict[str, list[float]]) -> list[str]:
    plain = found["bf16"]
    lines = [f"{'format':<10}{'mean':>9}{'spread':>9}{'to bf16':>10}{'noise':>9}"]
    for name, losses in found.items():
        difference = statistics.mean(losses) - statistics.mean(plain)
        if min(len(losses), len(plain)) < 2:
            continue
        noise = 2 * math.sqrt(sum(statistics.variance(each) / len(each) for each in (losses, plain)))
        lines.append(
            f"{name:<10}{statistics.mean(losses):>9.4f}{max(losses) - min(losses):>9.4f}{difference:>+10.4f}{noise:>9.4f}"
        )
    return lines


def final_loss(data: Path, name: str, seed: int, steps: int, **changes: Any) -> float:
    """Train and evaluate one model; the same seed draws the same weights and the same windows."""
    import numpy as np
    import torch
    from _formats import NarrowSums, WideProducts

    from gptfit.config.keys import NANOGPT_VOCAB_SIZE, TrainConfig
    from gptfit.dataset import read_dataset
    from gptfit.device.device import find_device
    from gptfit.schedule import knobs
    from gptfit.train.engine import build_engine

    keys = {**SIZE, **FORMATS[name], **changes, "max_iters": steps, "lr_decay_iters": steps, "seed": seed}
    # Padded as GPT-2's is, so that 8-bit products take the head.
    vocab_size = -(-(read_dataset(data).model_vocab_size or NANOGPT_VOCAB_SIZE) // 64) * 64
    config = TrainConfig(**keys, vocab_size=vocab_size)
    device = find_device(config)
    if name == "fp16acc":
        device = replace(device, dtype="float16")  # with its loss scaling
    splits = {split: np.memmap(data / f"{split}.bin", dtype=np.uint16, mode="r") for split in ("train", "val")}
    torch.manual_seed(seed)
    engine = build_engine(config, config.shape(), device)
    draw = np.random.default_rng(seed)

    def batch(split: str, starts: Any) -> tuple[Any, Any]:
        rows = np.stack([splits[split][s : s + config.block_size + 1] for s in starts]).astype(np.int64)
        ids = torch.from_numpy(rows)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    with NarrowSums() if name == "fp16acc" else WideProducts() if config.dtype == "bfloat16" else nullcontext():
        for step in range(steps):
            starts = draw.integers(0, len(splits["train"]) - config.block_size - 1, config.batch_size)
            loss = engine.forward_micro_step(batch("train", starts), True)
            engine.backward_micro_step(loss, 1)
            engine.update(loss.detach(), 1, knobs(config, step))
        spacing = (len(splits["val"]) - config.block_size - 1) // (EVAL_BATCHES * config.batch_size)
        rows = [range(b * config.batch_size, (b + 1) * config.batch_size) for b in range(EVAL_BATCHES)]
        return engine.mean_loss([batch("val", [row * spacing for row in each]) for each in rows])


if __name__ == "__main__":
    main()
