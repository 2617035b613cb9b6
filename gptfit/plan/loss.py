"""Expected validation loss: a scaling law with repeated data, one offset per data set, shown as a range."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from gptfit.estimate import Basis, Estimate
from gptfit.measured import MeasuredLoss
from gptfit.shape import ModelShape

# Muennighoff et al. (2023), "Scaling Data-Constrained Language Models", appendix A; N with tied embeddings, GPT-2 BPE.
E = 1.8691
A = 520.82
B = 1487.72
ALPHA = 0.3527  # the paper sets alpha = beta
R_D_STAR = 15.388  # repeats after which more epochs are worth almost nothing
R_N_STAR = 5.310  # the same for parameters beyond what the unique data can use
# Parameters per unique token at the optimum: (A / B) ** (1 / alpha), about 1 / 19.6.
OPTIMAL_RATIO: float = (A / B) ** (1 / ALPHA)

# Mean difference between the law and published runs of the plain GPT-2 recipe on that data (tests/losses.csv).
OFFSETS = {"fineweb-edu": 0.0, "openwebtext": 0.08, "fineweb": 0.20, "c4": 0.16, "refinedweb": 0.43}
UNKNOWN_OFFSET = 0.12  # web text of unknown kind: the middle of the above without RefinedWeb

# How many plain tokens one token of a better recipe is worth; from the modded-nanogpt and track-3 rows (formulas.md).
MODERN_ARCH_TOKENS = 2.1
MUON_TOKENS = 1.45
# nanochat's recipe, with tables of values on alternate layers: what is looked up counts less than what is multiplied with,
# its tokens are worth more, its floor is higher, and a model of many parameters for its tokens is not yet learned. From
# nanochat's d12 and d20 and its iso-FLOP optima (tests/losses_nanochat.csv, tests/losses.csv, formulas.md).
TABLE_SHARE = 0.24
TABLE_TOKENS = 4.0
TABLE_FLOOR = 0.093
FEW_TOKENS, FEW_FROM = 0.43, 1.3  # nats, and the parameters per token from which they are felt
TABLE_RATIO = 0.9  # tables over parameters from which a model is of that recipe: d12 has 1.9, d32 0.96
TABLES_FROM = 100e6  # parameters; nothing is published of tables that outweigh a smaller model
TABLE_WIDTH, OTHER_TEXT_WIDTH = 0.06, 0.16  # the largest error of the 12 points on FineWeb is 0.02; 0.15 on FineWeb-Edu
# The largest model and the most parameters per token in the fit, and the width for each e-fold beyond them.
FITTED_PARAMETERS, WIDTH_PER_EFOLD = 460e6, 0.04
FITTED_PER_TOKEN, WIDTH_PER_EFOLD_FEWER = 2.3, 0.25

GPT2_VOCABULARY = 50_304  # with nanoGPT's padding
GPT2_BYTES_PER_TOKEN = 4.65  # FineWeb-Edu, GPT-2 BPE; other tokenizers are converted through bytes

# Below these the law is not an answer: nobody has published a point there that it met.
LEAST_PARAMETERS = 3e6
LEAST_TOKENS = 20e6


@dataclass(frozen=True)
class Loss:
    """What to expect at the end of a run."""

    loss: Estimate  # nats per token of the data's own tokenizer
    effective_tokens: float  # tokens the repeats are worth, in fresh ones
    sentence: str  # on what it rests
    bits_per_byte: Estimate | None = None  # the same, comparable across tokenizers


def predict(
    parameters: int,
    tokens: float,
    unique_tokens: float | None = None,
    dataset: str = "",
    arch: str = "gpt2",
    optimizer: str = "adamw",
    bytes_per_token: float | None = None,
    own_runs: Iterable[MeasuredLoss] = (),
    value_tables: int = 0,
) -> Loss | None:
    """Validation loss after `tokens` over `unique_tokens` of `dataset`; None where the law says nothing.

    `bytes_per_token` is for data in another tokenizer than GPT-2's: tokens and loss are converted through bytes.
    `value_tables` are the weights that are looked up beside those the law counts.
    """
    scale = bytes_per_token / GPT2_BYTES_PER_TOKEN if bytes_per_token else 1.0
    unique = min(tokens, unique_tokens or tokens)
    if parameters < LEAST_PARAMETERS or unique * scale < LEAST_TOKENS:
        return None
    law = recipe_loss(parameters, tokens * scale, unique * scale, arch, optimizer, value_tables)
    offset, basis, sentence = _offset(dataset, own_runs, scale)
    new_recipe = arch == "modern" or optimizer == "muon"
    kind = dataset_kind(dataset)
    if kind and tables_part(parameters, value_tables) == 1.0 and tokens * scale >= 0.2e9:
        below = above = tables_width(parameters, tokens * scale, kind)
    else:
        below, above = half_widths(parameters, tokens * scale, kind is not None, new_recipe)
    if basis == "measured":
        below, above = min(below, 0.08), min(above, 0.08)
    value = law + offset
    estimate = Estimate(value * scale, (value - below) * scale, (value + above) * scale, basis)
    return Loss(estimate, effective_tokens(tokens, unique), sentence)


def law_parameters(shape: ModelShape) -> int:
    """The law's N: as if the head were tied and had GPT-2's vocabulary, whichever smaller one it has.

    A smaller vocabulary makes a model cheaper, not worse per byte: at 6 x 384 one of 8k entries reaches the same bits per
    byte with 1.8 times fewer FLOPs per character, at 12 x 768 one of 16k with 1.13 times fewer (published fits), which is
    what the head's share of the FLOPs and the longer text come to.
    """
    missing = max(0, GPT2_VOCABULARY - shape.vocab_size)
    return shape.tied_parameters + missing * shape.n_embd


def law_loss(parameters: float, tokens: float, unique_tokens: float, value_per_token: float = 1.0) -> float:
    """The law alone, in nats per GPT-2 token, before any offset.

    >>> round(law_loss(124.4e6, 10.255e9, 10.255e9), 3)
    3.034
    """
    unique = min(tokens, unique_tokens)  # what a short run never reaches is worth nothing to it
    n = effective_parameters(parameters, unique * value_per_token)
    d = effective_tokens(tokens, unique) * value_per_token
    return float(E + A / n**ALPHA + B / d**ALPHA)


def effective_tokens(tokens: float, unique_tokens: float) -> float:
    """D' = U + U * R* * (1 - exp(-R / R*)) with R repeats: four epochs are worth 3.7 fresh ones, forty 15."""
    repeats = max(0.0, tokens / unique_tokens - 1)
    return unique_tokens * (1 + R_D_STAR * (1 - math.exp(-repeats / R_D_STAR))) if repeats else tokens


