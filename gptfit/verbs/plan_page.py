"""`gptfit plan --page`: a question of the page becomes the command's own arguments, and its plan the page's answer."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from gptfit import measured
from gptfit.config.keys import KEYS, TrainConfig
from gptfit.config.recipe import RECIPES
from gptfit.config.write import render
from gptfit.errors import ConfigError
from gptfit.gpus import all_gpus
from gptfit.pages.plan_page import PlanSite
from gptfit.plan.expected import expected_loss
from gptfit.plan.known_data import KNOWN_DATA
from gptfit.plan.ladder import RUNGS
from gptfit.plan.result import Plan
from gptfit.schedule import usual_warmup
from gptfit.units import GIB, duration, gib, si
from gptfit.verbs.make_plan import make_plan
from gptfit.verbs.next_commands import same_plan
from gptfit.verbs.plan_view import plan_rows, plan_title

MODEL = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
STEP = ("batch_size", "tokens_per_step")
RUNG_KEYS = tuple(dict.fromkeys(rung.key for rung in RUNGS))
# Groups of keys that name files and addresses: a page has no business there.
KEPT_OUT = ("data", "evaluation and files", "tracking")
CURVE_POINTS = 40
SIZES = {
    "30M": (6, 6, 384),
    "41M": (12, 6, 384),
    "124M": (12, 12, 768),
    "350M": (24, 16, 1024),
    "774M": (36, 20, 1280),
    "1.5B": (48, 25, 1600),
}


EXAMPLE_GPU = "RTX 4070"
BITS = "bits per byte"


def plan_site(args: argparse.Namespace) -> PlanSite:
    """For this machine's card; without one, a common card, so that there is something to see."""
    if args.gpu is None and make_plan(args)[0].gpu is None:
        args = argparse.Namespace(**{**vars(args), "gpu": EXAMPLE_GPU})
    return PlanSite(page_form(args), SIZES, partial(page_answer, args))


