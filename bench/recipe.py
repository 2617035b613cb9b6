"""The modern recipe beside stock nanoGPT: loss against tokens and seconds, and what each ingredient is worth.

python bench/recipe.py                           the step time of both recipes in gptfit
python bench/recipe.py --nanogpt PATH            and one small model, minutes on two idle cores
python bench/recipe.py --nanogpt PATH --full     5M bytes and 30M GPT-2 vocabulary, 3 seeds, hours; into docs/recipe.md
python bench/recipe.py --ablation                rewrites docs/recipe.md from runs without each ingredient
python bench/recipe.py --groups --jobs 2         the second edition by group, days on two cores; goes on where it was
python bench/recipe.py --own --nanogpt PATH      nanoGPT's 30M bits per byte with a vocabulary of its own, timed
python bench/recipe.py --epochs 1M --jobs 2      few tokens seen often, with and without the preset for it
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from _recipe_compare import EDITION, OWN_BATCH, Comparison, report, report_step_times, save_found, spread
from _recipe_doc import ABLATION, FAST, RESULTS, VARIANTS, Row, Variant, write_doc
from _recipe_epochs import CASES, prepare_few, run_epochs
from _recipe_epochs import KEPT as EPOCHS_KEPT
from _recipe_groups import HORIZONS, KEPT, SEEDS, prepare_own, run_groups
from _recipe_own import CASES as CASES_OWN
from _recipe_own import KEPT as OWN_KEPT
from _recipe_own import run_own
from _recipe_runs import REPO, TURNS, VOCABULARY, Curve, Kept, Runner, Setup, fingerprint

from gptfit.config.keys import DEFAULTS, INGREDIENTS, TrainConfig
from gptfit.config.recipe import DECAY_FRACTION, training_keys
from gptfit.device.device import find_device
from gptfit.train.train import train

SMALL = Setup("small", "bytes", 4, 2, 128, 128, 8, steps=304, rates=(1e-3, 2e-3, 4e-3), eval_iters=16)
FULL = (
    Setup(
        "5M", "bytes", 6, 4, 256, 256, 16, steps=800, rates=(1e-3, 2e-3, 4e-3), eval_iters=20, share=10
    ).with_recipes_batch,
    Setup(
        "30M", "gpt2", 6, 6, 384, 256, 16, steps=736, rates=(5e-4, 1e-3, 2e-3), eval_iters=12, share=6.5
    ).with_recipes_batch,
)
# The second where a step takes seconds. The median counts: the first few also wait for memory (device/settling.py).
STEP_TIME_STEPS, LONG_STEP_TIME_STEPS = 24, 14
EVALUATIONS = (
    1  # of ours, beside the one before the first step; between them the curve, which sags, is taken as straight
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, help="a nanoGPT checkout; its own train.py is run")
    parser.add_argument("--data", type=Path, help="a folder with .parquet files (default: ../shared/data)")
    parser.add_argument("--full", action="store_true", help="the two models of the claim, 3 seeds")
    parser.add_argument("--size", choices=[setup.name for setup in FULL], help="with --full: only this model")
    parser.add_argument("--keep", type=Path, help="finished runs, e.g. bench/recipe_runs.jsonl: go on from them")
    parser.add_argument("--ablation", action="store_true", help="runs without each ingredient; writes docs/recipe.md")
    parser.add_argument("--groups", action="store_true", help="the second edition's groups; into docs/recipe.md")
    parser.add_argument("--group-steps", type=int, default=HORIZONS[-1], help="length of their runs")
    parser.add_argument(
        "--epochs", choices=("100k", "1M"), help="16 epochs of so many tokens, plain and with the preset"
    )
    parser.add_argument("--own", action="store_true", help="with --nanogpt: the 30M model in a vocabulary of its own")
    parser.add_argument("--case", choices=[case.name for case in CASES_OWN], help="with --own: only this model")
    parser.add_argument(
        "--folder", type=Path, help="where data and runs are kept, for the next start (default: nowhere)"
    )
    parser.add_argument("--seeds", type=int, default=0, help="default 3")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, at least 1; the timed ones run alone")
    parser.add_argument(
        "--nanogpt-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of its losses: as it ships for a CPU, or as on a card, in half the time where the CPU has units for it",
    )
    parser.add_argument("--untimed", action="store_true", help="losses only: for a machine that does other things too")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None, help="ours; on with --full")
    args = parser.parse_args()
    data = args.data or REPO.parent / "shared" / "data"
    sources = sorted(data.glob("web_*.parquet")) or sorted(data.glob("*.parquet"))
    if not sources:
        print("nothing to run: name a folder with .parquet files with --data")
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = args.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        if args.ablation:
            ablate(prepare(sources, ABLATION.tokenizer, folder), folder, args.seeds or 3)
        if args.groups:
            runner = Runner(folder, prepare_own(sources, folder))
            run_groups(runner, Kept(KEPT), args.seeds or SEEDS, max(1, args.jobs), args.group_steps)
            write_doc()
        for case in (case for case in CASES if args.epochs and case.setup.name.endswith(f" {args.epochs}")):
            prepare_own(sources, folder)
            runner = Runner(folder, prepare_few(sources, folder / "own.json", folder, case.unique))
            run_epochs(runner, Kept(EPOCHS_KEPT), case, args.seeds or SEEDS, max(1, args.jobs))
            write_doc()
        if args.own and args.nanogpt:
            usual = Runner(folder, prepare(sources, "gpt2", folder), args.nanogpt.resolve())
            for setup in (case for case in CASES_OWN if args.case in (None, case.name)):
                own = Runner(folder, prepare_own(sources, folder, VOCABULARY[setup.tokenizer]))
                run_own(setup, own, usual, Kept(OWN_KEPT), args.seeds or 1, not args.untimed)
            write_doc()
        elif args.nanogpt:
            is_compiled = args.full if args.compile is None else args.compile
            setups = [setup for setup in FULL if args.size in (None, setup.name)] if args.full else [SMALL]
            for setup in setups:
                runner = Runner(folder, prepare(sources, setup.tokenizer, folder), args.nanogpt.resolve())
                seeds, kept, jobs = args.seeds or 3, Kept(args.keep), max(1, args.jobs)
                how = (args.nanogpt_dtype, not args.untimed)
                found = compare(runner, setup, seeds, is_compiled, kept, jobs, *how)
                report(found)
                if args.full:
                    save_found(found)
                    write_doc()
        elif not (args.ablation or args.groups or args.epochs):
            runner = Runner(folder, prepare(sources, FULL[0].tokenizer, folder))
            report_step_times(FULL[0], step_times(runner, FULL[0], is_compiled=True)[0])
    return 0


def prepare(sources: Sequence[Path], tokenizer: str, folder: Path) -> Path:
    """One data folder per tokenizer, the same for both programs."""
    out = folder / f"data-{tokenizer}"
    if not out.exists():
        words = ["prepare", *map(str, sources), "--tokenizer", tokenizer, "--out", str(out), "--val-fraction", "0.01"]
        subprocess.run([sys.executable, "-m", "gptfit", *words], check=True, capture_output=True, cwd=REPO)
    return out


def compare(
    runner: Runner,
    setup: Setup,
    seeds: int,
    is_compiled: bool,
    kept: Kept,
    jobs: int,
    their_dtype: str = "float32",
    is_timed: bool = True,
) -> Comparison:
    """nanoGPT at three rates with the first seed, at the best of them with the others; ours with every seed.

    Losses depend neither on the compiler nor on what else the machine does, and so little on the number format (the doc
    has one run in both) that a kept run of nanoGPT may be of either. Times do depend on all of these: they are measured
    apart, nanoGPT's in float32 without the compiler.
    """
    sharing, dtype = runner.sharing_cores(jobs), find_device(TrainConfig(device="cpu")).dtype
    ours_setup, steps = setup.ours, setup.our_steps
    keys = {
        "max_iters": steps,
        "eval_interval": max(1, steps // EVALUATIONS),
        "compile": is_compiled,
        "log_interval": 1,
    }
    ingredients = {key: DEFAULTS[key] for key in INGREDIENTS} | setup.edition_keys
    training = training_keys(steps, ours_setup.tokens_per_step) | ours_setup.head_keys
    recipe = fingerprint(ours_setup.keys | training | ingredients)

    def nanogpt(rate: float, seed: int) -> Curve:
        run = f"{setup.name} nanoGPT lr {rate:g} seed {seed} steps {setup.steps}"
        printed = kept.find(f"{run}, {fingerprint(setup.keys)}")
        run = f"{run} measured, {fingerprint(setup.keys)}"
        if printed and not kept.find(run):  # of before it was measured; the page says so
            return printed
        return kept.get(run, partial(sharing.nanogpt_losses, setup, rate, seed, their_dtype, compile=is_compiled))

    def is_kept(rate: float, seed: int) -> bool:
        """Fewer seeds of ours are still compared with all of nanoGPT's."""
        run = f"{setup.name} nanoGPT lr {rate:g} seed {seed} steps {setup.steps}"
        return any(kept.find(f"{run}{how}, {fingerprint(setup.keys)}") for how in ("", " measured"))

    def modern(seed: int) -> Curve:
        ways = [f"{setup.name} modern seed {seed} steps {steps} {dtype}{how}, {recipe}" for how in ("", " compiled")]
        run = next((way for way in ways if kept.find(way)), ways[is_compiled])
        return kept.get(run, partial(sharing.gptfit_curve, ours_setup, seed, **keys))

    pool = ThreadPoolExecutor(jobs)
    try:
        tuning = {rate: pool.submit(nanogpt, rate, 1) for rate in setup.rates}
        ours = [pool.submit(modern, seed) for seed in range(1, seeds + 1)]
        rate = min(tuning, key=lambda rate: tuning[rate].result().final)
        theirs = [tuning[rate], *(pool.submit(nanogpt, rate, seed) for seed in range(2, seeds + 1))]
        theirs += [pool.submit(nanogpt, rate, seed) for seed in range(seeds + 1, 4) if is_kept(rate, seed)]
        for run in as_completed([*theirs, *ours]):
            run.result()  # one that failed or was stopped ends the bench
    finally:
        pool.shutdown(cancel_futures=True)
    curves = ([run.result() for run in theirs], [run.result() for run in ours])
    times = step_times(runner, setup, is_compiled) if is_timed else ({}, {})
    found = Comparison(setup, rate, *curves, *times, edition=EDITION)
    return replace(found, matrix_rate=found.rate_now)


