"""Problems of a planned run as data: what does not start or fit, and what usually goes wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gptfit import recipe
from gptfit.configcheck import ConfigProblem
from gptfit.plan import defaults, loss, memory
from gptfit.plan.claims import wrong_claims
from gptfit.plan.result import Plan, Problem
from gptfit.startmodel import RELEASED, is_pretrained, known_shape
from gptfit.units import count, gib, percent, si

EVAL_LIMIT = 0.10  # of the run's time
EPOCH_LIMIT = 4.0  # Muennighoff et al. (2023): up to four epochs are worth nearly as much as fresh data
LEAST_TOKENS_PER_PARAMETER = 5.0
WARMUP_LIMIT = 0.10
# A few steps are a smoke test, not a run whose horizon or batch should be judged.
SMOKE_TEST_ITERS = 200


def check(plan: Plan, cannot_start: Sequence[ConfigProblem], texts: Sequence[str] = ()) -> list[Problem]:
    """Errors first. `texts` are the config files as written, whose comments may claim a size."""
    problems = [Problem("error", found.key, found.message, found.fix) for found in cannot_start]
    if plan.setting is None:
        return problems
    for part in (_fit, _shape, _start, _precision, _step, _rate, _horizon, _data, _evaluation):
        problems += part(plan)
    problems += [
        Problem("warning", key, message, fix) for key, message, fix in wrong_claims(plan.config, plan.shape, texts)
    ]
    return problems


def _fit(plan: Plan) -> Iterator[Problem]:
    if plan.fits is not False or plan.memory is None or plan.usable_bytes is None or plan.gpu is None:
        return
    needs, has = gib(plan.memory.device.value), gib(max(0.0, plan.usable_bytes))
    message = f"needs about {needs} where {plan.gpu.name} has {has} free: out of memory"
    yield Problem("error", "batch_size", message, _remedy(plan))


def _remedy(plan: Plan) -> str:
    """The largest micro-batch that keeps the tokens per step; else chunks; else checkpoints; else a smaller model."""
    setting, gpu, usable = plan.setting, plan.gpu, plan.usable_bytes or 0.0
    assert setting is not None
    assert gpu is not None
    ways = []
    rows = setting.micro_batch * setting.accumulation
    fitting = next((b for b in range(plan.largest_micro_batch or 0, 0, -1) if rows % b == 0), 0)
    if fitting:
        steps = rows // fitting * plan.processes
        ways.append(f"batch_size = {fitting} with gradient_accumulation_steps = {steps}, the same tokens per step")
    trials = [
        ("chunked_loss = True", replace(setting, chunked_loss=True)),
        ("checkpoint_activations = True", replace(setting, checkpoint_activations=True)),
        (
            "chunked_loss = True and checkpoint_activations = True",
            replace(setting, chunked_loss=True, checkpoint_activations=True),
        ),
    ]
    for words, changed in trials:
        needs = memory.predict(changed).device.value
        if changed != setting and needs <= usable:
            alone = changed == replace(setting, chunked_loss=True) and plan.config.chunked_loss == "auto"
            itself = "; `gptfit train` does so by itself, nanoGPT cannot" if alone else ""
            ways.append(f"{words} ({gib(needs)}{itself})")
            break
    return "; or ".join(ways) or "a smaller model: fewer layers or a smaller n_embd"


def _shape(plan: Plan) -> Iterator[Problem]:
    shape = plan.shape
    if shape.n_embd % shape.n_head == 0 and (shape.n_embd // shape.n_head) % 8:
        size = shape.n_embd // shape.n_head
        yield Problem(
            "warning",
            "n_head",
            f"head size {size} is not a multiple of 8: attention is padded and slow",
            f"use {_better_width(shape.n_embd)}",
        )
    if shape.vocab_size > 1024 and shape.vocab_size % 64 and not is_pretrained(plan.config):
        padded = -(-shape.vocab_size // 64) * 64
        yield Problem(
            "warning",
            "vocab_size",
            f"vocabulary {count(shape.vocab_size)} is not a multiple of 64: the head's matmuls run slower",
            f"use vocab_size = {padded}",
        )


def _better_width(n_embd: int) -> str:
    """The nearest width that heads of 64 divide."""
    width = max(64, round(n_embd / 64) * 64)
    return f"n_embd = {width} with n_head = {width // 64} (head size 64)"


def _precision(plan: Plan) -> Iterator[Problem]:
    config, gpu = plan.config, plan.gpu
    if config.dtype == "float16" and gpu and gpu.has_bf16:
        message = f"float16 on {gpu.name}, which has bfloat16: needs loss scaling and can overflow"
        yield Problem("warning", "dtype", message, "use dtype = 'bfloat16'")
    if config.dtype == "bfloat16" and gpu and not gpu.has_bf16:
        yield Problem(
            "warning", "dtype", f"{gpu.name} has no bfloat16 units: emulated and slow", "use dtype = 'float16'"
        )
    if not config.compile and gpu and gpu.is_nvidia:
        yield Problem(
            "warning",
            "compile",
            "compile is off: slower, and activations and logits take nearly twice the memory",
            "use compile = True",
        )


def _step(plan: Plan) -> Iterator[Problem]:
    low, high = defaults.usual_tokens_per_step(plan.shape.parameters)
    tokens = plan.tokens_per_step
    if plan.config.max_iters <= SMOKE_TEST_ITERS or low <= tokens <= high or plan.shape.parameters < 20e6:
        return
    side = "small: the gradient is noisy" if tokens < low else "large: fewer updates for the same data"
    key = "tokens_per_step" if plan.config.tokens_per_step else "gradient_accumulation_steps"
    yield Problem(
        "warning",
        key,
        f"{count(tokens)} tokens per step is {side} for {si(plan.shape.parameters)} parameters",
        f"use about {count(defaults.tokens_per_step(plan.shape.parameters, plan.tokens))}",
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
        yield from _muon_rate(rate)
        return
    low, high = defaults.usual_learning_rate(parameters)
    if not low <= rate <= high:
        side = "below" if rate < low else "above"
        yield Problem(
            "warning",
            "learning_rate",
            f"learning_rate {rate:g} is far {side} the usual for {si(parameters)} parameters",
            f"use about {defaults.learning_rate(parameters):g}",
        )


def _muon_rate(rate: float) -> Iterator[Problem]:
    """Muon's rate is that of an orthogonal update; one tuned for AdamW is twenty times too small."""
    usual = recipe.MATRIX_RATE
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
    if config.warmup_iters > WARMUP_LIMIT * config.max_iters:
        share = percent(config.warmup_iters / config.max_iters)
        yield Problem(
            "warning",
            "warmup_iters",
            f"warmup_iters {config.warmup_iters} is {share} of the run",
            f"use warmup_iters = {defaults.warmup_iters(config.max_iters)}",
        )
    if config.schedule != "constant" and config.lr_decay_iters != config.max_iters:
        effect = (
            "the rate never finishes decaying"
            if config.lr_decay_iters > config.max_iters
            else "the last steps run at the lowest rate"
        )
        yield Problem(
            "warning",
            "lr_decay_iters",
            f"lr_decay_iters {config.lr_decay_iters} differs from max_iters {config.max_iters}: {effect}",
            f"use lr_decay_iters = {config.max_iters}",
        )