def page_form(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The fields, each with the value the command line gives it."""
    started, _ = make_plan(args)
    config = started.config
    card = started.gpu.name if started.gpu else "here"
    cards = [("here", "this machine"), *((gpu.name, gpu.name) for gpu in all_gpus())]
    data = [("", "as given" if args.data or config.dataset not in KNOWN_DATA else config.dataset)]
    data += [(name, name) for name in KNOWN_DATA if args.data or name != config.dataset]
    values = {**config.as_dict(), "vocab_size": started.shape.vocab_size, "tokens_per_step": started.tokens_per_step}
    sizes = [("", "own size"), *((name, name) for name in SIZES)]
    return [
        {"title": "Card and time", "fields": [
            {"name": "gpu", "label": "card", "value": card, "options": cards},
            {"name": "hours", "label": "hours", "value": "", "step": "any", "meaning": "empty: as many steps as max_iters", "empty": "until max_iters"},
            {"name": "data", "label": "data", "value": "", "options": data},
        ]},
        {"title": "Model", "fields": [
            {"name": "size", "label": "size", "value": "", "options": sizes},
            *(_key_field(key, values) for key in MODEL),
            {"name": "recipe", "label": "recipe", "value": args.recipe, "options": [(name, name) for name in RECIPES]},
        ]},
        {"title": "Step", "fields": [_key_field(key, values) for key in STEP]},
        {"title": "Memory ladder", "fields": [_key_field(key, values) for key in RUNG_KEYS]},
    ]  # fmt: skip


def _key_field(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    key = KEYS[name]
    field = {"name": name, "label": name, "value": values[name], "meaning": key.meaning}
    return field | ({"options": [(choice, str(choice)) for choice in key.choices]} if key.choices else {})


def page_answer(args: argparse.Namespace, asked: Mapping[str, str]) -> dict[str, Any]:
    """Everything the page shows for what its form says."""
    found = _arguments(args, asked, {})
    plan, _ = make_plan(found)
    hours = asked.get("hours", "").strip()
    if hours:
        plan, _ = make_plan(_arguments(args, asked, _steps_in(plan, hours)))
    return {
        **plan.as_json(),
        "title": plan_title(plan),
        "headline": _headline(plan),
        "rows": [list(row) for row in plan_rows(plan)],
        "numbers": _numbers(plan),
        "memory_words": _memory_words(plan),
        "memory_total": _memory_total(plan),
        "curve": _curve(plan),
        "curve_unit": BITS if plan.is_in_bits else "loss",
        "command": same_plan(found, _typed(plan.config)),
        "config": render(plan.config, "by gptfit plan --page", [plan_title(plan)]),
    }


def _arguments(args: argparse.Namespace, asked: Mapping[str, str], steps: Mapping[str, int]) -> argparse.Namespace:
    """The command line with what the page says over it."""
    found = argparse.Namespace(**vars(args))
    found.gpu = asked.get("gpu") or args.gpu
    found.recipe = asked["recipe"] if asked.get("recipe") in RECIPES else args.recipe
    found.overrides = [*args.overrides]
    if asked.get("data") in KNOWN_DATA:  # as the config that is copied says it
        found.data = None
        found.overrides.append(f"--dataset={asked['data']}")
    for name, value in asked.items():
        if name in KEYS and value.strip():
            if KEYS[name].group in KEPT_OUT or name == "init_from":
                raise ConfigError(f"{name} cannot be set on the page", fix="give it on the command line")
            found.overrides.append(f"--{name}={value.strip()}")
    found.overrides += [f"--{name}={value}" for name, value in steps.items()]
    return found


def _steps_in(plan: Plan, hours: str) -> dict[str, int]:
    """The steps these hours are enough for, and the schedule that ends with them."""
    try:
        seconds = 3600 * float(hours)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(f"hours = {hours} makes no sense", fix="give a number above 0, or nothing")
    if plan.seconds is None or plan.config.max_iters <= 0:
        return {}
    steps = max(1, int(seconds / plan.seconds.value * plan.config.max_iters))
    return {"max_iters": steps, "lr_decay_iters": steps, "warmup_iters": usual_warmup(steps)}


def _headline(plan: Plan) -> str:
    if not plan.starts:
        return "This config cannot start."
    if plan.fits is None:
        return "It starts; whether it fits is not known."
    if not plan.fits:
        return (
            "It does not fit."
            if plan.ladder is None or plan.ladder.way is None
            else "It does not fit as it is; with the remedy below it does."
        )
    if plan.is_tight:
        return f"Tight: it fits with a chance of {100 * (plan.fit_chance or 0):.0f} %."
    return "It fits."


def _numbers(plan: Plan) -> list[tuple[str, str, str]]:
    """What is read first: a figure, what it is, how it is known."""
    speed, loss, seconds = plan.speed, plan.loss, plan.seconds
    shown = [(si(plan.shape.parameters), "parameters", "exact")] if plan.setting else []
    if speed:
        shown.append((si(speed.tokens_per_s.value), "tokens/s", speed.tokens_per_s.basis))
    if seconds:
        shown.append((duration(seconds.value), "of training", seconds.basis))
    if loss and plan.is_in_bits and (bits := loss.bits_per_byte):
        shown.append((f"{bits.value:.3f}", f"{BITS} ({bits.low:.3f} to {bits.high:.3f})", bits.basis))
    elif loss:
        shown.append((f"{loss.loss.value:.2f}", f"loss ({loss.loss.low:.2f} to {loss.loss.high:.2f})", loss.loss.basis))
    return shown


def _memory_words(plan: Plan) -> str:
    if plan.memory is None:
        return ""
    parts = " + ".join(f"{name} {size / GIB:.1f}" for name, size in plan.memory.parts.items() if size > 0.005 * GIB)
    return f"{_memory_total(plan)}: {parts} GiB"


def _memory_total(plan: Plan) -> str:
    if plan.memory is None:
        return ""
    limit = f" of {gib(plan.usable_bytes)} usable" if plan.usable_bytes is not None else ""
    return f"{gib(plan.memory.device.value)}{limit} ({plan.memory.device.basis})"


def _curve(plan: Plan) -> dict[str, list[float]]:
    """The loss of runs of this model that end earlier, each with its own schedule."""
    curve: dict[str, list[float]] = {"tokens": [], "loss": [], "low": [], "high": []}
    if plan.loss is None or plan.config.init_from != "scratch":
        return curve
    runs = measured.read().losses
    for number in range(1, CURVE_POINTS + 1):
        tokens = plan.tokens * 100 ** (number / CURVE_POINTS - 1)
        found = expected_loss(
            plan.shape,
            tokens,
            plan.data,
            optimizer=plan.config.optimizer,
            dataset=plan.config.dataset,
            own_runs=runs,
            weight_decay=plan.config.weight_decay,
        )
        if found:
            loss = found.bits_per_byte if plan.is_in_bits and found.bits_per_byte else found.loss
            for name, value in zip(curve, (tokens, loss.value, loss.low, loss.high), strict=True):
                curve[name].append(value)
    return curve


def _typed(config: TrainConfig) -> list[str]:
    """What differs from the defaults, as somebody would type it."""
    return [f"--{name}={value}" for name, value in config.as_dict().items() if value != KEYS[name].default]
