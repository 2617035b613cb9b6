"""Keys that contradict each other: what is wrong and the remedy. What one value alone may be is in keys.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gptfit.errors import Problem
from gptfit.schedule import GROWING_PARTS, usual_warmup

Values = Mapping[str, Any]

# What else the products are in where `matmul` is not 'plain'; auto is that there.
NEEDED_DTYPES = {"fp8": "bfloat16", "fp16acc": "float16"}


def find_conflicts(values: Values, processes: int = 1) -> list[Problem]:
    """All of them, in the order a person would meet them. Each value alone is in its range by now."""
    problems = [*_heads(values), *_horizon(values), *_rates(values), *_step_size(values, processes)]
    problems += [*_gradients(values, processes), *_shares(values, processes), *_lookahead(values)]
    problems += [*_formats(values), *_several(values, processes)]
    return [*problems, *_modern(values), *_device_name(values)]


def _heads(values: Values) -> Iterator[Problem]:
    n_embd, n_head = values["n_embd"], values["n_head"]
    if n_embd % n_head:
        heads = nearest_head_count(n_embd, n_head)
        yield Problem(
            "error",
            "n_embd",
            f"n_embd {n_embd} is not divisible by n_head {n_head}",
            f"use n_head = {heads} (head size {n_embd // heads})",
        )


def nearest_head_count(n_embd: int, n_head: int) -> int:
    """A head count that divides n_embd: head size 64 if possible, then a multiple of 8, then the nearest."""
    divisors = [d for d in range(1, min(n_embd, 4096) + 1) if n_embd % d == 0]
    return min(divisors, key=lambda d: (n_embd // d != 64, (n_embd // d) % 8 != 0, abs(d - n_head)))


def _gradients(values: Values, processes: int) -> Iterator[Problem]:
    """16-bit gradients are exchanged by nobody, and float16's loss scale would overflow in them."""
    if values["gradient_dtype"] == "float32":
        return
    if processes > 1:
        message = f"gradient_dtype = 'bfloat16' with {processes} processes, which exchange float32 gradients"
        yield Problem("error", "gradient_dtype", message, "use gradient_dtype = 'float32'")
    if "float16" in (values["dtype"], NEEDED_DTYPES.get(values["matmul"])):
        message = "gradient_dtype = 'bfloat16' with products in float16"
        yield Problem("error", "gradient_dtype", message, "use gradient_dtype = 'float32' or dtype = 'bfloat16'")


def _lookahead(values: Values) -> Iterator[Problem]:
    """It needs its part of the state for the whole step."""
    if values["lookahead"] and (values["optimizer_state"] != "float32" or values["optimizer_device"] == "cpu"):
        message = "lookahead with optimizer state in 8 bits or in host memory, where a step does not find it"
        yield Problem("error", "lookahead", message, "use lookahead = 0, or keep the state as it is")


def _several(values: Values, processes: int) -> Iterator[Problem]:
    if values["embedding_device"] == "cpu" and processes > 1:
        message = f"embedding_device = 'cpu' with {processes} processes, which exchange gradients between devices"
        yield Problem("error", "embedding_device", message, "use embedding_device = 'auto'")
    if values["matmul"] != "plain" and processes > 1 and values["parallel"] == "fsdp":
        message = f"matmul = {values['matmul']!r} with parallel = 'fsdp', whose weights come in parts"
        yield Problem("error", "matmul", message, "use matmul = 'plain' or parallel = 'ddp'")


def _formats(values: Values) -> Iterator[Problem]:
    matmul, dtype = values["matmul"], values["dtype"]
    needed = NEEDED_DTYPES.get(matmul, dtype)
    if dtype not in ("auto", needed):
        message = f"matmul = {matmul!r} with dtype = {dtype!r}"
        yield Problem("error", "matmul", message, f"use dtype = {needed!r} or matmul = 'plain'")
    if values["residual_dtype"] != "float32" and dtype == "float32":
        message = f"residual_dtype = {values['residual_dtype']!r} with dtype = 'float32'"
        yield Problem("error", "residual_dtype", message, "use dtype = 'bfloat16' or residual_dtype = 'float32'")


def _modern(values: Values) -> Iterator[Problem]:
    if values["arch"] != "modern":
        return
    if values["bias"]:
        yield Problem("error", "bias", "bias = True, but arch = 'modern' has none", "use bias = False")
    head_size = values["n_embd"] // values["n_head"]
    if values["positions"] == "rotary" and head_size % 4:
        heads = nearest_head_count(values["n_embd"], values["n_head"])
        yield Problem(
            "error",
            "n_head",
            f"rotary positions need a head size that is a multiple of 4, n_embd / n_head is {head_size}",
            f"use n_head = {heads} (head size {values['n_embd'] // heads}) or positions = 'learned'",
        )
    if values["smear_gate"] and not values["smear"]:
        yield Problem("error", "smear_gate", "smear_gate = True has no smear to gate", "use smear = True")


