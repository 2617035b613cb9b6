"""docs/recipe.md from the ablation's results: what was run, what each ingredient is worth, what was left out."""

from __future__ import annotations

import json
import statistics
import textwrap
from dataclasses import dataclass, field
from typing import Any

from _recipe_aims import aim_lines, tried_lines
from _recipe_compare import EDITION, Comparison, read_found, table
from _recipe_epochs import epoch_lines
from _recipe_groups import group_lines
from _recipe_own import own_lines
from _recipe_runs import REPO, TURNS, Setup

RESULTS = REPO / "bench" / "recipe_results.json"
DOC = REPO / "docs" / "recipe.md"
WIDTH = 118
ABLATION = Setup("ablation", "bytes", 3, 2, 128, 128, 8, steps=250, rates=(), eval_iters=32)


FAST = 3  # times Muon's rate: what an ingredient does when the rate is wrong


@dataclass(frozen=True)
class Variant:
    """The recipe with one thing changed. `takes_out` says whether the default has the ingredient."""

    name: str
    keys: dict[str, Any] = field(default_factory=dict)
    takes_out: bool = True
    also_fast: bool = False  # run at FAST times Muon's rate too


@dataclass(frozen=True)
class Row:
    """A variant's losses, one per seed."""

    name: str
    losses: list[float]
    fast_losses: list[float]


VARIANTS = (
    Variant("the recipe", also_fast=True),
    Variant(
        "AdamW at 4e-3 for all instead of Muon and its rates",
        {"optimizer": "adamw", "learning_rate": 4e-3, "beta1": 0.9},
    ),
    Variant("learned instead of rotary positions", {"positions": "learned"}),
    Variant("LayerNorm with weights instead of RMSNorm", {"norm": "layer"}, also_fast=True),
    Variant("no QK-norm", {"qk_norm": False}, also_fast=True),
    Variant("GELU instead of squared ReLU", {"activation": "gelu"}),
    Variant("tied head", {"tied_head": True}),
    Variant("no smear", {"smear": False}),
    Variant("no decay: constant rate", {"schedule": "constant"}),
    Variant("with projections and head zero at first", {"zero_init": True}, takes_out=False, also_fast=True),
    Variant("with a warm-up over a tenth", {"warmup_iters": 25}, takes_out=False, also_fast=True),
    Variant("with value residual", {"value_residual": True}, takes_out=False, also_fast=True),
    Variant("with layer scalars", {"layer_scalars": True}, takes_out=False, also_fast=True),
    Variant("with logit soft-cap 15", {"logit_softcap": 15.0}, takes_out=False, also_fast=True),
)


def write_doc() -> None:
    DOC.write_text(render(json.loads(RESULTS.read_text(encoding="utf-8")), read_found()), encoding="utf-8")