def step_times(runner: Runner, setup: Setup, is_compiled: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds per step: of the modern recipe and our gpt2 path in turns, of others the best of two medians.

    And the seconds that a first start of nanoGPT and of modern takes beside its steps.
    """
    runner.forget_compiled_code()
    steps = LONG_STEP_TIME_STEPS if setup.n_embd > FULL[0].n_embd else STEP_TIME_STEPS
    keys = {"max_iters": steps, "lr_decay_iters": steps, "eval_interval": steps}
    keys |= {"log_interval": 1, "eval_iters": 1}
    ours = keys | {"compile": is_compiled}
    first = {"modern": runner.gptfit_curve(setup, 1, **ours)}  # nothing is compiled yet
    programs: dict[str, Callable[[], Curve]] = {}
    if setup.our_batch:
        programs[OWN_BATCH] = lambda: runner.gptfit_curve(setup.ours, 1, **ours)
    if runner.nanogpt:
        programs["nanoGPT"] = lambda: runner.nanogpt_curve(setup, setup.rates[0], 1, **keys)
    first |= {name: run() for name, run in programs.items()}
    times = {name: min(first[name].ms_per_step, run().ms_per_step) for name, run in programs.items()}
    longer = ours | {"max_iters": TURNS, "lr_decay_iters": TURNS, "eval_interval": TURNS}
    both = {"modern": longer, "gpt2": longer | {"recipe": "gpt2", "warmup_iters": 1}}
    times |= runner.ms_in_turns(setup, both, TURNS)
    return times, {name: first[name].other_seconds for name in ("nanoGPT", "modern") if name in first}


def ablate(data: Path, folder: Path, seeds: int) -> None:
    """Every variant in this process, with the same seeds."""
    rows: list[Row] = []
    for variant in VARIANTS:
        losses, fast_losses = (
            [
                ablation_loss(data, folder / f"{len(rows)}-{rate}-{seed}", seed, variant, rate)
                for seed in range(1, n + 1)
            ]
            for rate, n in ((1, seeds), (FAST, seeds if variant.also_fast else 0))
        )
        rows.append(Row(variant.name, losses, fast_losses))
        fast = f", at {FAST} times the rate {spread(fast_losses, 4)}" if fast_losses else ""
        print(f"  {variant.name:52} {spread(losses, 4)}{fast}", flush=True)
    facts = {
        "setup": asdict(ABLATION),
        "parameters": ABLATION.parameters("modern"),
        "rows": [asdict(row) for row in rows],
    }
    RESULTS.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    write_doc()


def ablation_loss(data: Path, out: Path, seed: int, variant: Variant, rate: int) -> float:
    steps = ABLATION.steps
    keys = ABLATION.keys | {"dataset": str(data), "out_dir": str(out), "seed": seed}
    keys |= {"compile": False, "dtype": "float32", "max_iters": steps, "eval_interval": steps, "log_interval": steps}
    # The first edition decayed over as much of every run.
    first = training_keys(steps, ABLATION.tokens_per_step) | {"decay_fraction": DECAY_FRACTION}
    keys |= {**first, **variant.keys}
    keys["learning_rate"] *= rate
    result = train(TrainConfig(**keys))
    assert result.val_loss is not None
    return round(result.val_loss, 4)


if __name__ == "__main__":
    sys.exit(main())
