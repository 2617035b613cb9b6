"""`gptfit keys`: what each config key means, takes and affects."""

from __future__ import annotations

import argparse
import difflib

from gptfit.config.key import Key
from gptfit.config.key_words import as_json, describe, key_lines, markdown
from gptfit.config.keys import GROUPS, KEYS
from gptfit.errors import UsageError
from gptfit.verbs.common import print_json

HELP = "What each config key means, takes and affects."
EXAMPLES = ("gptfit keys chunked_loss",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="keys, or a group such as machine (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON with stable names")
    parser.add_argument("--markdown", action="store_true", help="print docs/keys.md")


def run(args: argparse.Namespace) -> int:
    named = [key for name in args.names for key in _find(name)]
    if args.markdown:
        print(markdown(), end="")
    elif args.json:
        print_json([as_json(key) for key in named or KEYS.values()])
    elif named:
        print("\n\n".join("\n".join(describe(key)) for key in named))
    else:
        print("\n".join(key_lines()).lstrip("\n"))
        print("\n* gptfit's own; `gptfit keys NAME` says more")
    return 0


def _find(name: str) -> tuple[Key, ...]:
    plain = name.lstrip("-").partition("=")[0]
    if plain in KEYS:
        return (KEYS[plain],)
    if plain in GROUPS:
        return GROUPS[plain]
    close = difflib.get_close_matches(plain, [*KEYS, *GROUPS], n=1)
    raise UsageError(f"{name} is not a key", fix=f"did you mean {close[0]}?" if close else "`gptfit keys` lists them")
