"""Search shapes, micro-batches and horizons for the lowest expected loss within hours, memory and data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from gptfit import recipe
from gptfit.config import TrainConfig
from gptfit.errors import DeviceError
from gptfit.gpus import GPU
from gptfit.measured import Measurements
from gptfit.plan import defaults, loss, memory, speed
from gptfit.plan.plan import eval_seconds, plan
from gptfit.plan.result import DataFacts, Plan
from gptfit.plan.setting import Setting, resolve_dtype
from gptfit.shape import ModelShape

WIDTHS = (128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 896, 1024, 1152, 1280, 1536, 1792, 2048)
# Width per layer: GPT-2's four sizes go from 64 (124M) to 33 (1.5B). Within that the loss hardly cares (Kaplan et al.
# 2020, figure 5), so speed decides.
ASPECTS = (64, 48, 32)
LEAST_LAYERS = 4
MICRO_BATCHES = (64, 32, 16, 8, 4, 2, 1)  # powers of two divide every usual number of tokens per step
MOST_EPOCHS = 10.0  # beyond, the law's repeats were measured on models that had begun to overfit
LEAST_UNIQUE_TOKENS_PER_PARAMETER = 1.0  # below, a model memorises its data; no published law reaches there
EVAL_TIME = 0.03  # of the run, left for evaluations
MOST_EVALS, LEAST_EVALS = 40, 5
EVAL_ITERS = 50
LEAST_ITERS = 100


@dataclass(frozen=True)
class Wish:
    """What the user has: a card, a time, data."""

    gpu: GPU
    hours: float
    data: DataFacts
    vocab_size: int
    processes: int = 1
    block_size: int = 1024
    recipe: str = "gpt2"  # gpt2 | modern
    only_nanogpt_keys: bool = False
    used_bytes: float | None = None
    dataset: str = ""  # what the config calls the data, where its name alone does not lead to it


@dataclass(frozen=True)
class Proposal:
    """One answer, and why it is in the list."""

    title: str
    plan: Plan


@dataclass(frozen=True)
class Proposals:
    choice: Proposal
    alternatives: tuple[Proposal, ...]
    searched: int


def propose(wish: Wish, measurements: Measurements | None = None) -> Proposals:
    """The best config for the wish, and alternatives worth a look."""
    finish = partial(_finish, measurements=measurements)
    candidates = _candidates(wish)
    if not candidates:
        raise DeviceError(
            f"no model fits {wish.gpu.name} ({wish.gpu.vram_gib:g} GiB) in {wish.hours:g} hours; "
            "give more hours, a smaller --block_size or another --gpu"
        )
    best = min(candidates, key=lambda candidate: candidate.loss)
    alternatives = []
    smaller = [c for c in candidates if c.parameters <= 0.55 * best.parameters]
    if smaller:
        alternatives.append(Proposal("smaller, faster", finish(wish, min(smaller, key=lambda c: c.loss))))
    longer_wish = replace(wish, hours=3 * wish.hours)
    longer = min(_candidates(longer_wish), key=lambda c: c.loss)
    if longer.parameters > best.parameters:
        alternatives.append(Proposal("larger, longer", finish(longer_wish, longer)))
    if not wish.only_nanogpt_keys and (best.setting.chunked_loss or best.setting.checkpoint_activations):
        plain_wish = replace(wish, only_nanogpt_keys=True)
        plain = _candidates(plain_wish)
        if plain:
            alternatives.append(Proposal("plain nanoGPT", finish(plain_wish, min(plain, key=lambda c: c.loss))))
    if wish.recipe == "gpt2" and not wish.only_nanogpt_keys:
        modern_wish = replace(wish, recipe="modern")
        modern = _candidates(modern_wish)
        if modern:
            alternatives.append(Proposal("modern recipe", finish(modern_wish, min(modern, key=lambda c: c.loss))))
    return Proposals(Proposal("choice", finish(wish, best)), tuple(alternatives), len(candidates))


@dataclass(frozen=True)
class _Candidate:
    setting: Setting
    parameters: int
    tokens: float
    loss: float


def _candidates(wish: Wish) -> list[_Candidate]:
    """One per shape: its fastest setting, trained for the whole time or until the data is used up."""
    found: list[_Candidate] = []
    for shape in shapes(wish):
        enough = wish.data.tokens.value >= LEAST_UNIQUE_TOKENS_PER_PARAMETER * shape.parameters
        if found and not enough:
            continue  # the smallest shape is always tried
        candidate = _best_setting(wish, shape)
        if candidate:
            found.append(candidate)
    return found


def shapes(wish: Wish) -> Iterator[ModelShape]:
    """Widths in steps of a head, a few depths each."""
    seen = set()
    for width in WIDTHS:
        for aspect in ASPECTS:
            layers = max(LEAST_LAYERS, round(width / aspect))
            if (width, layers) not in seen:
                seen.add((width, layers))
                yield ModelShape(
                    layers, recipe.head_count(width), width, wish.block_size, wish.vocab_size, arch=wish.recipe
                )


def _best_setting(wish: Wish, shape: ModelShape) -> _Candidate | None:
    setting = _fastest(wish, shape)
    if setting is None:
        return None
    tokens_per_s = _tokens_per_s(wish, setting)
    tokens = tokens_per_s * wish.hours * 3600 * (1 - EVAL_TIME)
    tokens = min(tokens, MOST_EPOCHS * wish.data.tokens.value)
    if tokens < LEAST_ITERS * setting.micro_tokens:
        return None
    # The step is sized for the run's length, which the speed of that step decides: once around is enough.
    step = (
        recipe.tokens_per_step(tokens)
        if wish.recipe == "modern"
        else defaults.tokens_per_step(shape.parameters, tokens)
    )
    setting = _with_step(setting, step)
    tokens = min(
        _tokens_per_s(wish, setting) * wish.hours * 3600 * (1 - EVAL_TIME), MOST_EPOCHS * wish.data.tokens.value
    )
    expected = loss.law_loss(
        shape.tied_parameters,
        tokens,
        min(tokens, wish.data.tokens.value),
        loss.token_value(shape.arch, setting.optimizer),
    )
    return _Candidate(setting, shape.parameters, tokens, expected)


def _fastest(wish: Wish, shape: ModelShape) -> Setting | None:
    """The fastest way that fits: whole logits if possible, then chunks, then checkpoints."""
    base = Setting(
        shape=shape,
        micro_batch=1,
        accumulation=8,
        processes=wish.processes,
        dtype=resolve_dtype("auto", wish.gpu),
        optimizer="muon" if wish.recipe == "modern" else "adamw",
    )
    ways = [base]
    if not wish.only_nanogpt_keys:
        chunked = replace(base, chunked_loss=True)
        ways += [chunked, replace(chunked, checkpoint_activations=True)]
    fitting = [found for way in ways if (found := _largest(wish, way))]
    return max(fitting, key=lambda setting: _tokens_per_s(wish, setting), default=None)


def _largest(wish: Wish, setting: Setting) -> Setting | None:
    """The micro-batch from the list that is fastest among those that fit: speed only rises with it, so the largest."""
    for micro_batch in MICRO_BATCHES:
        changed = replace(setting, micro_batch=micro_batch)
        # A proposal should fit even where the estimate is at its upper end.
        if memory.predict(changed).device.high <= memory.usable_bytes(wish.gpu, wish.used_bytes):
            return changed
    return None


def _tokens_per_s(wish: Wish, setting: Setting) -> float:
    predicted = speed.predict(setting, wish.gpu)
    if predicted is None:
        raise DeviceError(
            f"{wish.gpu.name}: no arithmetic rate is known, so hours mean nothing; measure with `gptfit tune CONFIG.py`"
        )
    return predicted.tokens_per_s.value


def _with_step(setting: Setting, tokens_per_step: int) -> Setting:
    accumulation = max(1, round(tokens_per_step / (setting.micro_tokens * setting.processes)))
    return replace(setting, accumulation=accumulation)


def _finish(wish: Wish, candidate: _Candidate, measurements: Measurements | None) -> Plan:
    config = to_config(wish, candidate.setting, candidate.tokens)
    shape = candidate.setting.shape
    return plan(
        config,
        config.shape(shape.vocab_size),
        wish.gpu,
        data=wish.data,
        processes=wish.processes,
        measurements=measurements,
        used_bytes=wish.used_bytes,
    )


def to_config(wish: Wish, setting: Setting, tokens: float) -> TrainConfig:
    """nanoGPT's keys for this setting and horizon; ours only where they differ from nanoGPT's behaviour."""
    shape = setting.shape
    max_iters = max(1, int(tokens // setting.tokens_per_step))
    rate = defaults.learning_rate(shape.parameters)
    epochs = tokens / wish.data.tokens.value
    name = f"{wish.data.name}-{shape.n_layer}x{shape.n_embd}"
    values: dict[str, object] = {
        "n_layer": shape.n_layer,
        "n_head": shape.n_head,
        "n_embd": shape.n_embd,
        "block_size": shape.block_size,
        "dropout": defaults.dropout(epochs),
        "batch_size": setting.micro_batch,
        "gradient_accumulation_steps": setting.accumulation * setting.processes,
        "max_iters": max_iters,
        "lr_decay_iters": max_iters,
        "warmup_iters": defaults.warmup_iters(max_iters),
        "learning_rate": rate,
        "min_lr": defaults.final_rate(rate),
        "weight_decay": defaults.WEIGHT_DECAY,
        "dataset": wish.dataset or wish.data.name,
        "out_dir": f"out-{name}",
        "wandb_run_name": name,
        "eval_interval": max(1, max_iters // _evals(wish, setting, tokens)),
        "eval_iters": EVAL_ITERS,
    }
    if setting.chunked_loss:
        values["chunked_loss"] = True
    if setting.checkpoint_activations:
        values["checkpoint_activations"] = True
    if wish.recipe == "modern":
        values |= recipe.training_keys(max_iters)
    return TrainConfig(**values)  # type: ignore[arg-type]


def _evals(wish: Wish, setting: Setting, tokens: float) -> int:
    """As many evaluations as their share of the time allows, within reason."""
    predicted = speed.predict(setting, wish.gpu)
    assert predicted is not None
    one = eval_seconds(TrainConfig(eval_iters=EVAL_ITERS), predicted.ms_per_micro_step.value)
    allowed = EVAL_TIME * tokens / predicted.tokens_per_s.value / one
    return max(LEAST_EVALS, min(MOST_EVALS, int(allowed)))
