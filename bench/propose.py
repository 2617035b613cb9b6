"""Does `propose` choose well on little data? Its choice and the choice's neighbours, trained for the same seconds.

nice -n 19 python bench/propose.py                 both data sets, one core, minutes of CPU time per run
nice -n 19 python bench/propose.py --seconds 30    shorter runs
nice -n 19 python bench/propose.py --data web_mdn  one of them; the other may run beside it

Time is a core's own (what the process used, not what passed), so that other programs hardly matter; a neighbour is
timed first and then gets the steps that fill the seconds. Losses are bits per byte of the same validation text. Runs
are kept in bench/propose_runs.jsonl and not made again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from _propose_runs import REPO, Prepared, Run, Timer, pages, shakespeare
from _recipe_runs import Kept

from gptfit.config.keys import TrainConfig
from gptfit.config.recipe import head_count, second_edition, training_keys
from gptfit.measured import Measurements
from gptfit.plan.candidates import ASPECTS, WIDTHS, Wish
from gptfit.plan.propose import propose

NEAR = 0.05  # nats per token of the data: what a choice may be worse than its best neighbour
SETS = {"tinyshakespeare": shakespeare, "web_mdn": pages}
FIRST_GUESSES = ((2, 64), (4, 128))  # shapes timed before anything is proposed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=REPO.parent / "shared" / "data", help="where the texts are")
    parser.add_argument("--data", choices=tuple(SETS), help="only this one")
    parser.add_argument("--seconds", type=float, default=120.0, help="of one core, per run")
    parser.add_argument("--folder", type=Path, help="where tokens are kept for the next time (default: nowhere)")
    parser.add_argument("--keep", type=Path, default=REPO / "bench" / "propose_runs.jsonl", help="finished runs")
    args = parser.parse_args()
    if not (args.shared / "tinyshakespeare.txt").exists():
        print("nothing to run: name the folder with tinyshakespeare.txt and web_mdn.parquet with --shared")
        return 0
    torch.set_num_threads(1)
    kept, worst = Kept(args.keep), 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = args.folder or Path(name)
        timer = Timer(folder, kept)
        for prepare_set in SETS.values() if args.data is None else [SETS[args.data]]:
            worst = max(worst, compare(prepare_set(args.shared, folder), timer, args.seconds))
    print(f"\nthe choice is at most {worst:.3f} nats per token above its best neighbour (aim: {NEAR})")
    return 0 if worst <= NEAR else 1


def compare(data: Prepared, timer: Timer, seconds: float) -> float:
    """How far the choice ends above the best of its neighbours, in nats per token of its own vocabulary."""
    choice = choose(data, timer, seconds)
    runs = [choice, *neighbours(choice, data)]
    for run in runs:
        timer.time(run)
    losses = [timer.train(run, seconds) for run in runs]
    print(f"\n{data.name}: {seconds:g} s of one core each")
    for run, loss in sorted(zip(runs, losses, strict=True), key=lambda pair: pair[1]):
        mark = "  <- proposed" if run is choice else ""
        print(f"  {loss:.4f} bits/byte  {run.name:<34} {timer.steps(run, seconds):>6} steps{mark}")
    return (losses[0] - min(losses)) * choice.nats_per_bit


def choose(data: Prepared, timer: Timer, seconds: float) -> Run:
    """Propose, time what was proposed, and propose again until the proposal is one whose speed was measured."""
    folder = data.folders[0]
    for layers, width in FIRST_GUESSES:
        sizes = {"n_layer": layers, "n_embd": width, "n_head": head_count(width), "block_size": 256, "batch_size": 16}
        config = TrainConfig(**sizes, gradient_accumulation_steps=1, **training_keys(1))
        timer.time(Run.of(config.replace(**second_edition(config.shape(folder.vocab_size))), folder))
    for _ in range(6):
        wish = Wish(
            gpu=None,
            hours=seconds / 3600,
            data=folder.facts,
            vocab_size=folder.vocab_size,
            block_size=256,
            source=str(data.source) if len(data.folders) > 1 else "",
            shares=data.shares,
        )
        answer = propose(wish, Measurements(tuple(timer.speeds)))
        chosen = data.folder_of(answer.choice.vocabulary)
        run = Run.of(answer.choice.plan.config, chosen)
        if timer.knows(run):
            return run
        timer.time(run)
    return run


def neighbours(choice: Run, data: Prepared) -> list[Run]:
    """One thing changed at a time: width, depth, tokens per step, recipe, dropout, vocabulary."""
    config = choice.config
    found = [*_widths(config), *_depths(config)]
    if config.batch_size > 1:
        found.append(config.replace(batch_size=config.batch_size // 2))
    found.append(config.replace(batch_size=2 * config.batch_size))
    found.append(config.replace(dropout=0.0 if config.dropout else 0.1))
    runs = [Run.of(changed, choice.folder) for changed in found]
    return runs + [replace(choice, folder=folder) for folder in data.folders if folder is not choice.folder]


def _widths(config: TrainConfig) -> list[TrainConfig]:
    at = WIDTHS.index(config.n_embd)
    near = [WIDTHS[i] for i in (at - 1, at + 1) if 0 <= i < len(WIDTHS)]
    return [config.replace(n_embd=width, n_head=head_count(width)) for width in near]


def _depths(config: TrainConfig) -> list[TrainConfig]:
    layers = {max(2, round(config.n_embd / aspect)) for aspect in ASPECTS} | {config.n_layer + 1}
    return [config.replace(n_layer=n) for n in sorted(layers - {config.n_layer})][:2]


if __name__ == "__main__":
    sys.exit(main())
