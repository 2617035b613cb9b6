"""Problems of a planned run as data: what does not start or fit, and what usually goes wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gptfit.config import recipe
from gptfit.config.keys import find_warnings
from gptfit.config.start_model import RELEASED, is_pretrained, known_shape
from gptfit.errors import Problem
from gptfit.plan import formats, loss, memory, usual_values
from gptfit.plan.claims import wrong_claims
from gptfit.plan.host import host_problem
from gptfit.plan.resolve import in_nanogpt
from gptfit.plan.result import Plan
from gptfit.plan.setting import Setting
from gptfit.schedule import usual_warmup
from gptfit.units import GIB, count, duration, gib, percent, si, times

if TYPE_CHECKING:
    from gptfit.plan.ladder import Way

EVAL_LIMIT = 0.10  # of the run's time
REGULAR_EPOCH_LIMIT = 30.0  # with dropout: nanoGPT's shakespeare_char is at its best after 28
EPOCH_LIMIT = 4.0  # Muennighoff et al. (2023): up to four epochs are worth nearly as much as fresh data
LEAST_TOKENS_PER_PARAMETER = 5.0
SMALLER_IS_BETTER = "a smaller model would reach a lower loss"
WARMUP_LIMIT = 0.10
# A few steps are a smoke test, not a run whose horizon or batch should be judged.
SMOKE_TEST_ITERS = 200


def check(plan: Plan, cannot_start: Sequence[Problem], texts: Sequence[str] = ()) -> list[Problem]:
    """Errors first. `texts` are the config files as written, whose comments may claim a size."""
    problems = list(cannot_start)
    if plan.setting is None:
        return problems
    problems += [] if cannot_start else find_warnings(plan.config.as_dict(), plan.processes)
    training = () if plan.config.eval_only else (_step, _rate, _horizon, _data, _evaluation)
    for part in (_fit, _host, _in_nanogpt, _shape, _start, _precision, *training):
        problems += part(plan)
    problems += [
        Problem("warning", key, message, fix) for key, message, fix in wrong_claims(plan.config, plan.shape, texts)
    ]
    return problems


def _fit(plan: Plan) -> Iterator[Problem]:
    if plan.fits is not False or plan.memory is None or plan.usable_bytes is None:
        return
    needs, has = gib(plan.memory.device.value), gib(max(0.0, plan.usable_bytes))
    where = plan.gpu.name if plan.gpu else "this machine"
    message = f"needs about {needs} where {where} has {has} free: out of memory"
    key = "init_from" if is_pretrained(plan.config) and not plan.largest_micro_batch else "batch_size"
    yield Problem("error", key, message, _remedy(plan), way_up(plan))


def _host(plan: Plan) -> Iterator[Problem]:
    if plan.gpu and plan.setting and (problem := host_problem(plan.setting, plan.host_free_bytes)):
        yield problem


def _remedy(plan: Plan) -> str:
    """The cheapest way up the memory ladder; what is missing where none leads there."""
    setting, ladder = plan.setting, plan.ladder
    assert setting is not None
    if ladder is not None and (way := ladder.way):
        steps = way.setting.accumulation * plan.processes
        words = [f"{key} = {value!r}" for key, value in way.keys.items() if key != "batch_size"]
        words.append(f"batch_size = {way.setting.micro_batch} with gradient_accumulation_steps = {steps}")
        host = f" and {gib(way.host_bytes)} of host memory" if way.host_bytes else ""
        chance = "" if way.is_sure else f" ({percent(way.fit_chance)} likely to fit)"
        needs = f"{gib(way.device.value)}{chance}{host}"
        return f"{', '.join(words)}, the same tokens per step: {needs}{_pace(plan, way)}"
    if is_pretrained(plan.config):
        return _smaller_start(plan, setting, plan.usable_bytes or 0.0)
    if plan.gpu is None:
        return "a smaller batch_size or model (n_layer, n_embd), or end other programs"
    short = ladder.missing if ladder else "nothing helps"
    return f"a smaller model (n_layer, n_embd) or a larger card; {short}"


def _pace(plan: Plan, way: Way) -> str:
    """How fast that way is and how long the run takes with it, evaluations left aside."""
    if not way.tokens_per_s:
        return ""
    steps = 0 if plan.config.eval_only else plan.config.max_iters
    seconds = steps * way.setting.tokens_per_step / way.tokens_per_s
    return f", {si(way.tokens_per_s)} tokens/s" + (f", {duration(seconds)} of training" if seconds else "")


def way_up(plan: Plan) -> dict[str, Any]:
    """The keys of that way, the accumulation that keeps the tokens per step among them."""
    way = plan.ladder.way if plan.ladder else None
    if way is None:
        return {}
    steps = (
        {}
        if plan.config.tokens_per_step
        else {"gradient_accumulation_steps": way.setting.accumulation * plan.processes}
    )
    return {**way.keys, **steps}


def _same_step(setting: Setting, largest: int) -> str:
    """The largest micro-batch that divides the step, in words; empty where not even one row fits."""
    rows = setting.micro_batch * setting.accumulation
    fitting = next((size for size in range(min(largest, rows), 0, -1) if rows % size == 0), 0)
    steps = rows // fitting * setting.processes if fitting else 0
    words = f"batch_size = {fitting} with gradient_accumulation_steps = {steps}, the same tokens per step"
    return words if fitting else ""


def _in_nanogpt(plan: Plan) -> Iterator[Problem]:
    """Some configs fit here that nanoGPT cannot run: it computes the loss whole and returns its logits to the loop."""
    setting, gpu, usable = plan.setting, plan.gpu, plan.usable_bytes
    is_shared = plan.config.chunked_loss == "auto" and plan.config.arch == "gpt2"  # a config that nanoGPT could run
    if setting is None or gpu is None or usable is None or not (is_shared and plan.fits):
        return
    whole = in_nanogpt(setting)
    needs = memory.predict(whole).device.value
    if needs <= usable:
        return
    there = _same_step(whole, memory.largest_micro_batch(whole, gpu, gpu.vram_gib * GIB - usable))
    here = "the loss is computed in chunks" if setting.chunked_loss else "the model returns its loss alone"
    yield Problem(
        "warning",
        "chunked_loss",
        f"{here}; nanoGPT computes it whole and returns the logits, which needs about {gib(needs)}: out of memory",
        f"nothing here; in nanoGPT {there or 'a smaller model'}",
    )


def _smaller_start(plan: Plan, setting: Setting, usable: float) -> str:
    """Released weights have one shape: a smaller release that fits, and the memory that this one would need."""
    least = replace(setting, micro_batch=1, chunked_loss=True, checkpoint_activations=True)
    needs = memory.predict(least).device.value
    larger = f"a card with {gib(needs)} free (batch_size = 1, chunked_loss = checkpoint_activations = True)"
    for name in reversed(RELEASED):
        shape = known_shape(name)
        if shape is not None and shape.n_weights < plan.shape.n_weights:
            smaller = replace(least, shape=replace(shape, block_size=min(shape.block_size, plan.shape.block_size)))
            if memory.predict(smaller).device.value <= usable:
                keys = "batch_size = 1, chunked_loss = True and checkpoint_activations = True"
                return f"init_from = '{name}', which fits with {keys}; or {larger}"
    return larger


def _shape(plan: Plan) -> Iterator[Problem]:
    shape = plan.shape
    if shape.n_embd % shape.n_head == 0 and (shape.n_embd // shape.n_head) % 8:
        size = shape.n_embd // shape.n_head
        yield Problem(
            "warning",
            "n_head",
            f"head size {size} is not a multiple of 8: attention is padded and slow",
            f"use {_better_width(shape.n_embd)}",
            {"n_embd": _width_of_heads(shape.n_embd), "n_head": _width_of_heads(shape.n_embd) // 64},
        )
    if shape.vocab_size > 1024 and shape.vocab_size % 64 and not is_pretrained(plan.config):
        padded = -(-shape.vocab_size // 64) * 64
        yield Problem(
            "warning",
            "vocab_size",
            f"vocabulary {count(shape.vocab_size)} is not a multiple of 64: the head's matmuls run slower",
            f"use vocab_size = {padded}",
            {"vocab_size": padded},
        )


def _better_width(n_embd: int) -> str:
    """The nearest width that heads of 64 divide."""
    width = _width_of_heads(n_embd)
    return f"n_embd = {width} with n_head = {width // 64} (head size 64)"


def _width_of_heads(n_embd: int) -> int:
    return max(64, round(n_embd / 64) * 64)


def _precision(plan: Plan) -> Iterator[Problem]:
    config, gpu = plan.config, plan.gpu
    if config.dtype == "float16" and gpu and gpu.has_bf16:
        message = f"float16 on {gpu.name}, which has bfloat16: needs loss scaling and can overflow"
        yield Problem("warning", "dtype", message, "use dtype = 'bfloat16'", {"dtype": "bfloat16"})
    if config.dtype == "bfloat16" and gpu and not gpu.has_bf16:
        yield Problem(
            "warning",
            "dtype",
            f"{gpu.name} has no bfloat16 units: emulated and slow",
            "use dtype = 'float16'",
            {"dtype": "float16"},
        )
    yield from _matmul(plan)
    if not config.compile and gpu and gpu.is_nvidia:
        yield Problem(
            "warning",
            "compile",
            "compile is off: slower, and activations and logits take nearly twice the memory",
            "use compile = True",
            {"compile": True},
        )


def _matmul(plan: Plan) -> Iterator[Problem]:
    config, gpu, setting = plan.config, plan.gpu, plan.setting
    plain = "use matmul = 'plain'"
    if config.matmul != "plain" and gpu is None:
        yield Problem("error", "matmul", f"matmul = {config.matmul!r} needs an NVIDIA card", plain)
    elif gpu and (problem := formats.matmul_problem(config.matmul, gpu)):
        yield Problem("error", "matmul", f"matmul = {config.matmul!r} {problem}", plain)
    elif gpu and config.matmul != "plain" and not formats.gains(config.matmul, gpu):
        message = f"matmul = {config.matmul!r}: {gpu.name} sums in float32 at the same rate, nothing is gained"
        yield Problem("warning", "matmul", message, plain)
    elif config.matmul == "fp8" and not config.compile:
        message = "matmul = 'fp8' without compile: casting to 8 bits is many kernels, which cost more than is gained"
        yield Problem("warning", "matmul", message, "use compile = True")
    if config.residual_dtype != "float32" and config.dtype == "auto" and setting and setting.dtype == "float32":
        message = f"residual_dtype = {config.residual_dtype!r} needs products in 16 bits, planned in float32"
        yield Problem("error", "residual_dtype", message, "use residual_dtype = 'float32'")


def _step(plan: Plan) -> Iterator[Problem]:
    low, high = usual_values.usual_tokens_per_step(plan.shape.parameters)
    better = usual_values.tokens_per_step(plan.shape.parameters, plan.tokens)
    low, high = min(low, better), max(high, better)  # a short run takes smaller steps
    if plan.shape.arch == "modern":
        least = recipe.least_tokens_per_step(plan.shape.n_embd, plan.shape.vocab_size, plan.tokens, plan.gpu is None)
        low = min(low, recipe.tokens_per_step(plan.tokens, least))  # what the recipe itself would take
    tokens = plan.tokens_per_step
    if plan.config.max_iters <= SMOKE_TEST_ITERS or low <= tokens <= high or plan.shape.parameters < 20e6:
        return
    side = "small: the gradient is noisy" if tokens < low else "large: fewer updates for the same data"
    key = "tokens_per_step" if plan.config.tokens_per_step else "gradient_accumulation_steps"
    yield Problem(
        "warning",
        key,
        f"{count(tokens)} tokens per step is {side} for {si(plan.shape.parameters)} parameters",
        f"use about {count(better)}",
    )


def _start(plan: Plan) -> Iterator[Problem]:
    start = plan.config.init_from
    if not is_pretrained(plan.config):
        return
    known = known_shape(start)
    if known is None and not os.path.exists(start):
        message = f"{start} is neither here nor the name of a released model ({', '.join(RELEASED)})"
        yield Problem("error", "init_from", message, "check the path or the name")
    elif known is None:
        yield Problem(
            "warning",
            "init_from",
            f"the model will be that of {start}, whose weights are not opened here: this is the config's",
            "give the n_layer, n_head, n_embd, bias and vocab_size of those weights",
        )
    elif plan.shape.block_size > known.block_size:
        message = f"block_size is {plan.shape.block_size} but {start} knows {known.block_size} positions"
        yield Problem("error", "block_size", message, f"use block_size = {known.block_size} or less")


def _rate(plan: Plan) -> Iterator[Problem]:
    rate, parameters = plan.config.learning_rate, plan.shape.parameters
    if plan.config.init_from != "scratch":
        return  # fine-tuning uses far smaller ones
    if plan.config.optimizer == "muon":
        yield from _muon_rate(rate, recipe.matrix_rate(plan.tokens_per_step))
        return
    low, high = usual_values.usual_learning_rate(parameters)
    if not low <= rate <= high:
        side = "below" if rate < low else "above"
        yield Problem(
            "warning",
            "learning_rate",
            f"learning_rate {rate:g} is far {side} the usual for {si(parameters)} parameters",
            f"use about {usual_values.learning_rate(parameters):g}",
            {"learning_rate": usual_values.learning_rate(parameters)},
        )


def _muon_rate(rate: float, usual: float) -> Iterator[Problem]:
    """Muon's rate is that of an orthogonal update; one tuned for AdamW is twenty times too small."""
    if not usual / 4 <= rate <= usual * 4:
        yield Problem(
            "warning",
            "learning_rate",
            f"learning_rate {rate:g} is far {'below' if rate < usual else 'above'} the usual for optimizer = 'muon'",
            f"use about {usual:g}, or --recipe modern",
        )


