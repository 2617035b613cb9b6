"""From a command line to a plan: for `gptfit plan`, its page and `gptfit.plan()`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from gptfit.errors import UsageError
from gptfit.units import GIB
from gptfit.verbs.common import card_arguments, config_arguments, load_unchecked, recipe_argument

if TYPE_CHECKING:
    from gptfit.plan.result import Plan


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    card_arguments(parser)
    recipe_argument(parser)
    parser.add_argument(
        "--host-memory", type=float, metavar="GIB", help="main memory free beside the card (default: this machine's)"
    )
    parser.add_argument(
        "--program",
        choices=("gptfit", "nanogpt"),
        default="gptfit",
        help="whose train runs the config (nanoGPT's needs more memory)",
    )


def make_plan(args: argparse.Namespace) -> tuple[Plan, tuple[str, ...]]:
    """The plan, and remarks about the config files. Imported late, as `plan --help` needs none of it."""
    from gptfit import measured
    from gptfit.config.start_model import is_pretrained, known_shape, with_model_of
    from gptfit.device.cpu_rate import product_rate
    from gptfit.plan.plan import plan
    from gptfit.verbs.gpu_and_data import find_card, find_data, positive, processes_of, spread_of, vocab_size

    loaded = load_unchecked(args)
    config, measurements = loaded.config, measured.read()
    if is_pretrained(config) and (known := known_shape(config.init_from)):
        config = with_model_of(config, known)
    data = find_data(args.data, config, args.text_column)
    shape = config.shape(vocab_size(data))
    card = find_card(args, config)
    if args.host_memory is not None:
        positive("--host-memory", args.host_memory)
        card = replace(card, host_free_bytes=args.host_memory * GIB)
    if args.program == "nanogpt" and config.arch != "gpt2":
        raise UsageError("nanoGPT has arch = 'gpt2' only", fix="leave --program nanogpt")
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
        host_free_bytes=card.host_free_bytes,
        watts=args.watts,
        texts=loaded.texts,
        program=args.program,
        cpu_rate=product_rate,
    )
    return answer, loaded.notes
