"""What makes a config unable to start: each problem with its key, what is wrong and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gptfit.schedule import SCHEDULE_NAMES
from gptfit.shape import INGREDIENTS, ModelShape

Values = Mapping[str, Any]

CHOICES: dict[str, tuple[object, ...]] = {
    "arch": ("gpt2", "modern"),
    "optimizer": ("adamw", "muon", "adamw8bit"),
    "schedule": SCHEDULE_NAMES,
    "sampling": ("epoch", "random"),
    "track": ("none", "wandb", "tensorboard", "trackio"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "chunked_loss": ("auto", True, False),
    "positions": ("rotary", "learned"),
    "norm": ("rms", "layer"),
    "activation": ("relu2", "gelu"),
}
AT_LEAST_ONE = [
    "n_layer",
    "n_head",
    "n_embd",
    "block_size",
    "batch_size",
    "gradient_accumulation_steps",
    "eval_interval",
    "log_interval",
    "eval_iters",
    "keep_checkpoints",
]
NOT_NEGATIVE = [
    "max_iters",
    "warmup_iters",
    "lr_decay_iters",
    "learning_rate",
    "min_lr",
    "weight_decay",
    "grad_clip",
    "tokens_per_step",
    "vocab_size",
    "seed",
    "max_hours",
    "early_stop_evals",
    "logit_softcap",
    "embedding_lr",
    "head_lr",
]
FRACTIONS = ("dropout", "beta1", "beta2", "momentum")
# The largest each size may be before arithmetic on it stops making sense; far above any real model.
SANE_SIZE = 10**9


@dataclass(frozen=True)
class ConfigProblem:
    """One reason a run cannot start."""

    key: str
    message: str
    fix: str

    @property
    def line(self) -> str:
        return f"{self.message}; {self.fix}"


def find_problems(values: Values, processes: int = 1) -> list[ConfigProblem]:
    """All of them, in the order a person would meet them. Later checks need sane sizes, so they wait for those."""
    problems = [*_choices(values), *_ranges(values)]
    if not problems:
        problems = [*_heads(values), *_horizon(values), *_rates(values), *_step_size(values, processes)]
        problems += [*_modern(values), *_device_name(values)]
    return problems


def _choices(values: Values) -> Iterator[ConfigProblem]:
    for key, allowed in CHOICES.items():
        # `is`-like comparison: 1 == True must not pass for a boolean choice.
        if not any(values[key] == choice and type(values[key]) is type(choice) for choice in allowed):
            names = ", ".join(str(choice) for choice in allowed)
            yield ConfigProblem(key, f"{key} = {values[key]!r} is not known", f"use one of {names}")


def _ranges(values: Values) -> Iterator[ConfigProblem]:
    yield from _outside(
        values, AT_LEAST_ONE, lambda v: 1 <= v <= SANE_SIZE, f"use a whole number from 1 to {SANE_SIZE:,}"
    )
    yield from _outside(values, NOT_NEGATIVE, lambda v: 0 <= v < 2**63, "use 0 or more, below 2^63")
    yield from _outside(values, FRACTIONS, lambda v: 0 <= v < 1, "use a number from 0 up to but not including 1")
    yield from _outside(values, ("decay_fraction",), lambda v: 0 < v <= 1, "use a number above 0, up to 1")


def _outside(
    values: Values, keys: tuple[str, ...] | list[str], inside: Callable[[Any], bool], fix: str
) -> Iterator[ConfigProblem]:
    for key in keys:
        if not inside(values[key]):
            yield ConfigProblem(key, f"{key} = {values[key]!r} is out of range", fix)


def _heads(values: Values) -> Iterator[ConfigProblem]:
    n_embd, n_head = values["n_embd"], values["n_head"]
    if n_embd % n_head:
        heads = nearest_head_count(n_embd, n_head)
        yield ConfigProblem(
            "n_embd",
            f"n_embd {n_embd} is not divisible by n_head {n_head}",
            f"use n_head = {heads} (head size {n_embd // heads})",
        )


def nearest_head_count(n_embd: int, n_head: int) -> int:
    """A head count that divides n_embd: head size 64 if possible, then a multiple of 8, then the nearest."""
    divisors = [d for d in range(1, min(n_embd, 4096) + 1) if n_embd % d == 0]
    return min(divisors, key=lambda d: (n_embd // d != 64, (n_embd // d) % 8 != 0, abs(d - n_head)))


def _modern(values: Values) -> Iterator[ConfigProblem]:
    """A switch that would do nothing is a mistake, not a wish."""
    if values["arch"] == "modern":
        if values["bias"]:
            yield ConfigProblem("bias", "bias = True, but arch = 'modern' has none", "use bias = False")
        head_size = values["n_embd"] // values["n_head"]
        if values["positions"] == "rotary" and head_size % 4:
            heads = nearest_head_count(values["n_embd"], values["n_head"])
            yield ConfigProblem(
                "n_head",
                f"rotary positions need a head size that is a multiple of 4, n_embd / n_head is {head_size}",
                f"use n_head = {heads} (head size {values['n_embd'] // heads}) or positions = 'learned'",
            )
        return
    for key in INGREDIENTS:
        if values[key] != getattr(ModelShape, key):
            yield ConfigProblem(key, f"{key} = {values[key]!r} needs arch = 'modern'", f"set that, or leave {key} out")


def _horizon(values: Values) -> Iterator[ConfigProblem]:
    if not values["decay_lr"]:
        return
    if values["max_iters"] and values["warmup_iters"] > values["max_iters"]:
        yield ConfigProblem(
            "warmup_iters",
            f"warmup_iters {values['warmup_iters']} is longer than max_iters {values['max_iters']}",
            f"use about a twentieth, warmup_iters = {values['max_iters'] // 20}",
        )
    decays = values["schedule"] != "constant"
    if decays and values["lr_decay_iters"] < values["warmup_iters"]:
        yield ConfigProblem(
            "lr_decay_iters",
            f"lr_decay_iters {values['lr_decay_iters']} ends before warmup_iters {values['warmup_iters']}",
            f"use lr_decay_iters = max_iters = {values['max_iters']}",
        )


def _rates(values: Values) -> Iterator[ConfigProblem]:
    if values["decay_lr"] and values["schedule"] != "constant" and values["min_lr"] > values["learning_rate"]:
        yield ConfigProblem(
            "min_lr",
            f"min_lr {values['min_lr']:g} is above learning_rate {values['learning_rate']:g}",
            f"use a tenth, min_lr = {values['learning_rate'] / 10:g}",
        )


def _step_size(values: Values, processes: int) -> Iterator[ConfigProblem]:
    tokens, micro = values["tokens_per_step"], values["batch_size"] * values["block_size"] * processes
    if tokens and tokens % micro:
        below = max(micro, tokens - tokens % micro)
        across = f" * {processes} processes" if processes > 1 else ""
        yield ConfigProblem(
            "tokens_per_step",
            f"tokens_per_step {tokens} is not divisible by batch_size * block_size{across} = {micro}",
            f"use tokens_per_step = {below} or change batch_size",
        )
    accumulation = values["gradient_accumulation_steps"]
    if not tokens and accumulation % processes:
        yield ConfigProblem(
            "gradient_accumulation_steps",
            f"gradient_accumulation_steps {accumulation} is not divisible by the {processes} processes",
            f"use gradient_accumulation_steps = {-(-accumulation // processes) * processes}",
        )


def _device_name(values: Values) -> Iterator[ConfigProblem]:
    kind, _, index = str(values["device"]).partition(":")
    if kind not in ("auto", "cpu", "cuda", "mps") or (index and not index.isdecimal()):
        yield ConfigProblem(
            "device",
            f"device = {values['device']!r} is not known",
            "use auto, cpu, cuda, cuda:0 (or another number) or mps",
        )
