"""Card checks that train: compiled models, prefetched batches, a run resumed, two processes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gptfit.checkpoint.format import load_checkpoint
from gptfit.config.keys import TrainConfig
from gptfit.data.token_files import open_split
from gptfit.dataset import read_dataset
from gptfit.device.compiler import find_compile_problem
from gptfit.device.device import Device
from gptfit.doctor.verdict import COMPILE_PROBLEM, Verdict, worst
from gptfit.logs.events import Event, Message, Step
from gptfit.train.batches import Feed
from gptfit.train.train import train

VOCAB_SIZE = 97
BATCHES = 500
LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2, "float16": 2e-2}
# Of a gradient's norm: rounding in another order shows there first.
NORM_TOLERANCE = {"float32": 5e-3, "bfloat16": 5e-2, "float16": 5e-2}
REPORT = "please report card.json"
# Blocks that calibration times compiled, which then finds them in the compiler's cache.
CALIBRATED = {"n_embd": 256, "n_head": 4, "block_size": 128, "batch_size": 8}
# What is compiled on a card; a CPU, whose compiler takes ten seconds each, tries the first.
GPT2_VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2": CALIBRATED,
    "checkpointing": {"checkpoint_activations": True},
    "dropout": {"dropout": 0.1},
    "batch 1": {"batch_size": 1, "gradient_accumulation_steps": 4},
}
MODERN_VARIANTS: dict[str, dict[str, Any]] = {"modern": {"arch": "modern", "chunked_loss": True, **CALIBRATED}}


def compiled_gpt2(device: Device) -> Verdict:
    return _compiled(device, GPT2_VARIANTS if device.kind == "cuda" else {"gpt2": GPT2_VARIANTS["gpt2"]})


def compiled_modern(device: Device) -> Verdict:
    return _compiled(device, MODERN_VARIANTS)


def _compiled(device: Device, variants: dict[str, dict[str, Any]]) -> Verdict:
    """Nothing may be compiled after the warm-up, and losses and gradients must be those of eager training."""
    problem = find_compile_problem(device)
    if problem:
        text = f"torch.compile does not work: {problem}"
        return Verdict("warning", text, "training is eager and slower", {COMPILE_PROBLEM: problem})
    wrong: list[str] = []
    values: dict[str, Any] = {}
    for name, changes in variants.items():
        again, loss, norm = _compile_and_compare(device, changes)
        values[name] = {"compiled_after_warm_up": again, "loss_difference": loss, "gradient_difference": norm}
        is_equal = loss <= LOSS_TOLERANCE[device.dtype] and norm <= NORM_TOLERANCE[device.dtype]
        if again or (name != "dropout" and not is_equal):  # which draws other numbers in compiled code
            wrong.append(name)
    text = f"{', '.join(variants)}: nothing compiled after warm-up, losses and gradients as eager"
    if wrong:
        return Verdict("error", f"compiled models differ: {', '.join(wrong)}", f"{REPORT}; use --compile=False", values)
    return Verdict("ok", text, values=values)


def _compile_and_compare(device: Device, changes: dict[str, Any]) -> tuple[int, float, float]:
    """(graphs compiled after the warm-up, largest relative difference of a step's loss, the same of its gradient's norm)."""
    runs: dict[bool, list[Step]] = {}
    graphs: list[int] = []
    for is_compiled in (True, False):
        found: list[Step] = []

        def heard(event: Event, found: list[Step] = found) -> None:
            if isinstance(event, Message) and event.kind == "compile":
                graphs.append(_graphs())
            if isinstance(event, Step):
                found.append(event)

        with tempfile.TemporaryDirectory() as folder:
            torch.compiler.reset()
            # More windows than the val file has, which are no multiple of 2: the last batch of an evaluation is smaller.
            train(_config(device, Path(folder), compile=is_compiled, eval_iters=4, max_iters=4, **changes), heard)
        if is_compiled:
            graphs.append(_graphs())
        runs[is_compiled] = found
    both = list(zip(runs[True], runs[False], strict=True))
    losses, norms = (
        [_difference(getattr(a, name), getattr(b, name)) for a, b in both] for name in ("loss", "grad_norm")
    )
    return graphs[-1] - graphs[0], worst(losses), worst(norms)


def _difference(value: float | None, expected: float | None) -> float:
    """Relative. A step that eager training skipped, as float16 does until it finds its scale, says nothing."""
    if not expected or not math.isfinite(expected):
        return 0.0
    return math.nan if value is None else abs(value - expected) / abs(expected)


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def batches(device: Device) -> Verdict:
    """Read ahead by a thread and copied without waiting, every batch must arrive as it is in the file."""
    with tempfile.TemporaryDirectory() as folder:
        data = _tokens(Path(folder), 200_000)
        file = open_split(read_dataset(data), "train", 128, VOCAB_SIZE)
        feed, block = Feed(file, 128, device), 128
        generator = np.random.default_rng(0)
        starts = [generator.integers(0, 150_000, 8) for _ in range(BATCHES)]
        wrong = 0
        try:
            feed.prefetch(starts[0])
            for i, expected in enumerate(starts):
                ids, targets = feed.take()
                if i + 1 < BATCHES:
                    feed.prefetch(starts[i + 1])
                rows = torch.from_numpy(file.windows(expected, block + 1))
                wrong += not (torch.equal(ids.cpu(), rows[:, :-1]) and torch.equal(targets.cpu(), rows[:, 1:]))
        finally:
            feed.close()
    if wrong:
        return Verdict("error", f"{wrong} of {BATCHES} batches did not arrive as they are in the file", REPORT)
    return Verdict("ok", f"{BATCHES} prefetched batches arrived as sent")


def resume(device: Device) -> Verdict:
    """Three steps and three more against six: the same data and state; bit for bit where no kernel adds in any order."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        whole = _config(device, base, out_dir=str(base / "whole"), max_iters=6)
        train(whole)
        halves: dict[str, Any] = {"out_dir": str(base / "halves"), "lr_decay_iters": 6}
        train(_config(device, base, max_iters=3, **halves))
        train(_config(device, base, max_iters=6, init_from="resume", **halves))
        one, two = load_checkpoint(base / "whole").model, load_checkpoint(base / "halves").model
    equal = all(torch.equal(one[name], two[name]) for name in one)
    error = worst(float((one[name] - two[name]).abs().max()) for name in one)
    values = {"bit_equal": equal, "largest_difference": error}
    if equal:
        return Verdict("ok", "3 + 3 steps are 6 steps, bit for bit", values=values)
    text = f"3 + 3 steps differ from 6 by at most {error:.1e} of a weight"
    if device.kind == "cuda" and error < 1e-2:
        why = "exact in data and state; flash attention and embeddings add their gradients in any order"
        return Verdict("ok", f"{text}: {why}", values=values)
    return Verdict("error", text, REPORT, values)


