"""The second edition's ingredients by group at 6 x 256: all at once, then each added to those kept before, on the same
seeds, and kept only where the mean gain is larger than the seeds' spread.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from _recipe_compare import spread
from _recipe_runs import REPO, VOCABULARY, Curve, Kept, Runner, Setup, fingerprint

from gptfit.config.keys import TrainConfig
from gptfit.config.recipe import DECAY_FRACTION, MATRIX_RATE, training_keys

KEPT = REPO / "bench" / "recipe_groups.jsonl"
OWN_VOCABULARY = 4_096
VOCABULARY["own"] = OWN_VOCABULARY
SETUP = Setup("groups", "own", 6, 4, 256, 256, 8, steps=4_096, rates=(), eval_iters=12)
HORIZONS = (192, SETUP.steps)  # steps of the runs that docs/recipe.md looks for
EVALUATIONS = 3  # per run, after the one before the first step
SEEDS = 3
SHARE = 0.75  # of the first edition's tokens, with which the recipe is to reach its final loss
WIDTH = 118


@dataclass(frozen=True)
class Group:
    """Keys that belong together."""

    name: str
    keys: dict[str, Any] = field(default_factory=dict)


SECOND_ROUND = {
    "cautious_decay": True,
    "momentum_start": 0.85,
    "momentum": 0.97,
    "momentum_end": 0.90,
    "embedding_beta2": 0.995,
    "qk_scale": 1.2,
    "mlp_init": 0.4,
    "backout": True,
    "smear_gate": True,
}
EMA = Group("EMA-Nesterov on Muon's update", {"lookahead": 0.6})
GROUPS = (
    Group("value tables on every second layer, gated", {"value_embeddings": "tables"}),
    Group(
        "nanochat's second round: cautious decay to zero, momentum 0.85 to 0.97 to 0.90, embeddings' beta2 0.995, "
        "queries and keys x 1.2, MLP init x 0.4, backout, gated smear",
        SECOND_ROUND,
    ),
    Group("hashed bigram table on a quarter of the width, NorMuon", {"bigram": True, "normuon": True}),
    Group("residual and embedding scalars at nanochat's rates", {"layer_scalars": True}),
    EMA,
)
WHOLE = Group(
    "all of these but EMA-Nesterov at once",
    {key: value for group in GROUPS if group is not EMA for key, value in group.keys.items()},
)
# What the first edition has at these keys.
FIRST_EDITION: dict[str, Any] = {key: False if isinstance(value, bool) else 0.0 for key, value in WHOLE.keys.items()}
FIRST_EDITION |= {"value_embeddings": "none", "momentum": 0.95, "qk_scale": 1.0, "mlp_init": 1.0}
FIRST_EDITION |= {"learning_rate": MATRIX_RATE}  # whatever the batch


@dataclass(frozen=True)
class Found:
    """A group's runs beside those it was added to, seed by seed."""

    group: Group
    keys: dict[str, Any]  # all of them
    curves: list[Curve]
    before: list[Curve]

    @property
    def gains(self) -> list[float]:
        return [old.final - new.final for new, old in zip(self.curves, self.before, strict=True)]

    @property
    def is_kept(self) -> bool:
        finals = [curve.final for curve in self.before]
        return len(finals) >= SEEDS and statistics.fmean(self.gains) > max(finals) - min(finals)

    @property
    def tokens_share(self) -> float | None:
        """The part of the tokens after which every run is at the mean of what it was added to, on average."""
        target = statistics.fmean(curve.final for curve in self.before)
        reached = [tokens for curve in self.curves if (tokens := curve.reach(target))]
        total = self.before[0].points[-1].tokens
        return statistics.fmean(reached) / total if len(reached) == len(self.curves) else None


def parameters(keys: dict[str, Any]) -> int:
    return TrainConfig.unchecked(**SETUP.keys | keys, arch="modern").shape(OWN_VOCABULARY).parameters