def _horizon(plan: Plan) -> Iterator[Problem]:
    config = plan.config
    if not config.decay_lr or config.max_iters <= SMOKE_TEST_ITERS:
        return
    if WARMUP_LIMIT * config.max_iters < config.warmup_iters <= config.max_iters:
        share = percent(config.warmup_iters / config.max_iters)
        yield Problem(
            "warning",
            "warmup_iters",
            f"warmup_iters {config.warmup_iters} is {share} of the run",
            f"use warmup_iters = {usual_warmup(config.max_iters)}",
            {"warmup_iters": usual_warmup(config.max_iters)},
        )
    if config.schedule != "constant" and config.lr_decay_iters > config.max_iters:
        yield Problem(
            "warning",
            "lr_decay_iters",
            f"lr_decay_iters {config.lr_decay_iters} is beyond max_iters {config.max_iters}: the rate never finishes decaying",
            f"use lr_decay_iters = {config.max_iters}",
            {"lr_decay_iters": config.max_iters},
        )


def _data(plan: Plan) -> Iterator[Problem]:
    tokens, parameters = plan.tokens, plan.shape.tied_parameters
    epochs = plan.epochs.value if plan.epochs else 0.0
    if plan.data and epochs > (REGULAR_EPOCH_LIMIT if plan.config.dropout > 0 else EPOCH_LIMIT):
        worth = loss.effective_tokens(tokens, plan.data.tokens.value)
        remedy = (
            "fewer iterations" if plan.config.dropout else "dropout = 0.1 and early_stop_evals, or fewer iterations"
        )
        yield Problem(
            "warning",
            "max_iters",
            f"{times(epochs)} epochs over {si(plan.data.tokens.value)} tokens: "
            f"{si(tokens)} seen are worth {si(worth)} fresh ones",
            f"more data, {remedy}",
        )
    is_short = plan.config.max_iters > SMOKE_TEST_ITERS and tokens < LEAST_TOKENS_PER_PARAMETER * parameters
    # Where the data ends before that, a smaller model is not the better one: plan/small_loss.py.
    if is_short and epochs < EPOCH_LIMIT and not is_pretrained(plan.config):
        yield Problem(
            "warning",
            "max_iters",
            f"{tokens / parameters:.1f} tokens per parameter: {SMALLER_IS_BETTER}",
            f"about {si(usual_values.optimal_tokens(plan.shape))} tokens are worth their time",
        )
    if plan.config.dropout > 0 and plan.epochs and plan.epochs.value <= 1:
        message = f"dropout {plan.config.dropout:g} on data seen at most once only slows learning"
        yield Problem("warning", "dropout", message, "use dropout = 0.0", {"dropout": 0.0})


def _evaluation(plan: Plan) -> Iterator[Problem]:
    if plan.eval_share and plan.eval_share > EVAL_LIMIT and plan.config.max_iters > SMOKE_TEST_ITERS:
        interval = float(f"{plan.config.eval_interval * plan.eval_share / 0.05:.1g}")
        yield Problem(
            "warning",
            "eval_interval",
            f"evaluation takes {percent(plan.eval_share)} of the time",
            f"use eval_interval = {interval:.0f} or fewer eval_iters",
        )
