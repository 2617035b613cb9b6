"""`gptfit train`: nanoGPT's train.py, its configs and its keys."""

from __future__ import annotations

import argparse
from pathlib import Path

from gptfit.errors import GptfitError
from gptfit.verbs.autobatch import resolve_auto
from gptfit.verbs.common import config_arguments, config_lines, load, recipe_argument

HELP = "Train a GPT: nanoGPT's configs, keys and output, resumable at any moment."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    recipe_argument(parser)


def run(args: argparse.Namespace) -> int:
    chosen = resolve_auto(args)
    # Resuming, the keys that are not given come from the checkpoint, so the whole is checked only after that.
    loaded = load(args, checked=False)
    is_resume = loaded.config.init_from == "resume"
    loaded = loaded if is_resume else load(args)
    from gptfit.run.processes import find_processes
    from gptfit.run.resume import adopt_config
    from gptfit.run.train import train
    from gptfit.verbs.train_view import make_view, summary_lines

    config = adopt_config(loaded.config, loaded.sources) if is_resume else loaded.config
    is_master = find_processes().is_master
    view = make_view(config, is_master)
    with view:
        for line in [*chosen, *config_lines(loaded)] if is_master else ():
            view.say(line)
        result = train(config, view.report)
    if is_master:
        print("\n".join([_write_page(Path(result.out_dir)), *summary_lines(config, result)]))
        _remember(Path(result.out_dir))
    return 0


def _write_page(out_dir: Path) -> str:
    """The report beside the checkpoints. A page that cannot be written is a remark: the training is done."""
    from gptfit.view.report import write_report

    page = out_dir / "report.html"
    try:
        write_report([out_dir], page)
    except GptfitError as error:
        return f"no report page: {error}"
    return f"report: {page}"


def _remember(out_dir: Path) -> None:
    """Keep speed and loss for later plans. A cache that cannot be written is a remark: the training is done."""
    from gptfit import measured, remember
    from gptfit.runlog import read_run

    try:
        measured.append(remember.of_run(read_run(out_dir)))
    except GptfitError as error:
        print(f"not remembered for `gptfit plan`: {error}")
