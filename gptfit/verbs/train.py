"""`gptfit train`: nanoGPT's train.py, its configs and its keys."""

from __future__ import annotations

import argparse

from gptfit.verbs.common import config_arguments, config_lines, load

HELP = "Train a GPT: nanoGPT's configs, keys and output, resumable at any moment."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    loaded = load(args)
    from gptfit.run.processes import find_processes
    from gptfit.run.resume import adopt_config
    from gptfit.run.train import train
    from gptfit.verbs.train_view import make_view, summary_lines

    config = loaded.config
    if config.init_from == "resume":
        config = adopt_config(config, loaded.sources)
    is_master = find_processes().is_master
    view = make_view(config, is_master)
    with view:
        for line in config_lines(loaded) if is_master else ():
            view.say(line)
        result = train(config, view.report)
    if is_master:
        print("\n".join(summary_lines(config, result)))
    return 0