def _data(plan: Plan) -> Iterator[Problem]:
    tokens, parameters = plan.tokens, plan.shape.tied_parameters
    if plan.epochs and plan.data and plan.epochs.value > EPOCH_LIMIT:
        worth = loss.effective_tokens(tokens, plan.data.tokens.value)
        yield Problem(
            "warning",
            "max_iters",
            f"{plan.epochs.value:.1f} epochs over {si(plan.data.tokens.value)} tokens: "
            f"{si(tokens)} seen are worth {si(worth)} fresh ones",
            "more data, a smaller model, or fewer iterations",
        )
    is_short = plan.config.max_iters > SMOKE_TEST_ITERS and tokens < LEAST_TOKENS_PER_PARAMETER * parameters
    if is_short and not is_pretrained(plan.config):
        yield Problem(
            "warning",
            "max_iters",
            f"{tokens / parameters:.1f} tokens per parameter: a smaller model would reach a lower loss",
            f"about {si(defaults.optimal_tokens(plan.shape))} tokens are worth their time",
        )
    if plan.config.dropout > 0 and plan.epochs and plan.epochs.value <= 1:
        message = f"dropout {plan.config.dropout:g} on data seen at most once only slows learning"
        yield Problem("warning", "dropout", message, "use dropout = 0.0")


def _evaluation(plan: Plan) -> Iterator[Problem]:
    if plan.eval_share and plan.eval_share > EVAL_LIMIT and plan.config.max_iters > SMOKE_TEST_ITERS:
        interval = float(f"{plan.config.eval_interval * plan.eval_share / 0.05:.1g}")
        yield Problem(
            "warning",
            "eval_interval",
            f"evaluation takes {percent(plan.eval_share)} of the time",
            f"use eval_interval = {interval:.0f} or fewer eval_iters",
        )
