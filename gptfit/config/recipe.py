"""The modern recipe's numbers for a size: which keys it sets, each a pure function with its source."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gptfit.config.keys import DEFAULTS, PORTABLE, TrainConfig
from gptfit.shape import ModelShape

RECIPES = ("gpt2", "modern")
MODERN_LIMITS = "gptfit and Hugging Face run it; for llama.cpp (GGUF) train with --portable=True; nanoGPT cannot run it"
PORTABLE_LIMITS = "gptfit, Hugging Face and llama.cpp (GGUF) run it; nanoGPT cannot"

# Muon's rate for matrices and AdamW's for the rest, from modded-nanogpt's short script (track 3, 12 x 768), checked
# at 3 x 128, where 0.02 was best for the head. Muon's scaling carries the first over width and depth; embeddings are
# normalised before the first block, so theirs needs none; the head's falls with the width (Yang et al. 2022, muP).
MATRIX_RATE = 0.02
# The same for MOST_TOKENS_PER_STEP; fewer tokens give a noisier direction, of the same size, and want a smaller rate: with
# 1,024 per step 0.02 ends at 4.207, 0.014 at 4.182, 0.010 at 4.183, 0.007 at 4.199 (6 x 256, one
# seed, docs/recipe.md). Between the two nothing was run.
SMALL_STEP, SMALL_STEP_RATE = 1_024, 0.012
EMBEDDING_RATE = 0.3
HEAD_RATE = 0.004
# Of it, however few tokens a step has for each entry. GPT-2's vocabulary and 2,048 tokens per step at 6 x 384: with 0.2 the
# training loss is 0.11 higher after 25 updates, with 0.62 it is 0.04 higher (one seed, docs/recipe.md).
HEAD_LEAST = 0.45
SCALAR_RATE = 0.03
TABLE_SHARE = 0.5  # of the embedding's rate for tables of values and of pairs (nanochat)
REFERENCE_WIDTH = 768

HEAD_SIZE = 64  # 128 from this width on: fewer, longer heads are faster on tensor cores (nanochat)
WIDE = 1536
# Enough for the loss of GPT-2 124M (3.28 on FineWeb) in track 3: 1.70e9 tokens, 13.7 for each of 123.6M parameters.
TOKENS_PER_PARAMETER = 13.7
STEPS = 3_250  # of that run
MOST_TOKENS_PER_STEP = 524_288  # of that run
# Where Muon's 12 C^3 FLOPs per C x C matrix are a third of the model's 6 C^2 per token at C = 700; a card needs that many
# tokens to be busy. A CPU is busy with fewer, and runs of seconds end 0.03 nats lower with half of them (bench/propose.py).
LEAST_TOKENS_PER_STEP, LEAST_ON_A_CPU = 4_096, 2_048
# In a run of a few hundred updates their number decides: 3 x 128 with 1,024 tokens per step ends 0.11 nats below 2,048 after
# as many tokens, with 512 another 0.06 below (docs/recipe.md, one seed). Muon's rounds cost as much as the blocks' own
# products with 2 tokens per channel, half of that with these. A row of the head learns from its entry's tokens: with 4,096
# entries 1,024 tokens per step end 0.05 nats below 512. From a few hundred on they decide no more, and each has its own
# cost: in the same time 415 updates of 2,048 tokens end lower than 744 of 1,024, 970 lower than 1,459 and 990 lower than
# 2,174, 375 of 2,048 lower than 219 of 4,096, 1,279 of 512 lower than 1,980 of 256 (bench/propose_runs.jsonl). Here are
# counted those that the slow end of a plan's range has time for.
TOKENS_PER_CHANNEL, TOKENS_PER_ENTRY, ENOUGH_UPDATES = 4, 1 / 4, 200
WARMUP_FRACTION = 0.0  # Muon's updates have one size from the first on; docs/recipe.md has what a warm-up is worth
# Track 3 decays over 0.7 of the run and has no floor. A run of a few hundred updates has far to go before it is worth
# decaying: 288 of them end 0.004 nats lower with 0.4, and 0.016 with 0.4 and layer scalars (6 x 256, docs/recipe.md).
DECAY_FRACTION, SHORT_DECAY_FRACTION, SHORT_RUN = 0.6, 0.4, 500
WEIGHT_DECAY = 0.05  # track 3, on the matrices only
BETAS = (0.8, 0.95)  # track 3, for AdamW's part

# Many epochs: qlabs' slowrun trains 100M tokens for 12 epochs with weight decay 1.6 and dropout 0.1; the decay here grows
# with the epochs from the usual value to that.
MANY_EPOCHS = 3.0
MOST_WEIGHT_DECAY = 1.6
DROPOUT = 0.1


@dataclass(frozen=True, order=True)
class OwnRate:
    """A tensor's rate and first beta where it has its own; 0 is its kind's."""

    rate: float = 0.0
    beta1: float = 0.0


# nanochat: a scale of the whole stream must move little, a share of the embedding may move far but smoothly.
SCALARS = {"residual_scales": OwnRate(0.005), "embedding_scales": OwnRate(0.5, 0.96)}


def scalar_rates(tokens_per_step: int) -> dict[str, OwnRate]:
    """nanochat's rates are for its batch. A smaller one has noisier gradients, and AdamW's steps are as large for noise:
    its rate goes with the batch's square root (Malladi et al. 2022). At 1,024 tokens per step the whole rates cost
    0.06 nats at 3 x 128 (docs/recipe.md)."""
    share = min(1.0, math.sqrt(tokens_per_step / MOST_TOKENS_PER_STEP))
    return {name: replace(own, rate=own.rate * share) for name, own in SCALARS.items()}


def adamw_rate(kind: str, shape: ModelShape, tokens_per_step: int = MOST_TOKENS_PER_STEP) -> float:
    """The rate of a tensor that is no matrix of a block, when Muon trains those.

    The head's is for a batch that has every entry of the vocabulary; with fewer tokens per entry its gradient is noise for
    most rows, and the rate goes with the square root of their number, as the scalars', but not below HEAD_LEAST: frequent
    entries are in every batch, however many rare ones there are.
    """
    if kind in ("gate", "vector", "scalar"):
        return SCALAR_RATE
    if kind == "table":
        return TABLE_SHARE * EMBEDDING_RATE
    # A tied embedding is small as the head must be, and so is what is added to it.
    if kind == "head" or shape.is_tied:
        share = min(1.0, max(HEAD_LEAST, math.sqrt(tokens_per_step / shape.vocab_size)))
        return share * HEAD_RATE * REFERENCE_WIDTH / shape.n_embd
    return EMBEDDING_RATE


def matrix_rate(tokens_per_step: int) -> float:
    """Muon's, for this batch: along the power law through the two that were measured.

    >>> matrix_rate(1_024), matrix_rate(32_768), matrix_rate(524_288), matrix_rate(1_048_576)
    (0.012, 0.0159, 0.02, 0.02)
    """
    power = math.log(MATRIX_RATE / SMALL_STEP_RATE) / math.log(MOST_TOKENS_PER_STEP / SMALL_STEP)
    share: float = min(1.0, (tokens_per_step / MOST_TOKENS_PER_STEP) ** power)
    return round(MATRIX_RATE * share, 4)


def optimal_tokens(shape: ModelShape) -> float:
    """A horizon worth its time, in tokens. Parameters count as if the head were tied."""
    return TOKENS_PER_PARAMETER * shape.tied_parameters


def tokens_per_step(tokens: float, least: int = LEAST_TOKENS_PER_STEP) -> int:
    """A power of two that gives the run about as many updates as the tuned one had."""
    wanted: int = 2 ** round(math.log2(max(1.0, tokens / STEPS)))
    return max(least, min(MOST_TOKENS_PER_STEP, wanted))


def least_tokens_per_step(n_embd: int, vocab_size: int, tokens: float, is_cpu: bool) -> int:
    """Fewer are not worth an update's own cost, or say too little of a vocabulary; a power of two."""
    if not is_cpu:
        return LEAST_TOKENS_PER_STEP
    wanted = max(TOKENS_PER_CHANNEL * n_embd, TOKENS_PER_ENTRY * vocab_size, tokens / ENOUGH_UPDATES)
    least: int = 2 ** int(math.log2(wanted))
    return min(LEAST_ON_A_CPU, least)