def effective_parameters(parameters: float, unique_tokens: float) -> float:
    """Parameters beyond what the unique data can use lose their worth in the same way."""
    usable = min(parameters, unique_tokens * OPTIMAL_RATIO)
    excess = parameters / usable - 1
    return usable * (1 + R_N_STAR * (1 - math.exp(-excess / R_N_STAR)))


def token_value(arch: str, optimizer: str) -> float:
    """How many tokens of the plain recipe one token of this one is worth."""
    return (MODERN_ARCH_TOKENS if arch == "modern" else 1.0) * (MUON_TOKENS if optimizer == "muon" else 1.0)


def recipe_loss(
    parameters: float, tokens: float, unique_tokens: float, arch: str, optimizer: str, value_tables: float = 0
) -> float:
    """The law for this recipe, before the data's offset; between two recipes where tables are few."""
    value = token_value(arch, optimizer)
    plain = law_loss(parameters, tokens, unique_tokens, value)
    part = tables_part(parameters, value_tables)
    if not part:
        return plain
    counted = parameters + TABLE_SHARE * value_tables
    few = FEW_TOKENS * math.log1p(parameters / FEW_FROM / effective_tokens(tokens, min(tokens, unique_tokens)))
    tables = law_loss(counted, tokens, unique_tokens, value * TABLE_TOKENS) + TABLE_FLOOR + few
    return plain + part * (tables - plain)


