"""Sampling beside nanoGPT's generate: tokens/s at 1,024 tokens of context, one sequence and a batch of 16, on CPU.

Both run the same random weights of a 124M model (12 x 768, vocabulary 50,304) in float32, in turns, in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch

from gptfit.generate.decode import generate
from gptfit.generate.pick import Picking
from gptfit.model.build import build_model
from gptfit.shape import ModelShape

SHAPE = ModelShape(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304)
NEW_TOKENS = 24  # ours, after a prompt that leaves the window full at the end
NANOGPT_TOKENS = 3
ROUNDS = 3
TARGET_ONE, TARGET_BATCH = 10, 5
REPO = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nanogpt", type=Path, help="a nanoGPT checkout; its own model.py is run")
    parser.add_argument("--no-harness", action="store_true", help="leave out lm-evaluation-harness on an export")
    args = parser.parse_args()
    torch.manual_seed(1337)
    model = build_model(SHAPE).eval()
    prompt = torch.randint(50257, (SHAPE.block_size - NEW_TOKENS,)).tolist()

    def ours(rows: int) -> tuple[float, float]:
        return timed(generate(model, prompt, rows, NEW_TOKENS, Picking(0.8, 200)), rows)

    runs: dict[str, Callable[[], tuple[float, float]]] = {"one": lambda: ours(1), "batch": lambda: ours(16)}
    if args.nanogpt:
        theirs = nanogpt_model(args.nanogpt, model.state_dict())
        start = torch.tensor([prompt + prompt[:NEW_TOKENS]])[:, : SHAPE.block_size - NANOGPT_TOKENS]
        runs["nanoGPT"] = lambda: timed(nanogpt_tokens(theirs, start), 1)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            seconds[name].append(run())
    report({name: (median(times, 0), median(times, 1)) for name, times in seconds.items()})
    return 0 if args.no_harness else run_harness()


def timed(tokens: Iterator[object], rows: int) -> tuple[float, float]:
    """(seconds to the first token, tokens/s of all rows together after it)."""
    begun = time.perf_counter()
    moments = []
    for _ in tokens:
        moments.append(time.perf_counter())
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    return moments[0] - begun, rows / statistics.median(gaps)


def median(times: list[tuple[float, float]], column: int) -> float:
    return statistics.median(row[column] for row in times)


def nanogpt_model(checkout: Path, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    module = load_module(checkout / "model.py")
    with contextlib.redirect_stdout(io.StringIO()):
        keys = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias")
        model = module.GPT(module.GPTConfig(**{key: getattr(SHAPE, key) for key in keys}))
    model.load_state_dict(weights)
    found: torch.nn.Module = model.eval()
    return found


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


def nanogpt_tokens(model: torch.nn.Module, text: torch.Tensor) -> Iterator[int]:
    """One token per call of its own generate, which keeps nothing between tokens."""
    for _ in range(NANOGPT_TOKENS):
        text = model.generate(text, 1, temperature=0.8, top_k=200)  # type: ignore[operator]
        yield int(text[0, -1])


def report(found: dict[str, tuple[float, float]]) -> None:
    print(f"124M model, float32, {torch.get_num_threads()} threads, context up to {SHAPE.block_size:,} tokens")
    print(f"{'':26}{'first token':>14}{'tokens/s':>12}")
    names = {"nanoGPT": "nanoGPT generate", "one": "gptfit, 1 sequence", "batch": "gptfit, 16 of one prompt"}
    for name, label in names.items():
        if name in found:
            first_s, rate = found[name]
            print(f"{label:26}{first_s:>12.2f} s{rate:>12.2f}")
    if "nanoGPT" in found:
        print(f"one sequence: {found['one'][1] / found['nanoGPT'][1]:.1f}x nanoGPT (to reach: {TARGET_ONE}x)")
    else:
        print("nanoGPT left out: give its checkout with --nanogpt PATH")
    print(f"batch of 16: {found['batch'][1] / found['one'][1]:.1f}x one sequence (to reach: {TARGET_BATCH}x)")


def run_harness() -> int:
    """The slow tests of evaluation: lm-evaluation-harness, offline, on an exported model."""
    words = [sys.executable, "-m", "pytest", "-q", "-m", "slow", str(REPO / "tests" / "torch" / "test_harness.py")]
    print("lm-evaluation-harness on an exported model, offline:", flush=True)
    return subprocess.run(words, cwd=REPO).returncode


if __name__ == "__main__":
    sys.exit(main())
