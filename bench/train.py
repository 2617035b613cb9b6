"""Training beside nanoGPT's train.py on this machine: speed, memory of the loss, start-up, a known loss, kills.

python bench/train.py [--nanogpt PATH] [--parts speed,memory,start,recipe,kill]
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from gptfit.checkpoint.format import load_checkpoint
from gptfit.logs.runlog import read_run

REPO = Path(__file__).resolve().parent.parent
PARTS = ("speed", "memory", "start", "recipe", "kill")
WARM_UP_STEPS, STEPS = 4, 14
ITER = re.compile(r"^iter (\d+): loss ([\d.]+), time ([\d.]+)ms", re.MULTILINE)

SPEED_TARGET, RATE_TARGET = 1.9, 65  # x nanoGPT; % of the matmul rate
MEMORY_TARGET, SLOWDOWN_TARGET = 40, 15  # %
RECIPE_LOSS, RECIPE_TOLERANCE = 1.88, 0.04  # nanoGPT's README
MODEL = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "batch_size": 8, "gradient_accumulation_steps": 1}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, help="a nanoGPT checkout; its own train.py is run")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"comma-separated, of {', '.join(PARTS)}")
    parser.add_argument("--kills", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in args.parts.split(","):
            {"speed": speed, "memory": memory, "start": start, "recipe": recipe, "kill": kill}[part](folder, args)
    return 0


def speed(folder: Path, args: argparse.Namespace) -> None:
    """The same model, batch, windows and seed; medians of the printed step times after a warm-up."""
    data = folder / "data" / "zipf"
    write_tokens(data)
    keys = {**MODEL, "max_iters": STEPS, "lr_decay_iters": STEPS, "warmup_iters": 2, "eval_iters": 1, "device": "cpu"}
    ours = {**keys, "dataset": str(data), "sampling": "random"}
    runs = {
        "gptfit, its defaults": gptfit(folder / "a", **ours),
        "gptfit, compile off, float32": gptfit(
            folder / "b", **ours, compile=False, dtype="float32", chunked_loss=False
        ),
    }
    if args.nanogpt:
        shutil.copytree(args.nanogpt, folder / "nanogpt", ignore=shutil.ignore_patterns(".git", "data"))
        write_tokens(folder / "nanogpt" / "data" / "zipf")
        runs["nanoGPT train.py"] = nanogpt(folder / "nanogpt", **keys, dataset="zipf", compile=False)
    base = runs.get("nanoGPT train.py", runs["gptfit, compile off, float32"])
    tokens = MODEL["batch_size"] * MODEL["block_size"]
    print(f"speed: 6 x 384, vocabulary 50304, {tokens} tokens a step, {torch.get_num_threads()} threads")
    for name, steps in runs.items():
        ratio, gap = (
            median_ms(base) / median_ms(steps),
            max(abs(a[1] - b[1]) for a, b in zip(base, steps, strict=False)),
        )
        print(f"  {name:<30} {median_ms(steps):7.0f} ms  {1000 * tokens / median_ms(steps):6.0f} tokens/s  "
              f"{ratio:.2f} x  largest loss difference {gap:.4f}")  # fmt: skip
    flops = read_run(folder / "a").header.flops_per_token * tokens
    for dtype in (torch.float32, torch.bfloat16):
        rate = matmul_flops(dtype)
        share = 100 * flops / (median_ms(runs["gptfit, its defaults"]) / 1000) / rate
        print(f"  {share:.0f} % of this machine's {str(dtype)[6:]} matrix products ({rate / 1e9:.0f} GFLOPS)")
    limit = median_ms(base) / (1000 * flops / matmul_flops(torch.float32))
    print(f"  targets: {SPEED_TARGET} x and {RATE_TARGET} %; float32 matrix products alone would allow {limit:.2f} x")


def memory(folder: Path, args: argparse.Namespace) -> None:
    """One forward and backward of the 124M shape at B=8, T=1024 in a process of its own, whole and chunked."""
    whole, chunked = (measured_step(chunk) for chunk in (False, True))
    print("memory of a step: 12 x 768, vocabulary 50304, B=8, T=1024")
    for name, (seconds, peak) in {"whole logits": whole, "chunked loss": chunked}.items():
        print(f"  {name:<14} {peak / 2**30:5.2f} GiB  {seconds:6.1f} s")
    saved, slower = 100 * (1 - chunked[1] / whole[1]), 100 * (chunked[0] / whole[0] - 1)
    print(f"  {saved:.0f} % less memory (target {MEMORY_TARGET}), {slower:+.0f} % time (target +{SLOWDOWN_TARGET})")


def start(folder: Path, args: argparse.Namespace) -> None:
    """From the command to the first step's line."""
    data = folder / "data" / "start"
    write_tokens(data)
    # Torch keeps compiled headers in the temporary folder, wherever the rest is.
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TMPDIR": str(folder)}
    keys = {**MODEL, "max_iters": 1, "warmup_iters": 0, "eval_iters": 1, "device": "cpu", "dataset": str(data)}
    print("start to first step:")
    for name, changes in (("without compile", {"compile": False}), ("compile", {}), ("compile again", {})):
        began = time.perf_counter()
        process = popen(gptfit_words(folder / name.replace(" ", "-"), **{**keys, **changes}), **cache)
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("iter 0"))
        print(f"  {name:<16} {time.perf_counter() - began:5.1f} s")
        process.communicate()
    print("  target: under 10 s without compile")