def tables_part(parameters: float, value_tables: float) -> float:
    """How far a model is of the recipe with value tables, from 0 to 1."""
    return min(1.0, value_tables / (TABLE_RATIO * parameters)) if parameters >= TABLES_FROM else 0.0


def tables_width(parameters: float, tokens: float, kind: str) -> float:
    """Half of the range for the recipe with value tables; wider for models and horizons beyond those published."""
    larger = math.log(max(1.0, parameters / FITTED_PARAMETERS))
    fewer = math.log(max(1.0, parameters / tokens / FITTED_PER_TOKEN))
    width = TABLE_WIDTH if kind == "fineweb" else OTHER_TEXT_WIDTH
    return width + WIDTH_PER_EFOLD * larger + WIDTH_PER_EFOLD_FEWER * fewer


def half_widths(parameters: float, tokens: float, known: bool = True, new_recipe: bool = False) -> tuple[float, float]:
    """How far below and above nine of ten published points lie; wider where the law is weak."""
    width = 0.13
    if parameters < 100e6:
        width += 0.05
    if tokens < 1e9:
        width += 0.07
    if tokens < 0.3e9:
        width += 0.15
    if tokens < 5 * parameters:
        width += 0.10
    if new_recipe:
        width += 0.05  # fewer published points, and the recipe is still moving
    if parameters >= 100e6 and tokens >= 1e9:
        width = min(width, 0.15)  # no published point of a known recipe is farther off there
    if not known:
        width += 0.12
    # The law is too pessimistic for tiny models, most of all on few tokens: Gadre et al., 11M.
    tiny = 0.45 if tokens < 0.3e9 else 0.30
    return (width + tiny if parameters < 30e6 else width), width


def dataset_kind(dataset: str) -> str | None:
    """'data/edu_fineweb10B' -> 'fineweb-edu'; None when the name says nothing."""
    name = re.sub(r"[^a-z0-9]", "", dataset.lower())
    if "fineweb" in name:
        return "fineweb-edu" if "edu" in name else "fineweb"
    if "openwebtext" in name or name == "owt":
        return "openwebtext"
    if "refinedweb" in name:
        return "refinedweb"
    return "c4" if name == "c4" else None


def perplexity(loss: Estimate) -> Estimate:
    return Estimate(math.exp(loss.value), math.exp(loss.low), math.exp(loss.high), loss.basis)


def own_offset(dataset: str, own_runs: Iterable[MeasuredLoss]) -> float | None:
    """Mean difference between the user's finished runs on this data set and the law."""
    differences = [
        run.val_loss
        - law_loss(run.parameters, run.tokens, run.unique_tokens or run.tokens, token_value(run.arch, run.optimizer))
        for run in own_runs
        if run.dataset == dataset and run.parameters >= LEAST_PARAMETERS and run.tokens >= LEAST_TOKENS
    ]
    return sum(differences) / len(differences) if differences else None


def _offset(dataset: str, own_runs: Iterable[MeasuredLoss], scale: float) -> tuple[float, Basis, str]:
    own = own_offset(dataset, own_runs) if scale == 1.0 else None
    if own is not None:
        return own, "measured", f"the law's offset ({own:+.2f}) learnt from your finished runs on {dataset}"
    kind = dataset_kind(dataset)
    if kind is not None:
        return OFFSETS[kind], "fit", f"published runs on {kind}"
    return UNKNOWN_OFFSET, "fit", f"web text in general: nothing is published for {dataset or 'this data'}"
