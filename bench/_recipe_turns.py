"""`gptfit train` as a program that waits for a line on its input after every step, and says how long the step took.

bench/recipe.py lets two of them take turns, so that what else the machine does slows both down alike.
"""

from __future__ import annotations

import argparse
import sys

from gptfit.logs.events import Event, Step
from gptfit.train.train import train
from gptfit.verbs.train import add_arguments, find_config


def main() -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args, args.overrides = parser.parse_known_args()
    train(find_config(args)[0], say_and_wait)
    return 0


def say_and_wait(event: Event) -> None:
    if isinstance(event, Step):
        print(event.ms, flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    sys.exit(main())
