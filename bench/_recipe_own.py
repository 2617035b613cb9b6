"""A vocabulary of the text's own: nanoGPT's 30M bits per byte, and the training seconds the recipe needs for them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from _recipe_compare import read_found, spread
from _recipe_runs import REPO, VOCABULARY, Curve, Kept, Runner, Setup, fingerprint

from gptfit.config.recipe import training_keys
from gptfit.dataset import read_dataset
from gptfit.units import si

KEPT = REPO / "bench" / "recipe_own.jsonl"
FACTS = REPO / "bench" / "recipe_own.json"
VOCABULARY["own4k"], VOCABULARY["own8k"] = 4_096, 8_192  # published fits have 8k as the best at 6 x 384
SETUP = Setup("30M own", "own8k", 6, 6, 384, 256, 16, 736, rates=(), eval_iters=12, share=8).with_recipes_batch
# In so little time a smaller model sees more text and ends lower; that is what `propose` is for.
SMALL = Setup("small own", "own4k", 4, 3, 192, 256, 16, 736, rates=(), eval_iters=12, share=1.6).with_recipes_batch
CASES = (SETUP, SMALL)
SETUP30 = replace(SETUP, tokenizer="gpt2")
EVALUATIONS = 2
TARGET = 15.0  # nanoGPT's training seconds over ours
TIMED_STEPS = 6


@dataclass(frozen=True)
class OwnFacts:
    """What the bits are counted with, and both programs' times; the curves are kept beside."""

    setup: Setup
    bytes_per_token: float
    gpt2_bytes_per_token: float
    nanogpt_loss: float  # nats per GPT-2 token: the mean of its seeds' last checkpoints
    nanogpt_ms: float
    our_ms: float  # of a step, both measured in one go

    @property
    def target_bits(self) -> float:
        return self.nanogpt_loss / math.log(2) / self.gpt2_bytes_per_token

    @property
    def target_loss(self) -> float:
        """The same in nats per token of the own vocabulary."""
        return self.target_bits * math.log(2) * self.bytes_per_token

    def bits(self, loss: float) -> float:
        return loss / math.log(2) / self.bytes_per_token

    def seconds_ratio(self, curve: Curve) -> float | None:
        reached = curve.reach(self.target_loss)
        if reached is None:
            return None
        return self.setup.steps * self.nanogpt_ms / (reached / self.setup.ours.tokens_per_step * self.our_ms)

    def said(self, curves: Sequence[Curve]) -> str:
        """The share of nanoGPT's seconds, or by how much its bits per byte were missed."""
        ratios = [ratio for curve in curves if (ratio := self.seconds_ratio(curve))]
        if len(ratios) == len(curves):
            return f"1/{spread(ratios, 1)}"
        bits, seconds = [self.bits(curve.final) for curve in curves], self.setup.our_steps * self.our_ms
        share = self.setup.steps * self.nanogpt_ms / seconds
        return (
            f"missed: {spread(bits, 3)} bits per byte instead of {self.target_bits:.3f} after 1/{self.setup.share:g} of the tokens, "
            f"in 1/{share:.1f} of its seconds"
        )


def run_name(setup: Setup, seed: int) -> str:
    training = training_keys(setup.our_steps, setup.ours.tokens_per_step)
    keys = fingerprint(setup.ours.keys | setup.edition_keys | training | setup.ours.head_keys)
    return f"{setup.name} modern seed {seed} steps {setup.our_steps}, {keys}"


def run_own(setup: Setup, runner: Runner, gpt2: Runner, kept: Kept, seeds: int, is_timed: bool) -> None:
    """Losses may be had beside other work; both programs' times, one after the other, only alone on the machine."""
    every = {"max_iters": setup.our_steps, "eval_interval": setup.our_steps // EVALUATIONS, "compile": False}
    for seed in range(1, seeds + 1):
        kept.get(run_name(setup, seed), partial(runner.gptfit_curve, setup.ours, seed, **every, log_interval=1))
    if not is_timed:
        return
    usual = next(found for found in read_found() if found.setup.name == "30M")
    steps = {"max_iters": TIMED_STEPS, "lr_decay_iters": TIMED_STEPS, "eval_interval": TIMED_STEPS, "eval_iters": 1}
    nanogpt = gpt2.nanogpt_curve(replace(usual.setup, eval_iters=1), usual.rate, 1, **steps, log_interval=1)
    ours = runner.gptfit_curve(setup.ours, 1, **every | {"log_interval": 1} | steps)
    own, theirs = (val_bytes_per_token(which.data) for which in (runner, gpt2))
    loss = statistics.fmean(curve.final for curve in usual.theirs)
    facts = OwnFacts(setup, own, theirs, loss, nanogpt.ms_per_step, ours.ms_per_step)
    numbers = {name: value for name, value in facts.__dict__.items() if name != "setup"}
    FACTS.write_text(json.dumps(_kept_facts() | {setup.name: numbers}, indent=1) + "\n", encoding="utf-8")


def _kept_facts() -> dict[str, dict[str, float]]:
    return json.loads(FACTS.read_text(encoding="utf-8")) if FACTS.exists() else {}  # type: ignore[no-any-return]


def val_bytes_per_token(folder: Path) -> float:
    """Of the held-out documents, which are the same in every vocabulary."""
    val = read_dataset(folder).val
    assert val is not None
    assert val.text_bytes
    return val.text_bytes / val.tokens


def own_found() -> list[tuple[OwnFacts, list[Curve]]]:
    """Every case that was run and timed."""
    kept, facts = Kept(KEPT), _kept_facts()
    found = []
    for setup in CASES:
        curves = [curve for seed in range(1, 4) if (curve := kept.find(run_name(setup, seed)))]
        if curves and setup.name in facts:
            found.append((OwnFacts(setup, **facts[setup.name]), curves))
    return found


def own_lines() -> list[str]:
    """The section of docs/recipe.md."""
    found = own_found()
    if not found:
        return [f"Not run yet. Aim: 1/{TARGET:g}.", ""]
    first = found[0][0]
    return ["| model | val, bits per byte | steps | ms per step | seconds for nanoGPT's bits per byte |",
            "|---|---|---:|---:|---|",
            (f"| nanoGPT 30M, GPT-2's vocabulary, {si(SETUP30.parameters('gpt2'))} parameters | {first.target_bits:.3f} "
            f"| {SETUP.steps} | {' and '.join(f'{facts.nanogpt_ms:.0f}' for facts, _ in found)} | |"),
            *(_row(facts, curves) for facts, curves in found), ""]  # fmt: skip


def _row(facts: OwnFacts, curves: Sequence[Curve]) -> str:
    said = f"{facts.said(curves)} (aim 1/{TARGET:g})"
    bits = [facts.bits(curve.final) for curve in curves]
    setup, seeds = facts.setup, f"{len(curves)} seed{'s' * (len(curves) > 1)}"
    size = f"{setup.n_layer} x {setup.n_embd}, its own {VOCABULARY[setup.tokenizer]:,}"
    return (
        f"| modern, edition 2, {size}, {si(setup.parameters('modern', 2))} parameters, {curves[0].how}, {seeds} "
        f"| {spread(bits, 3)} | {setup.our_steps} of {setup.ours.tokens_per_step:,} tokens | {facts.our_ms:.0f} | {said} |"
    )