def prepare_own(sources: Sequence[Path], folder: Path, size: int = OWN_VOCABULARY) -> Path:
    """The web files in a vocabulary learned from them."""
    name = "own" if size == OWN_VOCABULARY else f"own-{size}"
    out, tokenizer = folder / f"data-{name}", folder / f"{name}.json"
    if not out.exists():
        learn = ["tokenizer", "train", *map(str, sources), "--vocab-size", str(size), "--out", str(tokenizer)]
        encode = ["prepare", *map(str, sources), "--tokenizer", str(tokenizer), "--out", str(out)]
        for command in (learn, [*encode, "--val-fraction", "0.01"]):
            subprocess.run([sys.executable, "-m", "gptfit", *command], check=True, capture_output=True, cwd=REPO)
    return out


def run_name(keys: dict[str, Any], seed: int, steps: int, setup: Setup = SETUP) -> str:
    keys = FIRST_EDITION | keys
    said = (
        " ".join(f"{key}={value}" for key, value in keys.items() if FIRST_EDITION.get(key) != value) or "first edition"
    )
    return f"{setup.name} {said} seed {seed} steps {steps}, {fingerprint(setup.keys | keys)}"


def shorter(steps: int) -> Setup:
    """The share of the tokens of a first edition of so many steps, with the batch the recipe takes for them."""
    return replace(SETUP, steps=steps, share=1 / SHARE).with_recipes_batch


def recipe_keys(setup: Setup) -> dict[str, Any]:
    """What the recipe sets for a run of this length, where the first edition had something else."""
    edition = {key: value for key, value in setup.edition_keys.items() if key in FIRST_EDITION}
    training = training_keys(setup.our_steps, setup.ours.tokens_per_step)
    return edition | {key: training[key] for key in ("learning_rate", "decay_fraction")}


def shorter_name(steps: int, seed: int) -> str:
    setup = shorter(steps)
    return run_name(recipe_keys(setup), seed, setup.our_steps, setup.ours)


Curves = Callable[[dict[str, Any]], list[Curve]]


def walk(curves: Curves) -> Iterator[Found]:
    """The first edition with all groups, then every group in turn on top of those that were kept."""
    before = curves({})
    kept: dict[str, Any] = {}
    for group in (WHOLE, *GROUPS) if before else ():
        keys = kept | group.keys
        added = curves(keys)
        if not added:
            continue
        found = Found(group, keys, added, before[: len(added)])
        yield found
        if group is not WHOLE and found.is_kept:
            kept, before = keys, added


