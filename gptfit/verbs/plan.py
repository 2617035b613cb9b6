"""`gptfit plan`: what a config will do on a named GPU, before it runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from gptfit import measured
from gptfit.config.keys import TrainConfig
from gptfit.config.start_model import is_pretrained, known_shape, with_model_of
from gptfit.plan.plan import plan
from gptfit.plan.result import Plan
from gptfit.verbs.common import (
    check_new_config,
    config_arguments,
    load_unchecked,
    print_json,
    recipe_argument,
    write_config,
)
from gptfit.verbs.gpu_and_data import card_arguments, find_card, find_data, processes_of, spread_of, vocab_size

HELP = "What a config will do on a GPU: memory, speed, time, loss, and what is wrong with it."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    card_arguments(parser)
    recipe_argument(parser)
    parser.add_argument("--write", metavar="FILE", help="write the config with what makes it fit as FILE.py")


def run(args: argparse.Namespace) -> int:
    """0: it runs. 1: it does not start or does not fit."""
    if args.write:
        check_new_config(Path(args.write))
    answer, notes = make_plan(args)
    if args.write:
        write_config(Path(args.write), _fitting(answer), "by gptfit plan", [])
    if args.json:
        print_json(answer.as_json())
    else:
        from gptfit.verbs.plan_view import show

        show(answer, notes)
    return 0 if answer.runs else 1


def make_plan(args: argparse.Namespace) -> tuple[Plan, tuple[str, ...]]:
    """The plan, and remarks about the config files."""
    loaded = load_unchecked(args)
    config, measurements = loaded.config, measured.read()
    if is_pretrained(config) and (known := known_shape(config.init_from)):
        config = with_model_of(config, known)
    data = find_data(args.data, config, args.text_column)
    shape = config.shape(vocab_size(data))
    card = find_card(args, config)
    answer = plan(
        config,
        shape,
        card.gpu,
        data=data,
        processes=processes_of(args, card),
        spread=spread_of(args, card),
        measurements=measurements,
        device_name=card.device_name,
        used_bytes=card.used_bytes,
        watts=args.watts,
        texts=loaded.texts,
    )
    return answer, loaded.notes


def _fitting(answer: Plan) -> TrainConfig:
    """The config with the cheapest measures that make it fit, and the same tokens per step."""
    way = answer.ladder.way if answer.ladder else None
    if way is None:
        return answer.config
    steps = way.setting.accumulation * answer.processes
    return answer.config.replace(**way.keys, gradient_accumulation_steps=steps)
