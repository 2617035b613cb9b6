"""What verbs share: reading a config from the command line, printing JSON, the console."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import IO, TYPE_CHECKING, Any, Literal, TextIO, cast

from gptfit.config.keys import KEYS, TrainConfig
from gptfit.config.read import COMMAND_LINE, Loaded, checked, read_config, with_portable
from gptfit.config.recipe import MANY_EPOCHS, RECIPES, DataSize, epochs, modern_keys
from gptfit.config.start_model import with_window
from gptfit.config.write import render
from gptfit.dataset import DatasetInfo, Split, data_folder, read_dataset
from gptfit.errors import ConfigError, UsageError
from gptfit.files import write_whole

if TYPE_CHECKING:
    from rich.console import Console

PIPED_WIDTH = 120  # columns
KEYS_OF_A_CONFIG = "keys, each as --key=value (* gptfit's own; `gptfit keys NAME` says more):"
MOST_COLUMNS = 10_000  # rich fills a table up to its width
GLUE = "\0"  # stands for a blank at which no line is broken


def card_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu", metavar="NAME", help="a card, e.g. 4070; unlike ones: 4090+3090; cpu; here (default): this machine"
    )
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="how many of them per machine (default 1)")
    parser.add_argument("--nodes", type=int, default=1, metavar="M", help="how many such machines (default 1)")
    parser.add_argument(
        "--network", type=float, metavar="GBITS", help="between the machines, Gbit/s each (default: usual)"
    )
    parser.add_argument("--vram", type=float, metavar="GIB", help="memory of the card, where it is not the usual")
    parser.add_argument(
        "--data", metavar="PATH", help="a prepared folder, a Parquet file, or a public name (openwebtext)"
    )
    parser.add_argument("--text-column", default="text", metavar="NAME", help="of the Parquet file (default text)")
    parser.add_argument("--watts", type=float, help="power at the wall while training, for the electricity")
    parser.add_argument("--json", action="store_true", help="print JSON with stable names")


class HelpWithKeys(argparse.RawDescriptionHelpFormatter):
    """Writes out the keys of a config when help is asked for; a plan that is not asked should not pay for them."""

    def add_text(self, text: str | None) -> None:
        if text == KEYS_OF_A_CONFIG:
            from gptfit.config.key_words import key_lines

            text = "\n".join([text, *key_lines()])
        super().add_text(text)


def config_arguments(parser: argparse.ArgumentParser) -> None:
    """`[CONFIG.py ...] [--key=value ...]` in any order, as nanoGPT's configurator takes them."""
    parser.add_argument("configs", nargs="*", metavar="CONFIG.py", help="nanoGPT-style config files, later ones win")
    parser.set_defaults(overrides=[], options=[])
    parser.epilog, parser.formatter_class = KEYS_OF_A_CONFIG, HelpWithKeys


def recipe_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        default="gpt2",
        help="modern: rates, schedule, optimizer and block of the modern recipe for this size (default: nanoGPT's)",
    )


def load(args: argparse.Namespace) -> Loaded:
    """The config the command line describes, and it can start."""
    return checked(load_unchecked(args))


def load_unchecked(args: argparse.Namespace) -> Loaded:
    """The same as it stands, even if it cannot start; positional words that are no files are refused with a hint."""
    overrides: list[str] = []
    _refuse_strangers(args)
    files = list(args.configs)
    for word in args.overrides:
        if word.startswith("--"):
            overrides.append(word)
        elif "=" in word and not word.endswith(".py"):
            raise UsageError(f"{word}: keys are given as --{word}")
        else:
            files.append(word)  # argparse stops collecting files at the first unknown option
    loaded = with_window(read_config(files, overrides))
    return loaded if getattr(args, "recipe", "gpt2") == "gpt2" else _with_modern_recipe(loaded)


def _with_modern_recipe(loaded: Loaded) -> Loaded:
    """The recipe's keys over those of the files and under those of the command line."""
    if loaded.config.init_from == "resume":
        return loaded  # the run's own config has them
    if loaded.config.init_from != "scratch":
        raise UsageError(
            "--recipe modern is a model of its own, and init_from brings another", fix="leave one of them out"
        )
    typed = {key for key, source in loaded.sources.items() if source == COMMAND_LINE}
    data = _data_size(loaded.config)
    keys = modern_keys(loaded.config, set(loaded.sources) - typed, typed, data)
    config = TrainConfig.unchecked(**{**loaded.config.as_dict(), **keys})
    lines = [f"recipe modern: {', '.join(f'{key} = {value!r}' for key, value in keys.items())}"]
    if (times := epochs(config, data)) > MANY_EPOCHS:
        lines.append(
            f"recipe modern: {times:.1f} epochs of this data, so its weight decay, dropout and order are for many"
        )
    sources = loaded.sources | dict.fromkeys(keys, "recipe")
    return with_portable(replace(loaded, config=config, sources=sources, notes=(*loaded.notes, *lines)))


