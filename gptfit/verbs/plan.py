"""`gptfit plan`: what a config will do on a named GPU, before it runs."""

from __future__ import annotations

import argparse

from gptfit import measured
from gptfit.plan.plan import measured_on_cpu, plan
from gptfit.startmodel import is_pretrained, known_shape, with_model_of
from gptfit.verbs.common import config_arguments, load, print_json, recipe_argument
from gptfit.verbs.planinput import card_arguments, find_card, find_data, vocab_size

HELP = "What a config will do on a GPU: memory, speed, time, loss, and what is wrong with it."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    card_arguments(parser)
    recipe_argument(parser)


def run(args: argparse.Namespace) -> int:
    """0: it runs. 1: it does not start or does not fit."""
    loaded = load(args, checked=False)
    config, measurements = loaded.config, measured.read()
    if is_pretrained(config) and (known := known_shape(config.init_from)):
        config = with_model_of(config, known)
    data = find_data(args.data, config, args.text_column)
    shape = config.shape(vocab_size(data))
    card = find_card(args, config, cpu_will_do=measured_on_cpu(config, shape, measurements))
    answer = plan(
        config,
        shape,
        card.gpu,
        data=data,
        processes=args.gpus,
        measurements=measurements,
        device_name=card.device_name,
        used_bytes=card.used_bytes,
        watts=args.watts,
        texts=loaded.texts,
    )
    if args.json:
        print_json(answer.as_json())
    else:
        from gptfit.verbs.plan_view import show

        show(answer, loaded.notes)
    return 0 if answer.runs else 1
