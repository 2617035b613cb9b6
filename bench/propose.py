"""Does `propose` choose well on little data? Its choice and the choice's neighbours, trained for the same seconds.

python bench/propose.py                 both data sets, two minutes of one core per run
python bench/propose.py --jobs 2        two runs at a time
python bench/propose.py --seconds 30    shorter runs
python bench/propose.py --data web_mdn  one of them
python bench/propose.py --data little   what is proposed for 120,000 characters in each vocabulary, several epochs

Time is a core's own (what the process used, not what passed); a neighbour is timed first, with nothing else on the
machine, and then gets the steps that fill the seconds. Losses are bits per byte of the whole validation text. Runs are
kept in bench/propose_runs.jsonl and not made again; times with the tokens (--folder), since they are of one machine and hour.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from _propose_runs import REPO, Folder, Prepared, Run, Timer, little, pages, shakespeare
from _recipe_runs import Kept

from gptfit.config.keys import TrainConfig
from gptfit.config.recipe import head_count, second_edition, training_keys
from gptfit.gpus import find
from gptfit.measured import Measurements
from gptfit.plan.candidates import ASPECTS, WIDTHS, Wish
from gptfit.plan.propose import propose

NEAR = 0.05  # nats per token of the data: what a choice may be worse than its best neighbour
SETS = {"tinyshakespeare": shakespeare, "web_mdn": pages}
LITTLE = "little"
CARD, HOURS = "4070", 1.0  # more than enough for little text, so that the data decides
FIRST_GUESSES = ((2, 64), (4, 128))  # shapes timed before anything is proposed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=REPO.parent / "shared" / "data", help="where the texts are")
    parser.add_argument("--data", choices=(*SETS, LITTLE), help="only this one")
    parser.add_argument("--seconds", type=float, default=120.0, help="of one core, per run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one core")
    parser.add_argument(
        "--folder", type=Path, help="where tokens and times are kept for the next time (default: nowhere)"
    )
    parser.add_argument("--keep", type=Path, default=REPO / "bench" / "propose_runs.jsonl", help="finished runs")
    args = parser.parse_args()
    if not (args.shared / "tinyshakespeare.txt").exists():
        print("nothing to run: name the folder with tinyshakespeare.txt and web_mdn.parquet with --shared")
        return 0
    kept, worst = Kept(args.keep), 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = args.folder or Path(name)
        timer = Timer(folder, kept, max(1, args.jobs))
        if args.data in (None, LITTLE):
            worst = compare_vocabularies(little(args.shared, folder), timer)
        if args.data == LITTLE:
            return _verdict(worst)
        for prepare_set in SETS.values() if args.data is None else [SETS[args.data]]:
            worst = max(worst, compare(prepare_set(args.shared, folder), timer, args.seconds))
    return _verdict(worst)


def _verdict(worst: float) -> int:
    print(f"\nthe choice is at most {worst:.3f} nats per token above its best neighbour (aim: {NEAR})")
    return 0 if worst <= NEAR else 1


def compare_vocabularies(data: Prepared, timer: Timer) -> float:
    """How far the chosen vocabulary ends above the best one, each as proposed, in nats per token of the choice."""
    usual = data.folders[0]
    wish = Wish(find(CARD), HOURS, usual.facts, usual.vocab_size, block_size=256)
    folders = sorted(data.folders, key=lambda folder: folder.vocab_size)  # the quickest first
    answers = [
        propose(replace(wish, data=folder.facts, vocab_size=folder.vocab_size)).choice.plan for folder in folders
    ]
    runs = [Run(answer.config, folder) for answer, folder in zip(answers, folders, strict=True)]
    losses = timer.train_as_proposed(runs)
    chosen = propose(replace(wish, source=str(data.source), shares=data.shares)).choice.vocabulary
    print(f"\n{data.name}: as proposed for a {CARD} and {HOURS:g} hour, trained on one core")
    for run, answer, loss in zip(runs, answers, losses, strict=True):
        assert answer.loss is not None
        assert answer.loss.bits_per_byte is not None
        mark = "  <- proposed" if run.folder.size == chosen else ""
        print(f"  {loss:.4f} bits/byte, {answer.loss.bits_per_byte.value:.3f} expected  {run.name}{mark}")
    place = [folder.size for folder in folders].index(chosen)
    return (losses[place] - min(losses)) * runs[place].nats_per_bit


def compare(data: Prepared, timer: Timer, seconds: float) -> float:
    """How far the choice ends above the best of its neighbours, in nats per token of its own vocabulary."""
    choice, others = choose(data, timer, seconds)
    runs = [choice, *others]
    losses = timer.train(runs, seconds)
    print(f"\n{data.name}: {seconds:g} s of one core each")
    for run, loss in sorted(zip(runs, losses, strict=True), key=lambda pair: pair[1]):
        mark = "  <- proposed" if run is choice else ""
        print(f"  {loss:.4f} bits/byte  {run.name:<34} {timer.steps(run, seconds):>6} steps{mark}")
    return (losses[0] - min(losses)) * choice.nats_per_bit


def choose(data: Prepared, timer: Timer, seconds: float) -> tuple[Run, list[Run]]:
    """Propose, time the choice and its neighbours, and propose again until it is between those whose speed was measured.

    With the choice come those it is compared with, nanoGPT's recipe as proposed beside it among them.
    """
    folder = data.folders[0]
    timer.time(*(_guess(layers, width, data.smallest) for layers, width in FIRST_GUESSES))
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
        run = Run(answer.choice.plan.config, data.folder_of(answer.choice.vocabulary))
        plain = [Run(other.plan.config, folder) for other in answer.alternatives if other.title == "plain nanoGPT"]
        others = [*plain, *neighbours(run, data)]
        if all(map(timer.knows, (run, *others))):
            break
        timer.time(run, *others)
    return run, others


def _guess(layers: int, width: int, folder: Folder) -> Run:
    sizes = {"n_layer": layers, "n_embd": width, "n_head": head_count(width), "block_size": 256, "batch_size": 8}
    config = TrainConfig(**sizes, gradient_accumulation_steps=1, **training_keys(1, 8 * 256))
    return Run(config.replace(**second_edition(config.shape(folder.vocab_size))), folder)


def neighbours(choice: Run, data: Prepared) -> list[Run]:
    """One thing changed at a time: width, depth, tokens per step, dropout, vocabulary."""
    config = choice.config
    found = [*_widths(config), *_depths(config)]
    if config.batch_size > 1:
        found.append(config.replace(batch_size=config.batch_size // 2))
    found.append(config.replace(batch_size=2 * config.batch_size))
    found.append(config.replace(dropout=0.0 if config.dropout else 0.1))
    runs = [Run(changed, choice.folder) for changed in found]
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
