"""What verbs share: reading a config from the command line, printing JSON, the console."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gptfit.config import FIELD_TYPES, GPTFIT_KEYS, TrainConfig
from gptfit.configfile import COMMAND_LINE, Loaded, load_config
from gptfit.dataset import data_folder, read_dataset
from gptfit.errors import UsageError
from gptfit.recipe import RECIPES, modern_keys

if TYPE_CHECKING:
    from rich.console import Console

PIPED_WIDTH = 120  # columns


def config_arguments(parser: argparse.ArgumentParser) -> None:
    """`[CONFIG.py ...] [--key=value ...]` in any order, as nanoGPT's configurator takes them."""
    parser.add_argument("configs", nargs="*", metavar="CONFIG.py", help="nanoGPT-style config files, later ones win")
    parser.set_defaults(overrides=[], options=[])
    nanogpt = " ".join(key for key in FIELD_TYPES if key not in GPTFIT_KEYS)
    ours = " ".join(key for key in FIELD_TYPES if key in GPTFIT_KEYS)
    parser.epilog = f"Keys, each as --key=value. nanoGPT's: {nanogpt}. gptfit's own: {ours}."


def recipe_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        default="gpt2",
        help="modern: rates, schedule, optimizer and block of the modern recipe for this size (default: nanoGPT's)",
    )


def load(args: argparse.Namespace, checked: bool = True) -> Loaded:
    """The config the command line describes; positional words that are no files are refused with a hint."""
    overrides: list[str] = []
    _refuse_separate_values(args)
    files = list(args.configs)
    for word in args.overrides:
        if word.startswith("--"):
            overrides.append(word)
        elif "=" in word and not word.endswith(".py"):
            raise UsageError(f"{word}: keys are given as --{word}")
        else:
            files.append(word)  # argparse stops collecting files at the first unknown option
    if getattr(args, "recipe", "gpt2") == "gpt2":
        return load_config(files, overrides, checked=checked)
    return _with_modern_recipe(load_config(files, overrides, checked=False), checked)


def _with_modern_recipe(loaded: Loaded, checked: bool) -> Loaded:
    """The recipe's keys over those of the files and under those of the command line."""
    if loaded.config.init_from == "resume":
        return loaded  # the run's own config has them
    if loaded.config.init_from != "scratch":
        raise UsageError("--recipe modern is a model of its own, and init_from brings another; leave one of them out")
    typed = {key for key, source in loaded.sources.items() if source == COMMAND_LINE}
    keys = modern_keys(loaded.config, set(loaded.sources) - typed, typed, _vocab_size(loaded.config))
    values = {**loaded.config.as_dict(), **keys}
    line = f"recipe modern: {', '.join(f'{key} = {value!r}' for key, value in keys.items())}"
    config = TrainConfig(**values) if checked else TrainConfig.unchecked(**values)
    return replace(
        loaded, config=config, sources=loaded.sources | dict.fromkeys(keys, "recipe"), notes=(*loaded.notes, line)
    )


def _vocab_size(config: TrainConfig) -> int | None:
    """Of the data, where it is there to be read."""
    folder = data_folder(config.dataset, config.data_root)
    return read_dataset(folder).model_vocab_size if folder.is_dir() else None


def _refuse_separate_values(args: argparse.Namespace) -> None:
    """`--batch_size 8` would leave 8 as a file; nanoGPT's form has an equals sign. A verb's own option takes both."""
    for word in args.overrides:
        option = word.partition("=")[0]
        close = difflib.get_close_matches(option, args.options, n=1, cutoff=0.8)
        if close and option.removeprefix("--") not in FIELD_TYPES:
            raise UsageError(f"{option}: no such option or key; did you mean {close[0]}?")
        if word.startswith("--") and "=" not in word:
            raise UsageError(f"{word}: give a value as {word}=VALUE")


def config_lines(loaded: Loaded) -> list[str]:
    """What the run changes from nanoGPT's defaults and where it was said, one line per key, notes first."""
    lines = list(loaded.notes)
    for key, source in loaded.sources.items():
        if source == COMMAND_LINE:
            lines.append(f"Overriding: {key} = {getattr(loaded.config, key)}")
    return lines


def print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def console() -> Console:
    """A rich console; plain and wide when piped, so that tables are not cut for `grep`."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
