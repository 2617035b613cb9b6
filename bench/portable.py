"""What `portable = True` costs in loss: the whole modern recipe, its portable part and GPT-2's block on the same tokens.

    python bench/portable.py ../shared/data/web_usgov.parquet --keep losses.jsonl

prints the table of docs/export.md. Finished runs are kept, so that it goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptfit.config.keys import TrainConfig
from gptfit.config.recipe import DataSize, modern_keys
from gptfit.dataset import read_dataset
from gptfit.train.train import train

MODEL = {"n_layer": 3, "n_head": 2, "n_embd": 128, "block_size": 256, "batch_size": 4}  # docs/recipe.md's ingredients
LIMIT = "2Mtokens"  # more than any run reads
EVAL_BATCHES = 60
# nanoGPT's recipe at the rate that was best for it at 5M (docs/recipe.md); it goes to GGUF as it is.
ARMS: dict[str, dict[str, Any]] = {
    "modern": {"arch": "modern"},
    "modern, portable = True": {"arch": "modern", "portable": True},
    "gpt2 with AdamW": {"learning_rate": 2e-3, "min_lr": 2e-4},
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, nargs="+", help="files of documents")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=250, help="of 1,024 tokens (default 250)")
    parser.add_argument("--keep", type=Path, help="where finished runs are kept")
    args = parser.parse_args(arguments)
    kept = read_kept(args.keep)
    with tempfile.TemporaryDirectory() as folder:
        data = prepare(args.data, Path(folder) / "data")
        # Seed by seed, so that what is there when it is stopped can be compared.
        for seed in range(1, args.seeds + 1):
            for arm in ARMS:
                run = f"{arm}, {args.steps} steps, seed {seed}"
                if run not in kept:
                    kept[run] = loss_of(arm, args.steps, seed, data, Path(folder) / run)
                    keep(args.keep, run, kept[run])
                print(f"  {run}: {kept[run]:.4f}", flush=True)
    found = {arm: [kept[f"{arm}, {args.steps} steps, seed {i + 1}"] for i in range(args.seeds)] for arm in ARMS}
    print(table(found))
    return 0


def prepare(sources: Sequence[Path], out: Path) -> Path:
    words = ["prepare", *map(str, sources), "--tokenizer", "bytes", "--limit", LIMIT, "--out", str(out)]
    subprocess.run([sys.executable, "-m", "gptfit", *words], check=True, capture_output=True)
    return out


def loss_of(arm: str, steps: int, seed: int, data: Path, out: Path) -> float:
    """Of a run in this process, evaluated once, at its end, on the same windows for every arm."""
    keys = {**MODEL, **ARMS[arm], "gradient_accumulation_steps": 1, "max_iters": steps, "seed": seed}
    keys |= {"device": "cpu", "compile": False, "dtype": "float32", "dataset": str(data), "out_dir": str(out)}
    keys |= {"eval_interval": steps, "eval_iters": EVAL_BATCHES, "log_interval": steps, "lr_decay_iters": steps}
    keys |= {"warmup_iters": steps // 10}
    info = read_dataset(data)
    if "arch" in ARMS[arm]:
        tokens = info.train.tokens if info.train else None
        size = DataSize(info.model_vocab_size, tokens, info.end_of_text is not None)
        # "portable" itself turns off what is on by default; here the keys go past the reader of configs.
        keys |= modern_keys(TrainConfig.unchecked(**keys), keys, (), size)
    result = train(TrainConfig(**keys))
    assert result.val_loss is not None
    return result.val_loss


def read_kept(path: Path | None) -> dict[str, float]:
    lines = path.read_text(encoding="utf-8").splitlines() if path and path.exists() else []
    return {entry["run"]: entry["val_loss"] for entry in map(json.loads, lines)}


def keep(path: Path | None, run: str, loss: float) -> None:
    if path:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"run": run, "val_loss": loss}) + "\n")


def table(losses: dict[str, list[float]]) -> str:
    """Markdown: the mean and range of each arm, and how far it is above the first, seed by seed."""
    lines = ["| run | val loss (nats per byte) | above the whole recipe |", "|---|---|---|"]
    first = next(iter(losses.values()))
    for arm, found in losses.items():
        above = [loss - base for loss, base in zip(found, first, strict=True)]
        lines.append(f"| {arm} | {spread(found)} | {'' if found is first else spread(above)} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    sys.exit(main())