def recipe(folder: Path, args: argparse.Namespace) -> None:
    """The CPU recipe of nanoGPT's README on Shakespeare's characters."""
    text_file = REPO.parent / "shared" / "data" / "tinyshakespeare.txt"
    if not text_file.is_file():
        print("recipe: needs ../shared/data/tinyshakespeare.txt")
        return
    text = text_file.read_text(encoding="utf-8")
    letters = sorted(set(text))
    write_tokens(folder / "shakespeare", np.searchsorted(np.array(letters), np.array(list(text))), len(text) // 10)
    gptfit(
        folder / "recipe", dataset=str(folder / "shakespeare"), n_layer=4, n_head=4, n_embd=128, block_size=64,
        batch_size=12, gradient_accumulation_steps=1, max_iters=2000, lr_decay_iters=2000, warmup_iters=100,
        learning_rate=1e-3, min_lr=1e-4, beta2=0.99, eval_interval=500, eval_iters=200, log_interval=100,
        device="cpu", compile=False, vocab_size=len(letters),
    )  # fmt: skip
    found = read_run(folder / "recipe").evals[-1].val_loss
    print(f"nanoGPT README's CPU recipe: val loss {found:.3f} (README {RECIPE_LOSS}, target +-{RECIPE_TOLERANCE})")


def kill(folder: Path, args: argparse.Namespace) -> None:
    """SIGKILL at random moments; the weights at the end against those of a run left alone."""
    data = folder / "data" / "kill"
    write_tokens(data)
    keys = {
        "n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 32, "batch_size": 4, "gradient_accumulation_steps": 2,
        "max_iters": 400, "lr_decay_iters": 400, "warmup_iters": 10, "eval_interval": 5, "eval_iters": 1,
        "dropout": 0.1, "device": "cpu", "compile": False, "dataset": str(data), "vocab_size": 50304,
    }  # fmt: skip
    gptfit(folder / "alone", **keys)
    moments, killed, while_saving = random.Random(1), 0, 0
    out = folder / "killed"
    for _ in range(args.kills):
        process = popen(gptfit_words(out, init_from="resume" if (out / "ckpt.pt").is_file() else "scratch", **keys))
        assert process.stdout is not None
        next((line for line in process.stdout if line.startswith("iter")), "")
        time.sleep(moments.uniform(0, 1.0))
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            killed += 1
        process.communicate()
        while_saving += bool(list(out.glob("*.tmp")))
    gptfit(out, init_from="resume", **keys)
    alone, after = load_checkpoint(folder / "alone"), load_checkpoint(out)
    equal = all(torch.equal(tensor, after.model[name]) for name, tensor in alone.model.items())
    verdict = "bit-equal" if equal and alone.iter_num == after.iter_num else "DIFFERENT"
    print(f"{killed} SIGKILLs, {while_saving} of them while saving: final weights {verdict}")


def measured_step(chunked: bool) -> tuple[float, int]:
    """(seconds, bytes above the idle process), measured in a child so that nothing is left over."""
    code = f"""
import time, torch
from gptfit.config.keys import TrainConfig
from gptfit.device.device import find_device
from gptfit.train.engine import build_engine
config = TrainConfig(device="cpu", compile=False, dtype="float32", batch_size=8, chunked_loss={chunked})
device = find_device(config)
engine = build_engine(config, config.shape(), device)
ids = torch.randint(50304, (8, 1024))
began = time.perf_counter()
engine.backward_micro_step(engine.forward_micro_step((ids, ids), True), 1)
print(time.perf_counter() - began, device.peak_memory_bytes())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    seconds, peak = done.stdout.split()
    return float(seconds), int(peak)


def write_tokens(folder: Path, ids: np.ndarray | None = None, val: int = 20_000) -> None:
    """Zipf-distributed ids unless given; no meta.pkl, so the vocabulary is nanoGPT's 50304."""
    folder.mkdir(parents=True, exist_ok=True)
    if ids is None:
        ids = np.minimum(np.random.default_rng(0).zipf(1.3, 400_000), 50256)
    ids[:-val].astype(np.uint16).tofile(folder / "train.bin")
    ids[-val:].astype(np.uint16).tofile(folder / "val.bin")


def gptfit_words(out_dir: Path, **keys: object) -> list[str]:
    return ["-m", "gptfit", "train", f"--out_dir={out_dir}", *(f"--{key}={value}" for key, value in keys.items())]


def gptfit(out_dir: Path, **keys: object) -> list[tuple[int, float, float]]:
    return finished(popen(gptfit_words(out_dir, **keys)))


def nanogpt(checkout: Path, **keys: object) -> list[tuple[int, float, float]]:
    words = ["train.py", "--eval_interval=1000", *(f"--{key}={value}" for key, value in keys.items())]
    return finished(popen(words, cwd=checkout))


def popen(words: list[str], cwd: Path | None = None, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd,
        env={**environment(), **variables},
    )  # fmt: skip


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPO)}


def finished(process: subprocess.Popen[str]) -> list[tuple[int, float, float]]:
    """(step, loss, ms) of every `iter` line, which both programs print."""
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(map(str, process.args))}\n{output[-2000:]}")
    return [(int(step), float(loss), float(ms)) for step, loss, ms in ITER.findall(output)]


def median_ms(steps: list[tuple[int, float, float]]) -> float:
    return statistics.median(ms for step, _, ms in steps if step >= WARM_UP_STEPS)


def matmul_flops(dtype: torch.dtype) -> float:
    a = torch.ones(2048, 2048, dtype=dtype)
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        torch.mm(a, a)
        seconds.append(time.perf_counter() - began)
    return 2 * 2048**3 / min(seconds)


if __name__ == "__main__":
    sys.exit(main())