def _horizon(values: Values) -> Iterator[Problem]:
    """These run as in nanoGPT, where a smoke test of a few steps leaves the schedule as it is."""
    max_iters, warmup, decay = values["max_iters"], values["warmup_iters"], values["lr_decay_iters"]
    if not values["decay_lr"] or not max_iters or values["eval_only"]:
        return
    decays = values["schedule"] != "constant"
    if warmup > max_iters:
        share = f"{max_iters / (warmup + 1):.2g}"
        yield Problem(
            "warning",
            "warmup_iters",
            f"warmup_iters {warmup} is longer than max_iters {max_iters}: the rate rises to {share} of learning_rate only",
            f"use warmup_iters = {usual_warmup(max_iters)}",
        )
    elif decays and decay < warmup:
        yield Problem(
            "warning",
            "lr_decay_iters",
            f"lr_decay_iters {decay} ends before warmup_iters {warmup}: after the warm-up the rate is min_lr",
            f"use lr_decay_iters = max_iters = {max_iters}",
        )
    elif decays and decay < max_iters:
        yield Problem(
            "warning",
            "lr_decay_iters",
            f"lr_decay_iters {decay} ends before max_iters {max_iters}: the last steps run at min_lr",
            f"use lr_decay_iters = {max_iters}",
        )


def _rates(values: Values) -> Iterator[Problem]:
    if values["decay_lr"] and values["schedule"] != "constant" and values["min_lr"] > values["learning_rate"]:
        yield Problem(
            "error",
            "min_lr",
            f"min_lr {values['min_lr']:g} is above learning_rate {values['learning_rate']:g}",
            f"use a tenth, min_lr = {values['learning_rate'] / 10:g}",
        )


def _shares(values: Values, processes: int) -> Iterator[Problem]:
    shares = values["shares"]
    if processes == 1 or shares in ("auto", "equal"):
        return
    if shares.count(":") + 1 != processes:
        yield Problem(
            "error",
            "shares",
            f"shares = {shares!r} names {shares.count(':') + 1} processes, there are {processes}",
            "give one speed for each, or use shares = 'auto'",
        )
    elif values["parallel"] == "fsdp":
        yield Problem(
            "error",
            "shares",
            "parallel = 'fsdp' needs every process for every micro-step, so that shares are equal",
            "use shares = 'equal', or parallel = 'ddp'",
        )


def _step_size(values: Values, processes: int) -> Iterator[Problem]:
    tokens, micro = values["tokens_per_step"], values["batch_size"] * values["block_size"] * processes
    if tokens and tokens % micro:
        below = max(micro, tokens - tokens % micro)
        across = f" * {processes} processes" if processes > 1 else ""
        yield Problem(
            "error",
            "tokens_per_step",
            f"tokens_per_step {tokens} is not divisible by batch_size * block_size{across} = {micro}",
            f"use tokens_per_step = {below} or change batch_size",
        )
    accumulation = values["gradient_accumulation_steps"]
    if not tokens and accumulation % processes:
        yield Problem(
            "error",
            "gradient_accumulation_steps",
            f"gradient_accumulation_steps {accumulation} is not divisible by the {processes} processes",
            f"use gradient_accumulation_steps = {-(-accumulation // processes) * processes}",
        )
    smallest = max(GROWING_PARTS) * processes
    micro_steps = tokens // (values["batch_size"] * values["block_size"]) if tokens else accumulation
    if values["grow_batch_iters"] and micro_steps % smallest:
        yield Problem(
            "error",
            "grow_batch_iters",
            f"a batch that grows starts with a {max(GROWING_PARTS)}th of its micro-steps, and {micro_steps} "
            f"over {processes} processes cannot be parted so",
            "use a smaller batch_size with more gradient_accumulation_steps, or grow_batch_iters = 0",
        )


def _device_name(values: Values) -> Iterator[Problem]:
    kind, _, index = str(values["device"]).partition(":")
    if kind not in ("auto", "cpu", "cuda", "mps") or (index and not index.isdecimal()):
        yield Problem(
            "error",
            "device",
            f"device = {values['device']!r} is not known",
            "use auto, cpu, cuda, cuda:0 (or another number) or mps",
        )