def render(facts: dict[str, Any], comparisons: list[Comparison]) -> str:
    """The whole page. Deterministic, so that a test can hold it against the results."""
    setup, rows = facts["setup"], {row["name"]: Row(**row) for row in facts["rows"]}
    recipe = rows[VARIANTS[0].name]
    noise, fast_noise = (max(losses) - min(losses) for losses in (recipe.losses, recipe.fast_losses))
    per_step = setup["batch_size"] * setup["block_size"]
    about = (
        f"Each row is a {setup['n_layer']} x {setup['n_embd']} model ({facts['parameters']:,} parameters, bytes) after "
        f"{setup['steps'] * per_step:,} tokens of web text, {per_step:,} per step, in float32 on a CPU, with the recipe's "
        f"keys and one of them changed: the mean of {len(recipe.losses)} seeds, of which the recipe's own differ by "
        f"{noise:.3f}. Worth is the loss an ingredient saves; below that difference it is not known to be worth anything. "
        f"Those that say little were also run with Muon's rate, that of the matrices, {FAST} times as high, where the "
        f"recipe ends at {statistics.fmean(recipe.fast_losses):.3f} instead of {statistics.fmean(recipe.losses):.3f} and "
        f"its seeds differ by {fast_noise:.3f}."
    )
    taken, added = ([v for v in VARIANTS[1:] if v.takes_out == takes_out] for takes_out in (True, False))
    small = [variant.name for variant in taken if _worth(rows, variant) < noise]
    lines = [
        *INTRODUCTION,
        *AIMS,
        *aim_lines(comparisons),
        *tried_lines(),
        *_beside_nanogpt(comparisons),
        "## What each ingredient is worth",
        "",
    ]
    lines += [textwrap.fill(about, WIDTH), "", *_table("the recipe, but", taken, rows), ""]
    if small:
        nothing = f"Worth nothing that can be seen at the recipe's rate: {'; '.join(small)}. {KEPT}"
        lines += [textwrap.fill(nothing, WIDTH), ""]
    lines += ["Left out of the default, each one key away:", "", *_table("the recipe", added, rows), "", *CAVEATS]
    lines += [
        *OWN_VOCABULARY,
        *own_lines(),
        *SECOND_EDITION,
        *group_lines(),
        "",
        *COSTS,
        *MANY_EPOCHS,
        *epoch_lines(),
        "",
    ]
    return "\n".join(lines)


def _beside_nanogpt(comparisons: list[Comparison]) -> list[str]:
    if not comparisons:
        return []
    what = (
        "`python bench/recipe.py --nanogpt PATH --full`: nanoGPT's own train.py on a CPU at the best of "
        f"{len(comparisons[0].setup.rates)} learning rates, and `gptfit train --recipe modern` with the same data, "
        "tokenizer, layers and width (the first edition with nanoGPT's batch, the second with one of its own), "
        "planned for the part of the tokens that is given, in the number format gptfit chooses for this CPU. The head of its own "
        "makes it more parameters, but no more FLOPs per token. Tokens and seconds: what the recipe needed for "
        "nanoGPT's final validation loss, on a straight line between evaluations: a run of the second edition has one "
        "before its first step and one at its end, and its curve sags, so it needed fewer."
    )
    losses = (
        "nanoGPT's loss is its last checkpoint's, evaluated as gptfit evaluates its own, on the same windows, or, where it "
        "says so, as printed: the mean over windows nanoGPT draws anew each time. It is trained in float32, as nanoGPT "
        "ships for a CPU, or in bfloat16, as nanoGPT trains on a card. One run at 30M was made in both (lr 0.001, seed 1): "
        "it printed 4.0404 and 4.0430 at its end, over the same draw of windows."
    )
    seconds = (
        "Seconds are steps times the time of a step: nanoGPT as it ships for a CPU, in float32 without torch.compile, "
        "gptfit with it; no evaluations. A step against gpt2's: `gptfit train` with either recipe and nanoGPT's batch in "
        f"turns, step by step, medians of {TURNS}. With a first start: and the rest of both commands, "
        "imports, the compilation on a machine that has compiled nothing yet, and gptfit's checkpoints (nanoGPT's are in "
        "its steps). Losses that were had again beside other work stand beside the times of the run before."
    )
    older = [
        f"{c.setup.name} {c.matrix_rate:g}, now {c.rate_now:g}"
        for c in comparisons
        if c.edition == EDITION and c.matrix_rate != c.rate_now
    ]
    rates = f"Not run again since Muon's rate goes with the batch: {'; '.join(older)}." if older else ""
    paragraphs = [line for text in (what, losses, seconds, rates) if text for line in (textwrap.fill(text, WIDTH), "")]
    return ["## Beside stock nanoGPT", "", *paragraphs, *table(comparisons), ""]


def _worth(rows: dict[str, Row], variant: Variant, is_fast: bool = False) -> float:
    """The loss the variant's ingredient saves: what leaving it out costs, or what adding it brings."""
    recipe, changed = (
        statistics.fmean(row.fast_losses if is_fast else row.losses)
        for row in (rows[VARIANTS[0].name], rows[variant.name])
    )
    return changed - recipe if variant.takes_out else recipe - changed


