"""The modern recipe beside stock nanoGPT: loss against tokens and seconds, and what each ingredient is worth.

python bench/recipe.py                           the step time of both recipes in gptfit
python bench/recipe.py --nanogpt PATH            and one small model, minutes on two idle cores
python bench/recipe.py --nanogpt PATH --full     5M bytes and 30M GPT-2 vocabulary, 3 seeds, hours
python bench/recipe.py --ablation                rewrites docs/recipe.md from runs without each ingredient
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from _recipe_doc import ABLATION, RESULTS, VARIANTS, Row, Variant, write_doc
from _recipe_runs import REPO, Curve, Point, Runner, Setup

from gptfit.config import TrainConfig
from gptfit.recipe import training_keys
from gptfit.run.train import train
from gptfit.units import si

SMALL = Setup("small", "bytes", 4, 2, 128, 128, 8, steps=300, eval_iters=16)
FULL = (
    Setup("5M", "bytes", 6, 4, 256, 256, 16, steps=800, eval_iters=20),
    Setup("30M", "gpt2", 6, 6, 384, 256, 16, steps=800, eval_iters=20),
)
RATES = (1e-3, 2e-3, 4e-3)  # nanoGPT's best of these is what we compare with
OURS_SHARE = 4  # our horizon is this part of nanoGPT's tokens
TOKENS_TARGET, SECONDS_TARGET, STEP_TARGET = 4.0, 6.0, 1.10
STEP_TIME_STEPS = 12


@dataclass(frozen=True)
class Comparison:
    """One setup, all seeds."""

    setup: Setup
    rate: float
    theirs: list[Curve]
    ours: list[Curve]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, help="a nanoGPT checkout; its own train.py is run")
    parser.add_argument("--data", type=Path, help="a folder with .parquet files (default: ../shared/data)")
    parser.add_argument("--full", action="store_true", help="the two models of the claim, 3 seeds")
    parser.add_argument("--ablation", action="store_true", help="runs without each ingredient; writes docs/recipe.md")
    parser.add_argument("--seeds", type=int, default=0, help="default 3; the ablation's default 2")
    parser.add_argument("--threads", type=int, default=0, help="OMP_NUM_THREADS of every run (default: all cores)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None, help="ours; on with --full")
    args = parser.parse_args()
    data = args.data or REPO.parent / "shared" / "data"
    sources = sorted(data.glob("web_*.parquet")) or sorted(data.glob("*.parquet"))
    if not sources:
        print("nothing to run: name a folder with .parquet files with --data")
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.ablation:
            if args.threads:
                torch.set_num_threads(args.threads)
            ablate(prepare(sources, ABLATION.tokenizer, folder), folder, args.seeds or 2)
        if args.nanogpt:
            is_compiled = args.full if args.compile is None else args.compile
            nanogpt = args.nanogpt.resolve()
            for setup in FULL if args.full else (SMALL,):
                runner = Runner(folder, prepare(sources, setup.tokenizer, folder), args.threads, nanogpt)
                report(compare(runner, setup, args.seeds or 3, is_compiled))
        for setup in () if args.ablation else FULL if args.full else FULL[:1]:
            report_step_time(Runner(folder, prepare(sources, setup.tokenizer, folder), args.threads), setup)
    return 0


def prepare(sources: Sequence[Path], tokenizer: str, folder: Path) -> Path:
    """One data folder per tokenizer, the same for both programs."""
    out = folder / f"data-{tokenizer}"
    if not out.exists():
        words = ["prepare", *map(str, sources), "--tokenizer", tokenizer, "--out", str(out), "--val-fraction", "0.01"]
        subprocess.run([sys.executable, "-m", "gptfit", *words], check=True, capture_output=True, cwd=REPO)
    return out


def compare(runner: Runner, setup: Setup, seeds: int, is_compiled: bool) -> Comparison:
    """nanoGPT at three rates with the first seed, at the best of them with the others; ours with every seed."""
    tuned = {}
    for rate in RATES:
        tuned[rate] = runner.nanogpt_curve(setup, rate, 1)
        print(f"  nanoGPT lr {rate:g}: {tuned[rate].final:.4f}", flush=True)
    rate = min(tuned, key=lambda rate: tuned[rate].final)
    theirs = [tuned[rate], *(runner.nanogpt_curve(setup, rate, seed) for seed in range(2, seeds + 1))]
    steps = setup.steps // OURS_SHARE
    ours = []
    for seed in range(1, seeds + 1):
        ours.append(
            runner.gptfit_curve(
                setup, seed, max_iters=steps, eval_interval=max(1, steps // 15), compile=is_compiled, log_interval=1
            )
        )
        print(f"  modern seed {seed}: {ours[-1].final:.4f}", flush=True)
    return Comparison(setup, rate, theirs, ours)


def report(result: Comparison) -> None:
    setup = result.setup
    finals = [curve.final for curve in result.theirs]
    target = statistics.fmean(finals)
    print(
        f"{setup.name}: {setup.n_layer} x {setup.n_embd}, {setup.tokenizer}, {setup.tokens_per_step:,} tokens per step"
    )
    show_curve(f"nanoGPT, best lr {result.rate:g}", result.theirs)
    show_curve(f"modern, horizon 1/{OURS_SHARE}", result.ours)
    reached = [curve.reach(target) for curve in result.ours]
    points = [point for point in reached if point is not None]
    if len(points) < len(reached):
        print(f"{len(reached) - len(points)} of {len(reached)} modern runs never reached {target:.4f}")
        return
    theirs_tokens = result.theirs[0].points[-1].tokens
    theirs_seconds = statistics.fmean(curve.points[-1].seconds for curve in result.theirs)
    tokens = [theirs_tokens / point.tokens for point in points]
    seconds = [theirs_seconds / point.seconds for point in points]
    compiled = [theirs_seconds / (p.seconds + c.compile_seconds) for p, c in zip(points, result.ours, strict=True)]
    print(f"nanoGPT's final loss {target:.4f} with 1/{spread(tokens)} of the tokens (target 1/{TOKENS_TARGET:g})")
    print(
        f"  and 1/{spread(seconds)} of the training seconds (target 1/{SECONDS_TARGET:g}), counting compilation 1/{spread(compiled)}"
    )


def show_curve(name: str, curves: list[Curve]) -> None:
    finals = [curve.final for curve in curves]
    print(f"{name}: final {spread(finals, 4)} over {len(curves)} seeds, {curves[0].ms_per_step:.0f} ms per step")
    for i in range(0, len(curves[0].points), 2):
        column = [curve.points[i] for curve in curves]
        print(
            f"  {si(column[0].tokens):>8} tokens {mean_seconds(column):8.1f} s  {spread([p.val_loss for p in column], 4)}"
        )


def mean_seconds(points: list[Point]) -> float:
    return statistics.fmean(point.seconds for point in points)


def spread(values: list[float], digits: int = 2) -> str:
    """Mean and range, e.g. 1.53 (1.51 to 1.55)."""
    middle = f"{statistics.fmean(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def report_step_time(runner: Runner, setup: Setup) -> None:
    """Our gpt2 path and the modern recipe in turns, compiled, same model size, same batch."""
    times: dict[str, list[float]] = {"gpt2": [], "modern": []}
    keys = {"max_iters": STEP_TIME_STEPS, "lr_decay_iters": STEP_TIME_STEPS, "eval_interval": STEP_TIME_STEPS}
    for seed in (1, 2):
        for recipe in times:
            more = keys if recipe == "modern" else keys | {"warmup_iters": 1}
            curve = runner.gptfit_curve(
                setup, seed, recipe=recipe, compile=True, log_interval=1, **(more | {"eval_iters": 1})
            )
            times[recipe].append(curve.ms_per_step)
    gpt2, modern = (min(times[recipe]) for recipe in ("gpt2", "modern"))
    print(
        f"{setup.name} step, compiled: modern {modern:.0f} ms, gpt2 {gpt2:.0f} ms, {modern / gpt2:.2f} times (target {STEP_TARGET:g})"
    )


def ablate(data: Path, folder: Path, seeds: int) -> None:
    """Every variant in this process; the recipe itself with at least three seeds, to know the noise."""
    rows = []
    for variant in VARIANTS:
        n_seeds = seeds if rows else max(3, seeds)
        losses = [ablation_loss(data, folder / f"{len(rows)}-{seed}", seed, variant) for seed in range(1, n_seeds + 1)]
        rows.append(Row(variant.name, [round(loss, 4) for loss in losses]))
        print(f"  {variant.name:42} {spread(losses, 4)}", flush=True)
    parameters = TrainConfig.unchecked(**ABLATION.keys, arch="modern").shape(257).parameters
    facts = {"setup": asdict(ABLATION), "parameters": parameters, "rows": [asdict(row) for row in rows]}
    RESULTS.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    write_doc()


def ablation_loss(data: Path, out: Path, seed: int, variant: Variant) -> float:
    steps = ABLATION.steps
    keys = ABLATION.keys | {"dataset": str(data), "out_dir": str(out), "seed": seed, "compile": False}
    keys |= {"max_iters": steps, "eval_interval": steps, "log_interval": steps}
    result = train(TrainConfig(**{**keys, **training_keys(steps), **variant.keys}))
    assert result.val_loss is not None
    return result.val_loss


if __name__ == "__main__":
    sys.exit(main())
