"""The command line: finds the verb, runs it, and turns every expected failure into one line and an exit code."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from gptfit import __version__
from gptfit.errors import GptfitError, UsageError

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
    "sample": "text from a checkpoint",
    "eval": "exact validation loss and known benchmarks",
    "export": "to Hugging Face, GGUF or nanoGPT",
    "doctor": "check this machine: device, torch, compiler, disk, data",
    "gpus": "the table of known GPUs",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: done. 1: bad input or a problem, said in one line. 2: the command line itself is wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except GptfitError as error:
        print(f"gptfit: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("gptfit: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) went away; python would complain again while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # A full disk under a file is a GptfitError by now; this one has no name: it is what stdout is piped into.
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print("gptfit: cannot write the output: no space left; free some and run it again", file=sys.stderr)
        return 1


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"gptfit {__version__}")
        return 0
    if words[0] not in available_verbs():
        hint = _suggestion(words[0], available_verbs())
        raise UsageError(f"{words[0]!r} is not a verb{hint}; `gptfit --help` lists them")
    verb = import_module(f"gptfit.verbs.{words[0]}")
    parser = Parser(prog=f"gptfit {words[0]}", description=verb.HELP, allow_abbrev=False)
    verb.add_arguments(parser)
    args, rest = parser.parse_known_args(words[1:])
    if rest and not hasattr(args, "overrides"):
        hint = _suggestion(rest[0].partition("=")[0], parser.options())
        raise UsageError(f"{rest[0]} is not an option of `gptfit {words[0]}`{hint}; see `gptfit {words[0]} --help`")
    if hasattr(args, "overrides"):
        args.overrides, args.options = rest, parser.options()
    return int(verb.run(args))


def available_verbs() -> list[str]:
    """Those whose file is there, in the order of the journey."""
    folder = os.path.join(os.path.dirname(__file__), "verbs")
    return [verb for verb in VERBS if os.path.exists(os.path.join(folder, f"{verb}.py"))]


class Parser(argparse.ArgumentParser):
    """argparse, but a usage error is one line like every other error."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")

    def options(self) -> list[str]:
        return list(self._option_string_actions)


def _overview() -> str:
    rows = "\n".join(f"  {verb:<11} {VERBS[verb]}" for verb in available_verbs())
    return (
        "gptfit: fit a GPT to your GPU.\n\n"
        f"usage: gptfit VERB [CONFIG.py] [--key=value ...]\n\n{rows}\n\n"
        "`gptfit VERB --help` describes a verb. Start with `gptfit quickstart`."
    )


def _suggestion(word: str, known: Sequence[str]) -> str:
    import difflib

    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