def head_count(n_embd: int) -> int:
    """Heads of 64 channels, of 128 in wide models; one head where neither divides."""
    sizes = (128, HEAD_SIZE) if n_embd >= WIDE else (HEAD_SIZE, 32)
    return next((n_embd // size for size in sizes if n_embd % size == 0), 1)


def training_keys(max_iters: int, tokens_per_step: int) -> dict[str, Any]:
    """How the recipe trains a model of any size for `max_iters` updates of so many tokens."""
    return {
        "arch": "modern",
        "optimizer": "muon",
        "schedule": "wsd",
        "learning_rate": matrix_rate(tokens_per_step),
        "min_lr": 0.0,
        "warmup_iters": round(WARMUP_FRACTION * max_iters),
        "lr_decay_iters": max_iters,
        "decay_fraction": SHORT_DECAY_FRACTION if max_iters < SHORT_RUN else DECAY_FRACTION,
        "weight_decay": WEIGHT_DECAY,
        "beta1": BETAS[0],
        "beta2": BETAS[1],
        "bias": False,
    }


# The second edition: nanochat's second round, its scalars, and NorMuon. docs/recipe.md has what they were worth.
SECOND_EDITION: Mapping[str, Any] = {
    "layer_scalars": True,
    "backout": True,
    "smear_gate": True,
    "qk_scale": 1.2,
    "mlp_init": 0.4,
    "normuon": True,
    "cautious_decay": True,
    "momentum_start": 0.85,
    "momentum": 0.97,
    "momentum_end": 0.9,
    "embedding_beta2": 0.995,
}
MOST_TABLE_WEIGHTS = 64e6  # with gradient and state 1 GiB; GPT-2's vocabulary at 12 x 768 would take 232M
BIGRAM_BELOW = 150e6  # parameters; above, the blocks have learned their pairs by themselves (modded-nanogpt)
TABLES_UNTIL = 4.0  # epochs; a row that is seen so often is learned by heart, a projection of the embedding is not


LONG_MEMORY, SHORT_MEMORY, MEMORY_FRACTION = 100 / 3, 10.0, 1 / 30  # updates that Muon's momentum remembers
MOMENTUM_FALL = 0.07  # from its height to its end
NANOCHATS_STEPS = 2_000  # and more, what the second edition was published for
# Updates from which on layer scalars gain in any model (nanochat's thousands). In 288 they gain with six layers and 4,096
# entries (6 x 256) and cost 0.02 to 0.04 nats with bytes (3 x 128 and 6 x 256): what they give deep layers again is the
# token itself, and a byte says little. Words in fewer layers were not run.
SCALARS_FROM, SCALARS_FROM_LAYERS, SCALARS_FROM_ENTRIES = 1_000, 6, 4_096


def length_keys(max_iters: int, shape: ModelShape) -> dict[str, Any]:
    """nanochat's 0.97 remembers 33 updates of thousands; a run of a hundred would still be moving by its first ones."""
    memory = max(SHORT_MEMORY, min(LONG_MEMORY, MEMORY_FRACTION * max_iters))
    height = round(1 - 1 / memory, 3)
    momentum = {"momentum": height, "momentum_end": round(height - MOMENTUM_FALL, 3)}
    gains_early = shape.n_layer >= SCALARS_FROM_LAYERS and shape.vocab_size >= SCALARS_FROM_ENTRIES
    return {**momentum, "layer_scalars": max_iters >= SCALARS_FROM or gains_early}


def limits(shape: ModelShape) -> str:
    """Which programs run a modern model."""
    return MODERN_LIMITS if strange_keys(shape) else PORTABLE_LIMITS


def strange_keys(shape: ModelShape) -> dict[str, Any]:
    """What llama.cpp cannot compute of a modern model."""
    values = {key: getattr(shape, key) for key in PORTABLE}
    return {key: value for key, value in values.items() if value != PORTABLE[key]}


def second_edition(
    shape: ModelShape, epochs: float = 0.0, portable: bool = False, max_iters: int = NANOCHATS_STEPS
) -> dict[str, Any]:
    """The second edition's keys for this model, data and length; tables only where they are small beside a card's memory."""
    tables = replace(shape, arch="modern", value_embeddings="tables").value_tables
    values = "projections" if epochs > TABLES_UNTIL else "tables" if tables <= MOST_TABLE_WEIGHTS else "none"
    is_bigram = epochs <= TABLES_UNTIL and shape.tied_parameters < BIGRAM_BELOW
    keys = {**SECOND_EDITION, **length_keys(max_iters, shape), "value_embeddings": values, "bigram": is_bigram}
    return (
        keys | {key: value for key, value in PORTABLE.items() if key in keys or value != DEFAULTS[key]}
        if portable
        else keys
    )


def edition_shape(shape: ModelShape, epochs: float = 0.0) -> ModelShape:
    """The model the second edition makes of this one."""
    keys = second_edition(shape, epochs)
    return replace(shape, **{key: value for key, value in keys.items() if hasattr(shape, key)})


def many_epochs_keys(epochs: float, has_documents: bool) -> dict[str, Any]:
    """What keeps a model from learning its data by heart when it reads it often."""
    if epochs <= MANY_EPOCHS:
        return {}
    decay = round(min(MOST_WEIGHT_DECAY, WEIGHT_DECAY * epochs), 3)
    # Over the last epoch: what it learned of its last documents by heart must not weigh more than its first.
    tail = round(1 / epochs, 3)
    return {"weight_decay": decay, "dropout": DROPOUT, "average_tail": tail, "shuffle_documents": has_documents}


@dataclass(frozen=True)
class DataSize:
    """What the recipe needs to know of the data."""

    vocab_size: int | None = None
    train_tokens: int | None = None
    has_documents: bool = False  # whether their ends are marked


UNKNOWN = DataSize()


def modern_keys(
    config: TrainConfig, in_files: Collection[str], on_command_line: Collection[str], data: DataSize = UNKNOWN
) -> dict[str, Any]:
    """What the recipe changes in a config.

    A file's model, batch and horizon stay; its rates were tuned for another recipe and do not. The command line wins.
    """
    given = {*in_files, *on_command_line}
    keys = {} if "n_head" in given else {"n_head": head_count(config.n_embd)}
    sized = config.unchecked(**{**config.as_dict(), **keys, "arch": "modern"})
    keys |= {key: value for key, value in _size_keys(sized, given, data.vocab_size).items() if key not in given}
    max_iters = int(keys.get("max_iters", config.max_iters))
    planned = sized.unchecked(**{**sized.as_dict(), **keys})
    times = epochs(planned, data)
    edition = second_edition(sized.shape(data.vocab_size), times, config.portable, max_iters)
    keys |= {key: value for key, value in edition.items() if key not in given}
    training = training_keys(max_iters, planned.tokens_per_iter()) | many_epochs_keys(times, data.has_documents)
    return keys | {key: value for key, value in training.items() if key not in on_command_line}


def epochs(planned: TrainConfig, data: DataSize) -> float:
    """How often the run sees its data; 0 where that is not known."""
    tokens = planned.windows_until(planned.max_iters) * planned.block_size
    return tokens / data.train_tokens if data.train_tokens else 0.0


def _size_keys(config: TrainConfig, given: Collection[str], vocab_size: int | None) -> dict[str, Any]:
    """Batch and horizon, where the config leaves them to nanoGPT's defaults, which are a 4-day run on eight A100s."""
    tokens = optimal_tokens(config.shape(vocab_size))
    step_is_given = {"tokens_per_step", "gradient_accumulation_steps"} & set(given)
    if step_is_given:
        return {"max_iters": math.ceil(tokens / config.tokens_per_iter())}
    micro = config.batch_size * config.block_size
    step = max(micro, tokens_per_step(tokens) // micro * micro)
    return {"tokens_per_step": step, "max_iters": math.ceil(tokens / step)}