def run_groups(runner: Runner, kept: Kept, seeds: int, jobs: int, steps: int = SETUP.steps) -> None:
    """Runs what is not kept yet; one core each, so that it may go on beside other work."""
    sharing = runner.sharing_cores(jobs)

    def curve(keys: dict[str, Any], seed: int) -> Curve:
        changes = {"max_iters": steps, "eval_interval": steps // EVALUATIONS, "compile": True, "log_interval": 1}
        changes |= {"decay_fraction": DECAY_FRACTION}  # the first edition's, whatever the length
        run = run_name(keys, seed, steps)
        how = changes | FIRST_EDITION | keys
        return kept.get(
            run, lambda: sharing.gptfit_curve(replace(SETUP, steps=steps), seed, place=runner.place_of(run), **how)
        )

    def planned_shorter(seed: int) -> Curve:
        setup, length = shorter(steps), shorter(steps).our_steps
        is_long = steps == SETUP.steps  # enough for what compiling takes
        changes = {"max_iters": length, "eval_interval": length, "compile": is_long, "log_interval": 1}
        run = shorter_name(steps, seed)
        how = changes | FIRST_EDITION | recipe_keys(setup)
        return kept.get(run, lambda: sharing.gptfit_curve(setup.ours, seed, place=runner.place_of(run), **how))

    with ThreadPoolExecutor(jobs) as pool:
        finals = [curve.final for curve in pool.map(planned_shorter, range(1, seeds + 1))]
        print(f"planned for {SHARE:g} of {steps} steps: {spread(finals, 4)}", flush=True)
        for found in walk(lambda keys: list(pool.map(partial(curve, keys), range(1, seeds + 1)))):
            said = "kept" if found.is_kept else "not kept"
            print(f"{said}: {found.group.name}: gain {spread(found.gains, 4)}", flush=True)


def read_curves(kept: Kept, steps: int, keys: dict[str, Any]) -> list[Curve]:
    """The seeds that were run with these keys beyond the first edition's."""
    found = (kept.find(run_name(keys, seed, steps)) for seed in range(1, SEEDS + 1))
    return [curve for curve in takewhile(bool, found) if curve]


def read_groups(kept: Kept, steps: int) -> list[Found]:
    """What the kept runs of this length say, as far as they go."""
    return list(walk(partial(read_curves, kept, steps)))


def read_shorter(kept: Kept, steps: int) -> list[Curve]:
    """The recipe's runs that were planned for the share of the tokens."""
    found = (kept.find(shorter_name(steps, seed)) for seed in range(1, SEEDS + 1))
    return [curve for curve in takewhile(bool, found) if curve]


def shorter_line(kept: Kept, steps: int, first: float) -> str:
    """What they say beside the first edition's loss after all tokens."""
    curves = read_shorter(kept, steps)
    if not curves:
        return ""
    finals = [curve.final for curve in curves]
    missed = statistics.fmean(finals) - first
    verdict = "reached" if missed <= 0 else f"missed by {missed:.3f} nats"
    seeds = f"{len(curves)} seed{'s' * (len(curves) > 1)}"
    each = f"{shorter(steps).ours.tokens_per_step:,} tokens per step"
    return (
        f"planned for {SHARE:g} of the tokens of {steps:,} steps, {each}: {spread(finals, 4)} instead of {first:.4f}, "
        f"{curves[0].how}, {seeds}: {verdict}"
    )


def group_lines() -> list[str]:
    """The section of docs/recipe.md."""
    kept, lines = Kept(KEPT), []
    for steps in HORIZONS:
        if first := read_curves(kept, steps, {}):
            lines += ["", *_table(first, read_groups(kept, steps), steps)]
            if said := shorter_line(kept, steps, statistics.fmean(curve.final for curve in first)):
                about = f"The recipe as it is, with batch and momentum of its length ({_keys_parameters(steps):,} parameters), {said}."
                lines += ["", *textwrap.wrap(about, WIDTH)]
    return lines


def _keys_parameters(steps: int) -> int:
    return parameters(FIRST_EDITION | recipe_keys(shorter(steps)))


def _table(first: list[Curve], rows: list[Found], steps: int) -> list[str]:
    """Only its first lines where no group was run at this length."""
    tokens, finals = steps * SETUP.tokens_per_step, [curve.final for curve in first]
    about = (
        f"{steps:,} steps of {SETUP.tokens_per_step:,} tokens, {tokens:,} in all; first edition "
        f"({parameters(FIRST_EDITION):,} parameters): {spread(finals, 4)}, {len(finals)} seeds."
    )
    if not rows:
        return textwrap.wrap(about, WIDTH)
    lines = [
        textwrap.fill(about, WIDTH),
        "",
        "| added | parameters | val loss | gain, same seeds | its tokens for the loss before | kept |",
        "|---|---:|---|---|---:|---|",
    ]
    for row in rows:
        finals, share = [curve.final for curve in row.curves], row.tokens_share
        reached = f"{share:.2f}" if share else "not reached"
        if row.group is WHOLE:
            verdict = "beside the rest"
        elif len(finals) < SEEDS:
            verdict = f"open: {len(finals)} of {SEEDS} seeds"
        else:
            verdict = "yes" if row.is_kept else "no"
        lines.append(
            f"| {row.group.name} | {parameters(FIRST_EDITION | row.keys):,} | {spread(finals, 4)} | "
            f"{spread(row.gains, 4)} | {reached} | {verdict} |"
        )
    return lines
