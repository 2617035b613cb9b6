"""Few tokens seen often: the recipe as for one epoch beside the recipe that notices, each with its lowest and last loss."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from _recipe_compare import spread
from _recipe_groups import OWN_VOCABULARY
from _recipe_runs import REPO, VOCABULARY, Curve, Kept, Runner, Setup, fingerprint

from gptfit.config.recipe import WEIGHT_DECAY, many_epochs_keys, second_edition
from gptfit.units import si

KEPT = REPO / "bench" / "recipe_epochs.jsonl"
EPOCHS = 16
VAL_TOKENS = 26_000  # at least, of documents that training never sees
EVALUATIONS = 8
TARGET = 0.05  # nats that the preset is to end below the plain recipe


@dataclass(frozen=True)
class Case:
    """So many different tokens, and a model for them."""

    unique: int
    setup: Setup

    @property
    def steps(self) -> int:
        return EPOCHS * self.unique // self.setup.tokens_per_step


VOCABULARY["own"] = OWN_VOCABULARY
CASES = (
    Case(100_000, Setup("epochs 100k", "own", 3, 2, 128, 128, 16, steps=0, rates=(), eval_iters=12)),
    Case(1_000_000, Setup("epochs 1M", "own", 3, 2, 128, 128, 32, steps=0, rates=(), eval_iters=6)),
)


def plain_keys(setup: Setup) -> dict[str, Any]:
    """What the recipe sets for data that is seen once."""
    once = {"weight_decay": WEIGHT_DECAY, "dropout": 0.0, "shuffle_documents": False}
    return second_edition(setup.shape("modern")) | once


def preset_keys(setup: Setup) -> dict[str, Any]:
    shape = setup.shape("modern")
    return second_edition(shape, EPOCHS) | many_epochs_keys(EPOCHS, has_documents=True)


def prepare_few(sources: Sequence[Path], tokenizer: Path, folder: Path, unique: int) -> Path:
    """About that many tokens for training, drawn from all over the files."""
    out, fraction = folder / f"data-{unique}", VAL_TOKENS / (unique + VAL_TOKENS)
    if not out.exists():
        words = ["prepare", *map(str, sources), "--tokenizer", str(tokenizer), "--out", str(out), "--shuffle"]
        words += ["--limit", f"{unique + VAL_TOKENS}tokens", "--val-fraction", f"{fraction:.4f}"]
        subprocess.run([sys.executable, "-m", "gptfit", *words], check=True, capture_output=True, cwd=REPO)
    return out


def run_name(case: Case, name: str, keys: dict[str, Any], seed: int) -> str:
    return f"{case.setup.name} {name} seed {seed} steps {case.steps}, {fingerprint(case.setup.keys | keys)}"


def sides(case: Case) -> dict[str, dict[str, Any]]:
    return {"plain": plain_keys(case.setup), "preset": preset_keys(case.setup)}


def run_epochs(runner: Runner, kept: Kept, case: Case, seeds: int, jobs: int) -> None:
    sharing, setup = runner.sharing_cores(jobs), replace(case.setup, steps=case.steps)
    every = {"max_iters": case.steps, "eval_interval": case.steps // EVALUATIONS, "log_interval": 1}

    def curve(name: str, keys: dict[str, Any], seed: int) -> Curve:
        return kept.get(run_name(case, name, keys, seed), partial(sharing.gptfit_curve, setup, seed, **every | keys))

    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(curve, *side, seed) for seed in range(1, seeds + 1) for side in sides(case).items()]
        for run in waiting:
            run.result()


def epoch_lines() -> list[str]:
    """The table of docs/recipe.md."""
    kept = Kept(KEPT)
    lines = [
        f"| {EPOCHS} epochs of | model | plain: last, lowest | preset: last, lowest | ends lower by | aim |",
        "|---|---|---|---|---|---|",
    ]
    for case in CASES:
        found = {name: _curves(kept, case, name, keys) for name, keys in sides(case).items()}
        n_seeds = min(map(len, found.values()))
        if not n_seeds:
            lines.append(f"| {si(case.unique)} tokens | {_model(case)} | not run yet | not run yet | | {TARGET} |")
            continue
        gains = [a.final - b.final for a, b in zip(*found.values(), strict=False)]
        cells = " | ".join(_said(curves[:n_seeds]) for curves in found.values())
        seeds = f"{spread(gains, 3)}, {n_seeds} seed{'s' * (n_seeds > 1)}"
        lines.append(f"| {si(case.unique)} tokens | {_model(case)} | {cells} | {seeds} | {TARGET} |")
    return lines


def gains_of(case: Case) -> list[float]:
    """By how much the preset ends below the plain recipe, seed by seed."""
    kept = Kept(KEPT)
    plain, preset = (_curves(kept, case, name, keys) for name, keys in sides(case).items())
    return [a.final - b.final for a, b in zip(plain, preset, strict=False)]


def _curves(kept: Kept, case: Case, name: str, keys: dict[str, Any]) -> list[Curve]:
    found = (kept.find(run_name(case, name, keys, seed)) for seed in range(1, 4))
    return [curve for curve in found if curve]


def _model(case: Case) -> str:
    return f"{case.setup.n_layer} x {case.setup.n_embd}"


def _said(curves: list[Curve]) -> str:
    lowest = [min(point.val_loss for point in curve.points) for curve in curves]
    return f"{spread([curve.final for curve in curves], 3)}, {spread(lowest, 3)}"
