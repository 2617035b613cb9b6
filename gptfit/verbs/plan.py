"""`gptfit plan`: what a config will do on a named GPU, before it runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gptfit.config.keys import TrainConfig
from gptfit.verbs.common import check_new_config, print_json, write_config
from gptfit.verbs.make_plan import make_plan, plan_arguments
from gptfit.verbs.serve import address_arguments, serve

if TYPE_CHECKING:
    from gptfit.plan.result import Plan

HELP = "What a config will do on a GPU: memory, speed, time, loss, and what is wrong with it."
EXAMPLES = ("gptfit plan --gpu 4070 --batch_size=8", "gptfit plan configs/mine.py --gpu 4070 --data fineweb.parquet")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    plan_arguments(parser)
    parser.add_argument("--write", metavar="FILE", help="write the config with what makes it fit as FILE.py")
    parser.add_argument("--page", action="store_true", help="open the plan as a local page to play with")
    address_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0: it runs. 1: it does not start or does not fit."""
    if args.page:
        return serve(Path("."), args, args, "plan")
    if args.write:
        check_new_config(Path(args.write))
    answer, notes = make_plan(args)
    if args.write:
        write_config(Path(args.write), _fitting(answer), "by gptfit plan", [], answer.shape.vocab_size)
    if args.json:
        print_json(answer.as_json())
    else:
        from gptfit.verbs.next_commands import after_plan
        from gptfit.verbs.plan_view import show

        wrote = f"Wrote {args.write}{'' if answer.runs else ', with what makes it fit'}.\n" if args.write else ""
        show(answer, notes, then=wrote + after_plan(args, answer))
    return 0 if answer.runs else 1


def _fitting(answer: Plan) -> TrainConfig:
    """The config with the cheapest measures that make it fit, and the same tokens per step."""
    way = answer.ladder.way if answer.ladder else None
    if way is None:
        return answer.config
    steps = way.setting.accumulation * answer.processes
    return answer.config.replace(**way.keys, gradient_accumulation_steps=steps)
