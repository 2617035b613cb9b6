"""docs/recipe.md from the ablation's results: what was run, what each ingredient is worth, what was left out."""

from __future__ import annotations

import json
import statistics
import textwrap
from dataclasses import dataclass, field
from typing import Any

from _recipe_compare import OURS_SHARE, Comparison, read_found, table
from _recipe_runs import REPO, Setup

RESULTS = REPO / "bench" / "recipe_results.json"
DOC = REPO / "docs" / "recipe.md"
WIDTH = 118
ABLATION = Setup("ablation", "bytes", 3, 2, 128, 128, 8, steps=250, rates=(), eval_iters=32)


@dataclass(frozen=True)
class Variant:
    """The recipe with one thing changed. `takes_out` says whether the default has the ingredient."""

    name: str
    keys: dict[str, Any] = field(default_factory=dict)
    takes_out: bool = True


@dataclass(frozen=True)
class Row:
    name: str
    losses: list[float]


VARIANTS = (
    Variant("the recipe"),
    Variant("projections and head not zero at first", {"zero_init": False}),
    Variant(
        "AdamW at 4e-3 for all instead of Muon and its rates",
        {"optimizer": "adamw", "learning_rate": 4e-3, "beta1": 0.9},
    ),
    Variant("learned instead of rotary positions", {"positions": "learned"}),
    Variant("LayerNorm with weights instead of RMSNorm", {"norm": "layer"}),
    Variant("no QK-norm", {"qk_norm": False}),
    Variant("GELU instead of squared ReLU", {"activation": "gelu"}),
    Variant("tied head", {"tied_head": True}),
    Variant("no smear", {"smear": False}),
    Variant("no decay: constant rate", {"schedule": "constant"}),
    Variant("with value residual", {"value_residual": True}, takes_out=False),
    Variant("with layer scalars", {"layer_scalars": True}, takes_out=False),
    Variant("with logit soft-cap 15", {"logit_softcap": 15.0}, takes_out=False),
)


def write_doc() -> None:
    DOC.write_text(render(json.loads(RESULTS.read_text(encoding="utf-8")), read_found()), encoding="utf-8")


def render(facts: dict[str, Any], comparisons: list[Comparison]) -> str:
    """The whole page. Deterministic, so that a test can hold it against the results."""
    setup, rows = facts["setup"], {row["name"]: Row(**row) for row in facts["rows"]}
    recipe = rows[VARIANTS[0].name]
    noise = max(recipe.losses) - min(recipe.losses)
    per_step = setup["batch_size"] * setup["block_size"]
    about = (
        f"Each row is a {setup['n_layer']} x {setup['n_embd']} model ({facts['parameters']:,} parameters, bytes) after "
        f"{setup['steps'] * per_step:,} tokens of web text, {per_step:,} per step, in float32 on a CPU, with the recipe's "
        f"keys and one of them changed. The recipe ran with {len(recipe.losses)} seeds, which differ by {noise:.3f}; the "
        f"others with {len(rows[VARIANTS[1].name].losses)}, compared with the recipe's runs of the same seeds. Worth is "
        "the loss an ingredient saves; below the difference between seeds it is not known to be worth anything."
    )
    taken, added = (_worths(rows, takes_out) for takes_out in (True, False))
    small = [name for name, _, worth in taken if worth < noise]
    lines = [*INTRODUCTION, *_beside_nanogpt(comparisons), "## What each ingredient is worth", ""]
    lines += [textwrap.fill(about, WIDTH), "", *_table("the recipe, but", taken), ""]
    if small:
        nothing = f"Worth nothing that can be seen at this size: {'; '.join(small)}. {KEPT}"
        lines += [textwrap.fill(nothing, WIDTH), ""]
    lines += ["Left out of the default, each one key away:", "", *_table("the recipe", added), "", *CAVEATS]
    return "\n".join(lines)


def _beside_nanogpt(comparisons: list[Comparison]) -> list[str]:
    if not comparisons:
        return []
    about = (
        "`python bench/recipe.py --nanogpt PATH --full`: nanoGPT's own train.py in float32 on a CPU at the best of "
        f"{len(comparisons[0].setup.rates)} learning rates, and `gptfit train --recipe modern` with the same data, "
        f"tokenizer, model size and batch, planned for 1/{OURS_SHARE} of the tokens. Tokens and seconds: what the recipe "
        "needed for nanoGPT's final validation loss. Seconds are steps times the time of a step, measured in turns: "
        "nanoGPT as it ships for a CPU, without torch.compile, gptfit with it; no evaluations."
    )
    return ["## Beside stock nanoGPT", "", textwrap.fill(about, WIDTH), "", *table(comparisons), ""]


def _worths(rows: dict[str, Row], takes_out: bool) -> list[tuple[str, float, float]]:
    """(variant, loss, worth) of all that take an ingredient out, or of all that add one."""
    found = []
    for variant in VARIANTS[1:]:
        if variant.takes_out == takes_out:
            losses = rows[variant.name].losses
            without = statistics.fmean(losses) - statistics.fmean(rows[VARIANTS[0].name].losses[: len(losses)])
            found.append((variant.name, statistics.fmean(losses), without if takes_out else -without))
    return found


def _table(heading: str, worths: list[tuple[str, float, float]]) -> list[str]:
    rows = [f"| {name} | {loss:.3f} | {worth:+.3f} |" for name, loss, worth in worths]
    return [f"| {heading} | val loss | worth |", "|---|---:|---:|", *rows]


INTRODUCTION = [
    "# The modern recipe",
    "",
    "Generated by `python bench/recipe.py`; do not edit. `gptfit train --recipe modern` sets the keys that",
    "`gptfit/recipe.py` computes for the size: `arch = 'modern'`, `optimizer = 'muon'`, `schedule = 'wsd'`, their rates,",
    "batch and horizon. The sources of the numbers stand beside them there.",
    "",
    "| key | default | what it is |",
    "|---|---|---|",
    "| `positions` | `rotary` | queries and keys turn with their place; half of the channel pairs do not turn |",
    "| `norm` | `rms` | RMSNorm without weights, also on the embedding |",
    "| `qk_norm` | `True` | queries and keys of unit size |",
    "| `activation` | `relu2` | squared ReLU in the MLP |",
    "| `zero_init` | `True` | attention and MLP outputs and the head start at zero |",
    "| `tied_head` | `False` | the head has its own weights and learning rate |",
    "| `smear` | `True` | a learned share, per channel, of the embedding of the token before |",
    "| `value_residual` | `False` | a learned share of the embedding in every layer's values |",
    "| `layer_scalars` | `False` | learned scales of the stream and of the embedding before every layer |",
    "| `logit_softcap` | `0` | bends logits smoothly into plus or minus this |",
    "",
    "`wsd` keeps the rate constant and decays it to zero over the last part (`decay_fraction`) of the run. The checkpoint",
    "at the start of the decay is kept as `before-decay.pt`: `gptfit train --init_from=resume --out_dir=... --max_iters=N",
    "--lr_decay_iters=N` with a larger N goes on from there, as if the run had been meant to be that long; the shorter",
    "run's model stays as `finished-STEP.pt`.",
    "",
]
KEPT = (
    "They stay because they cost nothing and the published recipes at 124M have them: norms without weights are fewer "
    "tensors, blocks that start at zero need no warm-up, unit queries and keys bound the attention logits."
)
CAVEATS = [
    "A small model on few tokens: what helps here may not at 124M, and the other way round. Soft-cap, value residuals and",
    "layer scalars are in the published recipes for models 100 times larger (modded-nanogpt, nanochat).",
    "",
]
