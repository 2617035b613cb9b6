"""`gptfit train`: nanoGPT's train.py, its configs and its keys."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from gptfit.config.keys import TrainConfig, find_problems
from gptfit.config.read import Loaded, checked
from gptfit.errors import ConfigError, GptfitError, UsageError
from gptfit.screen import unbreakable_stdout
from gptfit.verbs.common import config_arguments, config_lines, load_unchecked, recipe_argument
from gptfit.verbs.next_commands import to_watch
from gptfit.verbs.tuned_batch_size import take_auto, with_auto_batch

HELP = "Train a GPT: nanoGPT's configs, keys and output, resumable at any moment."
EXAMPLES = (
    "gptfit train configs/mine.py --batch_size=auto",
    "gptfit train configs/mine.py --init_from=resume",
    "gptfit train configs/mine.py --gpus 8",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    recipe_argument(parser)
    parser.add_argument(
        "--gpus",
        type=int,
        default=0,
        metavar="N",
        help="train on N cards of this machine (or N CPU processes), with the same tokens per step; several machines: torchrun",
    )


def run(args: argparse.Namespace) -> int:
    if os.environ.get("RANK"):
        return _run_launched(args)
    if args.gpus < 0:
        raise UsageError(f"--gpus {args.gpus} makes no sense", fix="give how many cards of this machine to use")
    return _launch(args) if args.gpus else _run_here(args)


def _launch(args: argparse.Namespace) -> int:
    """Check what can be checked without a device, so that N processes do not all say the same."""
    words = ["train", *args.configs, *args.overrides, "--recipe", args.recipe]
    is_auto = take_auto(args)
    loaded = load_unchecked(args)
    config = _whole_config(loaded)
    problems = find_problems(config.as_dict(), args.gpus)
    if problems and not is_auto:
        raise ConfigError(problems[0].message, fix=problems[0].fix, key=problems[0].where)
    from gptfit.train.launch import launch

    return launch(words, args.gpus, config.device, lambda line: print(f"gptfit: {line}", file=sys.stderr))


def _run_launched(args: argparse.Namespace) -> int:
    """One of several processes: whoever started them says what went wrong, once."""
    from gptfit.train.launch import is_launched, is_said, leave_word

    try:
        return _run_here(args)
    except GptfitError as error:
        leave_word(str(error))
        if not is_launched() and not is_said(str(error)):
            raise
        return error.exit_code


def _run_here(args: argparse.Namespace) -> int:
    with unbreakable_stdout():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    config, lines = find_config(args)
    from gptfit.device.processes import find_processes
    from gptfit.train.faults import exit_code
    from gptfit.train.train import train
    from gptfit.verbs.train_view import make_view, summary_lines

    is_master = find_processes().is_master
    view = make_view(config, is_master)
    with view:
        for line in [*lines, *([to_watch(config)] if sys.stdout.isatty() else [])] if is_master else ():
            view.say(line)
        result = train(config, view.report)
    if is_master:
        page, *remarks = after_training(result.out_dir)
        print("\n".join([page, *summary_lines(config, result, view.data), *remarks]))
    return exit_code(result.reason)


def find_config(args: argparse.Namespace) -> tuple[TrainConfig, list[str]]:
    """The config to train, and what to say about where it came from."""
    is_auto = take_auto(args)
    loaded = load_unchecked(args)
    config = _whole_config(loaded)
    config, chosen = with_auto_batch(config) if is_auto else (config, [])
    return config, [*chosen, *config_lines(loaded)]


def _whole_config(loaded: Loaded) -> TrainConfig:
    """Resuming, the keys that are not given come from the checkpoint, so the whole is checked only after that."""
    if loaded.config.init_from != "resume":
        return checked(loaded).config
    from gptfit.checkpoint.resume import adopt_config

    return adopt_config(loaded.config, loaded.sources)


def after_training(out_dir: Path) -> list[str]:
    """Writes the report page and keeps speed and loss for later plans; what to say about them, the page first."""
    return [_write_page(out_dir), *_remember(out_dir)]


def _write_page(out_dir: Path) -> str:
    """The report beside the checkpoints. A page that cannot be written is a remark: the training is done."""
    from gptfit.pages.report import write_report

    page = out_dir / "report.html"
    try:
        write_report([out_dir], page)
    except GptfitError as error:
        return f"no report page: {error}"
    return f"report: {page}"


def _remember(out_dir: Path) -> list[str]:
    """Keep speed and loss for later plans. A cache that cannot be written is a remark: the training is done."""
    from gptfit import measured
    from gptfit.logs.runlog import read_run
    from gptfit.plan.finished_run import of_run

    try:
        measured.append(of_run(read_run(out_dir)))
    except GptfitError as error:
        return [f"not remembered for `gptfit plan`: {error}"]
    return []