def two_processes(device: Device) -> Verdict:
    if torch.cuda.device_count() < 2:
        return Verdict("skipped", "needs two cards")
    with tempfile.TemporaryDirectory() as folder:
        config = _config(device, Path(folder), max_iters=4).replace(device="cuda")
        defaults = TrainConfig().as_dict()
        words = [f"--{key}={value}" for key, value in config.as_dict().items() if value != defaults[key]]
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            "-m",
            "gptfit",
            "train",
        ]
        done = subprocess.run([*command, *words], capture_output=True, text=True, env=dict(os.environ))
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
        return Verdict(
            "error",
            f"two processes fail: {last[:160]}",
            "NCCL_DEBUG=INFO says more; NCCL_P2P_DISABLE=1 helps some boards",
        )
    return Verdict("ok", "two processes train together")


def _config(device: Device, folder: Path, **changes: Any) -> TrainConfig:
    data = folder / "data"
    if not data.is_dir():
        _tokens(data, 6_000)
    small = TrainConfig(
        dataset=str(data),
        out_dir=str(folder / "out"),
        n_layer=2,
        n_head=2,
        n_embd=128,
        block_size=64,
        batch_size=2,
        gradient_accumulation_steps=2,
        vocab_size=VOCAB_SIZE,
        max_iters=6,
        lr_decay_iters=changes.get("max_iters", 6),
        warmup_iters=1,
        eval_interval=3,
        eval_iters=1,
        device=str(device.torch_device),
        dtype=device.dtype,
        compile=False,
    )
    return small.replace(**changes)


def _tokens(folder: Path, count: int) -> Path:
    """Text-like ids: a noisy cycle, so that there is something to learn."""
    folder.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0).integers(0, 3, count)
    ids = ((np.arange(count) * 7 + noise) % VOCAB_SIZE).astype(np.uint16)
    ids[: count * 5 // 6].tofile(folder / "train.bin")
    ids[count * 5 // 6 :].tofile(folder / "val.bin")
    return folder