def _data_size(config: TrainConfig) -> DataSize:
    """Of the data, where it is there to be read."""
    folder = data_folder(config.dataset, config.data_root)
    if not folder.is_dir():
        return DataSize()
    info = read_dataset(folder)
    tokens = info.train.tokens if info.train else None
    return DataSize(info.model_vocab_size, tokens, info.has_documents and config.sampling == "epoch")


# What other trainers call things that have another name here.
OTHER_WORDS = {
    "resume": "--init_from=resume (with --out_dir, or the run's config)",
    "lr": "--learning_rate=VALUE",
    "steps": "--max_iters=VALUE",
    "iters": "--max_iters=VALUE",
    "hours": "--max_hours=VALUE",
    "context": "--block_size=VALUE",
}


def _refuse_strangers(args: argparse.Namespace) -> None:
    """Options that are none, with the one that was meant; a key without a value."""
    for word in args.overrides:
        option = word.partition("=")[0]
        if meant := OTHER_WORDS.get(option.removeprefix("--")):
            raise UsageError(f"{option}: no such option or key", fix=f"use {meant}")
        close = difflib.get_close_matches(option, args.options, n=1, cutoff=0.8)
        if close and option.removeprefix("--") not in KEYS:
            raise UsageError(f"{option}: no such option or key", fix=f"did you mean {close[0]}?")
        if word.startswith("--") and "=" not in word:
            raise UsageError(f"{word}: give a value as {word}=VALUE")


def config_lines(loaded: Loaded) -> list[str]:
    """What the run changes from nanoGPT's defaults and where it was said, one line per key, notes first."""
    lines = list(loaded.notes)
    for key, source in loaded.sources.items():
        if source == COMMAND_LINE:
            lines.append(f"Overriding: {key} = {getattr(loaded.config, key)}")
    return lines


def dataset_json(info: DatasetInfo) -> dict[str, Any]:
    """A prepared folder with stable names."""

    def split(found: Split | None) -> dict[str, Any] | None:
        if found is None:
            return None
        files = [str(file) for file in found.files]
        counted = {} if found.counted is None else {"counted": found.counted}
        sizes = {"tokens": found.tokens, "documents": found.documents, "text_bytes": found.text_bytes}
        return {**sizes, **counted, "files": files}

    return {
        "folder": str(info.folder),
        "tokenizer": info.tokenizer,
        "vocab_size": info.vocab_size,
        "dtype": info.dtype,
        **({"chat": info.chat} if info.chat else {}),
        "bytes_per_token": info.bytes_per_token,
        "train": split(info.train),
        "val": split(info.val),
    }


def print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def console() -> Console:
    """A rich console; plain when piped, and wide unless COLUMNS says how wide, so that tables are not cut for `grep`."""
    from rich.console import Console

    class Screen(Console):
        """rich would end the program with exit code 1 when the reader (head, less) goes away; that is no failure."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    colors: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"  # https://no-color.org
    if sys.stdout.isatty():
        return Screen(highlight=False, color_system=colors)
    return Screen(
        highlight=False, width=_columns() or PIPED_WIDTH, color_system=colors, file=cast(IO[str], Trimmed(sys.stdout))
    )


def is_unbroken() -> bool:
    """Whether a sentence stays on one line: in a pipe, for `grep`, unless COLUMNS says how wide it is."""
    return not sys.stdout.isatty() and not _columns()


def wrapped(line: str, indent: int) -> str:
    """Broken between words at the screen's width, the rest `indent` columns in; a `command` stays whole where it can.

    What begins with "next: " is a command to paste and is never broken.
    """
    if is_unbroken() or line.startswith("next: "):
        return line
    width = shutil.get_terminal_size().columns
    room = max(1, width - indent)
    words = re.sub(r"`[^`]*`", lambda m: m[0].replace(" ", GLUE) if len(m[0]) <= room else m[0], line)
    rest = " " * indent
    return fill(words, width, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False).replace(GLUE, " ")


def _columns() -> int:
    """As the environment says; 0 where it does not."""
    columns = os.environ.get("COLUMNS", "")
    return min(int(columns[:9]), MOST_COLUMNS) if columns.isdecimal() else 0


class Trimmed:
    """A text stream whose lines have no blanks at their end; tables are filled up with them to their width."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(re.sub(r" +(?=\n)", "", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def check_new_config(path: Path) -> None:
    """Before the work: a config is written as a new .py file, never over another."""
    if path.suffix != ".py":
        raise UsageError(f"--write {path}: a config file ends in .py")
    if path.exists():
        raise ConfigError(f"{path}: exists already", fix="name a new file or remove it")


def write_config(
    path: Path, config: TrainConfig, title: str, notes: Sequence[str], vocab_size: int | None = None
) -> None:
    write_config_text(path, render(config, title, notes, vocab_size))


def write_config_text(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})", fix="choose another place") from None