def _table(heading: str, variants: list[Variant], rows: dict[str, Row]) -> list[str]:
    lines = [f"| {heading} | val loss | worth | at {FAST} times Muon's rate |", "|---|---:|---:|---:|"]
    for variant in variants:
        loss, worth = statistics.fmean(rows[variant.name].losses), _worth(rows, variant)
        fast = f"{_worth(rows, variant, is_fast=True):+.3f}" if variant.also_fast else ""
        lines.append(f"| {variant.name} | {loss:.3f} | {worth:+.3f} | {fast} |")
    return lines


INTRODUCTION = [
    "# The modern recipe",
    "",
    "Generated by `python bench/recipe.py`; do not edit. `gptfit train --recipe modern` sets the keys that",
    "`gptfit/config/recipe.py` computes for the size: `arch = 'modern'`, `optimizer = 'muon'`, `schedule = 'wsd'`, their rates,",
    "batch and horizon. The sources of the numbers stand beside them there.",
    "",
    "| key | default | what it is |",
    "|---|---|---|",
    "| `positions` | `rotary` | queries and keys turn with their place; half of the channel pairs do not turn |",
    "| `norm` | `rms` | RMSNorm without weights, also on the embedding |",
    "| `qk_norm` | `True` | queries and keys of unit size |",
    "| `activation` | `relu2` | squared ReLU in the MLP |",
    "| `zero_init` | `False` | attention and MLP outputs and the head start at zero |",
    "| `tied_head` | `False` | the head has its own weights and learning rate |",
    "| `smear` | `True` | a learned share, per channel, of the embedding of the token before |",
    "| `value_residual` | `False` | a learned share of the embedding in every layer's values |",
    "| `layer_scalars` | `False` | learned scales of the stream and of the embedding before every layer |",
    "| `logit_softcap` | `0` | bends logits smoothly into plus or minus this |",
    "| `value_embeddings` | `none` | in every second layer's values, gated: `tables` of the vocabulary, or `projections` |",
    "| `bigram` | `False` | a hashed table of token pairs, 5 rows per entry of the vocabulary, a quarter of the width |",
    "| `qk_scale` | `1` | of normalised queries and keys |",
    "| `mlp_init` | `1` | size of the MLP's first matrix at first |",
    "| `backout` | `False` | takes a learned share of the stream at half the depth off its end |",
    "| `smear_gate` | `False` | each token says how much of the one before it wants |",
    "",
    "And of Muon: `normuon`, `cautious_decay`, `momentum_start`, `momentum_end`, `embedding_beta2`, `lookahead`; of any",
    "optimizer: `average_tail`; of the data: `shuffle_documents`. The residual scale's rate is 0.005 and the embedding",
    "share's 0.5 with beta1 0.96 (nanochat).",
    "",
    "`wsd` keeps the rate constant and decays it to zero over the last part (`decay_fraction`) of the run. The checkpoint",
    "at the start of the decay is kept as `before-decay.pt`: `gptfit train --init_from=resume --out_dir=... --max_iters=N",
    "--lr_decay_iters=N` with a larger N goes on from there, as if the run had been meant to be that long; the shorter",
    "run's model stays as `finished-STEP.pt`.",
    "",
]
OWN_VOCABULARY = [
    "## With a vocabulary of its own",
    "",
    "`python bench/recipe.py --own --nanogpt PATH`, alone on the machine: in a BPE learned from the same files, the 30M model",
    "of nanoGPT, 6 x 384, with 8,192 entries, and a smaller one with 4,096, which in the same seconds sees more text; all on",
    "the same held-out documents. nanoGPT's loss is the one above; its time per step and ours are of one machine and one",
    "hour, nanoGPT in float32 as it ships for a CPU.",
    "",
]
AIMS = ["## What was to be reached", ""]
SECOND_EDITION = [
    "## The second edition, by group",
    "",
    "`python bench/recipe.py --groups`: 6 x 256 with a vocabulary of 4,096 learned from the web files (18.5M tokens),",
    "one core each; the first edition and all groups at once in bfloat16, the rest in float32 (one run in both formats, at",
    "30M above, ended 0.003 apart). All groups at once, then each group added to those kept before; kept where the mean gain of",
    "3 seeds is larger than the spread of the runs it is added to. Curves are kept in `bench/recipe_groups.jsonl`, and the",
    "bench goes on from them: a row that is not here has not been run at that length yet.",
]
COSTS = [
    "What they cost beside the blocks, per update of any number of tokens:",
    "",
    "| group | memory | per token | per update |",
    "|---|---|---|---|",
    "| value tables | 16 bytes x vocabulary x width x half the layers | a look-up, a gate per head | AdamW on the tables |",
    "| bigram table | 16 bytes x 5 vocabularies x a quarter of the width | a look-up | AdamW on the table |",
    "| second round | nothing | a multiplication per channel for smear and backout | a comparison per weight |",
    "| NorMuon | a number per row | nothing | two passes over the matrices |",
    "| scalars | nothing | two multiplications per channel and layer | nothing |",
    "| `lookahead` | 8 bytes per matrix weight | nothing | four passes over the matrices |",
    "| `average_tail` | 4 bytes per weight | nothing | one pass over all weights, in the tail |",
    "",
    "The recipe takes tables where they are at most 64M weights (1 GiB with their gradients and state), the bigram table",
    "below 150M parameters, and neither beyond 4 epochs, where value embeddings are projections of the embedding. Tables",
    "are parameters that cost no FLOPs: two models with the same blocks differ by all of them in their parameter counts.",
    "",
    "Built, each one key away, but not in the recipe because nothing measured here speaks for it yet: EMA-Nesterov",
    "(`lookahead = 0.6`, modded-nanogpt's pull request 308: -6 % steps, n = 20; gradients are taken along the average of",
    "3.2 % of the updates, at most 100, from 16 to 77 % of the run; in 192 updates it costs, see above), the",
    "average of the weights at the end of the run (`average_tail`; a rate that decays to zero makes most of it already), a",
    "batch that grows (`grow_batch_iters`).",
    "",
    "What follows from the length of a run: tokens per step (a power of two for about 3,250 updates; at least 4,096, on a CPU",
    "4 per channel or a quarter of the vocabulary, whichever is more, up to 2,048), Muon's momentum, and layer scalars only",
    "from 1,000 updates on. The head's rate falls with the square root of tokens per step over vocabulary, where below 1, to",
    "0.45 of itself.",
    "",
]
MANY_EPOCHS = [
    "## Many epochs",
    "",
    "When a run sees its data more than 3 times, the recipe says so and sets `weight_decay` to 0.05 per epoch (at most 1.6),",
    "`dropout` to 0.1, `average_tail` to the last epoch, and `shuffle_documents`, which reads the documents in another order",
    "every epoch (their index is kept beside the bins). Decay and dropout are those of qlabs' slowrun (100M tokens, 12",
    "epochs: weight decay 1.6, dropout 0.1), the decay scaled down for fewer epochs.",
    "`python bench/recipe.py --epochs 1M`: the recipe as for data seen once beside the preset, on web pages with a vocabulary of",
    "4,096; losses on documents that training never sees.",
    "",
]
KEPT = (
    "They stay where they are the lesser work, as norms without weights and squared ReLU are, or forgive a rate that is "
    "too high, as QK-norm does."
)
CAVEATS = [
    "A small model on few tokens: what helps here may not at 124M, and the other way round. All but the warm-up are in the",
    "published recipes for models 100 times larger (modded-nanogpt, nanochat). A gain of about the difference between",
    "seeds, as value residuals have, is not yet a reason for a default.",
    "",
]
