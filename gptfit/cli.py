"""The command line: finds the verb, runs it, and turns every expected failure into one line and an exit code."""

from __future__ import annotations

import argparse
import gc
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

from gptfit import __version__
from gptfit.screen import let_go_of_stdout, make_streams_safe
from gptfit.threads import wait_a_moment_only

HELP_WIDTH = 78  # columns
# What a start loads is no garbage: looking through it at every 700 new objects, Python's way, is a tenth of its time.
OBJECTS_BEFORE_COLLECTING = 50_000
# The verbs in the order of the journey. The module of a verb is imported only when it is used.
VERBS: dict[str, str] = {
    "quickstart": "the whole journey on this machine, with no download and no GPU",
    "prepare": "Parquet (or text) -> train.bin and val.bin",
    "inspect": "describe a Parquet file or a prepared folder",
    "tokenizer": "train a BPE vocabulary of your own",
    "plan": "what a config will do on a GPU, before it runs",
    "propose": "find the config that fits your GPU, data and hours",
    "tune": "find the micro-batch sweet spot on the real device",
    "train": "train a GPT; nanoGPT's configs and keys",
    "compare": "two or more runs: which is better, and why",
    "watch": "a live page of the runs in a folder",
    "runs": "the runs in a folder as a table or JSON",
    "sample": "text from a checkpoint",
    "chat": "talk with a run",
    "eval": "exact validation loss and known benchmarks",
    "export": "to Hugging Face, GGUF or nanoGPT",
    "doctor": "check this machine: device, torch, compiler, disk, data",
    "gpus": "the table of known GPUs",
    "configs": "ready config files to begin with",
    "keys": "what each config key means, takes and affects",
    "completion": "the Tab key: a script for bash, zsh or fish",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: done. 1: bad input, a wrong command line or a problem, said in one line.

    130 and 143: stopped by Ctrl-C or SIGTERM, so that `gptfit train && gptfit export` does not go on.
    """
    make_streams_safe()
    wait_a_moment_only()
    words = list(sys.argv[1:] if argv is None else argv)
    _speak_any_language()
    gc.set_threshold(OBJECTS_BEFORE_COLLECTING)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except BaseException as error:  # noqa: BLE001 - what has no words here is raised again
        return _say_what_failed(error)


def _say_what_failed(failed: BaseException) -> int:
    """Imported only now: `gptfit --help` needs no words for failures."""
    from gptfit.errors import GptfitError, exit_code
    from gptfit.files import cannot_write, reason_of, remedy_of
    from gptfit.install import missing_library

    try:
        raise failed
    except GptfitError as error:
        return _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        if (missing := missing_library(error)) is None:
            raise
        return _fail(str(missing), missing.exit_code)
    except KeyboardInterrupt as stopped:
        return _fail("stopped", exit_code(stopped))
    except BrokenPipeError:
        let_go_of_stdout()  # the reader (head, less) went away
        return 0
    except OSError as error:
        # A disk error that no caller put into words; without a file name it concerns what stdout is piped into.
        if error.filename is not None:
            return _fail(cannot_write(error), 1)
        let_go_of_stdout()
        return _fail(f"cannot write the output: {reason_of(error).lower()}; {remedy_of(error)}", 1)
    except UnicodeEncodeError as error:
        return _fail(f"{error.object[:80]!a}: a name that is not UTF-8 cannot be used; rename it", 1)
    except MemoryError:
        return _fail("out of memory; close other programs, or ask for less at once", 1)
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        return _fail("the system allows no more threads; close other programs, or raise `ulimit -u`", 1)


def _fail(line: str, code: int) -> int:
    with suppress(OSError, ValueError):  # stderr may be as full as the rest of the disk
        print(f"gptfit: {line}", file=sys.stderr, flush=True)
    return code


def _speak_any_language() -> None:
    """Windows gives a pipe or file the old code page, which has no letter for most of what a model may say."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors="replace")


def _dispatch(words: list[str]) -> int:
    if words[0:1] == ["help"] and len(words) > 1:
        words = [words[1], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"gptfit {__version__}")
        return 0
    if words[0] not in available_verbs():
        meant = _suggestion(words[0], available_verbs())
        raise _usage_error(f"{words[0]!r} is not a verb", fix=meant or "`gptfit --help` lists them")
    _check_folder()
    parser = parser_of(words[0])
    keys, own = _keys_apart(parser, words[1:])
    args, rest = parser.parse_known_args(own)
    rest = keys + rest
    if rest and not hasattr(args, "overrides"):
        meant = _suggestion(rest[0].partition("=")[0], parser.options())
        message = f"{rest[0]} is not an option of `gptfit {words[0]}`"
        raise _usage_error(message, fix=meant or f"see `gptfit {words[0]} --help`")
    if hasattr(args, "overrides"):
        args.overrides, args.options = rest, parser.options()
    return int(import_module(f"gptfit.verbs.{words[0]}").run(args))


def _check_folder() -> None:
    """Libraries end the program without a word of ours where the folder it was started in is gone."""
    try:
        os.getcwd()
    except FileNotFoundError:
        from gptfit.errors import RunError

        raise RunError("the folder you are in has been deleted", fix="cd to another one") from None


def _keys_apart(parser: Parser, words: list[str]) -> tuple[list[str], list[str]]:
    """`--key=value` or `--key value` of a config, and the rest: argparse would take such a value for a file."""
    if parser.get_default("overrides") is None:
        return [], words
    from gptfit.config.keys import KEYS

    keys: list[str] = []
    rest: list[str] = []
    waiting = list(reversed(words))
    while waiting:
        word = waiting.pop()
        option = word.partition("=")[0]
        if not word.startswith("--") or option in parser.options():
            rest.append(word)
        elif "=" in word:
            keys.append(word)
        elif option.removeprefix("--") in KEYS and waiting and not waiting[-1].startswith("--"):
            keys.append(f"{word}={waiting.pop()}")
        else:
            rest.append(word)
    return keys, rest


def available_verbs() -> list[str]:
    """Those whose file is there, in the order of the journey."""
    folder = os.path.join(os.path.dirname(__file__), "verbs")
    return [verb for verb in VERBS if os.path.exists(os.path.join(folder, f"{verb}.py"))]


def parser_of(name: str) -> Parser:
    """A verb's options, its help with examples; the verb is imported for it."""
    from textwrap import fill  # late: `gptfit --help` needs no verb's words

    verb = import_module(f"gptfit.verbs.{name}")
    examples = "\n".join(f"  {example}" for example in verb.EXAMPLES)
    parser = Parser(
        prog=f"gptfit {name}",
        description=f"{fill(verb.HELP, HELP_WIDTH)}\n\nfor example:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # which leaves examples and keys in their columns
        allow_abbrev=False,
    )
    verb.add_arguments(parser)
    return parser


class Parser(argparse.ArgumentParser):
    """argparse, but a usage error is one line like every other error."""

    def error(self, message: str) -> NoReturn:
        raise _usage_error(message, fix=f"see `{self.prog} --help`")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """argparse names every choice; a misspelt one is first of all told which was meant."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        name = "/".join(action.option_strings) or action.metavar or action.dest
        meant = _suggestion(str(value), choices)
        raise _usage_error(f"{name} {value}: no such choice", fix=meant or f"choose from {', '.join(choices)}")

    def options(self) -> list[str]:
        return list(self._option_string_actions)


def _usage_error(message: str, fix: str) -> Exception:
    from gptfit.errors import UsageError

    return UsageError(message, fix=fix)


def _overview() -> str:
    rows = "\n".join(f"  {verb:<11} {VERBS[verb]}" for verb in available_verbs())
    return (
        "gptfit: fit a GPT to your GPU.\n\n"
        f"usage: gptfit VERB [CONFIG.py] [--key=value ...]\n\n{rows}\n\n"
        "`gptfit VERB --help` describes a verb. Start with `gptfit quickstart`, or with\n"
        "text of your own: `gptfit inspect FILE.parquet`. Every command says what to\n"
        "type next."
    )


def _suggestion(word: str, known: Sequence[str]) -> str:
    import difflib

    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else ""
