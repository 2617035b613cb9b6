"""`gptfit completion SHELL`: a script that lets the Tab key finish verbs, options, config keys and card names.

The script asks `gptfit completion --words ...` each time, so it never goes out of date; only what `--help` imports is needed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from typing import Any

from gptfit.cli import VERBS, available_verbs, parser_of

HELP = "Print a script for your shell, so that the Tab key completes verbs, options, keys and cards."
EXAMPLES = ("gptfit completion bash >> ~/.bashrc", "gptfit completion fish > ~/.config/fish/completions/gptfit.fish")

BASH = """\
# gptfit's completion for bash. In ~/.bashrc: eval "$(gptfit completion bash)"
_gptfit() {
    local IFS=$'\\n'
    COMPREPLY=($("${COMP_WORDS[0]}" completion --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    if [[ ${COMPREPLY[0]-} == *= ]]; then compopt -o nospace 2>/dev/null; fi
}
complete -o default -F _gptfit gptfit
"""
ZSH = """\
#compdef gptfit
# gptfit's completion for zsh. In ~/.zshrc, after compinit: eval "$(gptfit completion zsh)"
_gptfit() {
    local -a found unfinished
    found=("${(@f)$("${words[1]}" completion --words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    found=("${(@)found:#}")
    if (( ! $#found )); then _files; return; fi
    unfinished=("${(@M)found:#*=}")
    (( $#unfinished )) && compadd -S '' -a unfinished
    found=("${(@)found:#*=}")
    (( $#found )) && compadd -a found
}
compdef _gptfit gptfit
"""
FISH = """\
# gptfit's completion for fish. Save as ~/.config/fish/completions/gptfit.fish
function __gptfit_words
    set -l words (commandline -opc) "$(commandline -ct)"
    $words[1] completion --words $words[2..] 2>/dev/null
end
complete -c gptfit -a '(__gptfit_words)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", nargs="?", choices=tuple(SCRIPTS), help="the shell the script is for")
    parser.add_argument("--words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # what the scripts ask


def run(args: argparse.Namespace) -> int:
    if args.words is not None:
        print("\n".join(candidates(args.words)))
    elif args.shell is None:
        from gptfit.errors import UsageError

        raise UsageError("which shell?", fix=f"gptfit completion {'|'.join(SCRIPTS)}")
    else:
        print(SCRIPTS[args.shell], end="")
    return 0


def candidates(words: list[str]) -> list[str]:
    """What the last of the words after `gptfit` may become; nothing where a file is meant, which shells know better."""
    *before, now = words or [""]
    if before in ([], ["help"]):
        return _beginning_with(now, available_verbs())
    if before[0] not in VERBS:
        return []
    before, now, is_split = _rejoined(before, now)
    parser = parser_of(before[0])
    option, equals, typed = now.partition("=")
    if now.startswith("-") and equals:
        return [
            f"{'' if is_split else option + '='}{value}" for value in _beginning_with(typed, _values(parser, option))
        ]
    if now.startswith("-"):
        return _beginning_with(now, [*parser.options(), *_keys(parser)])
    if before[-1].startswith("-") and _takes_value(parser, before[-1]):
        return _beginning_with(now, _values(parser, before[-1]))
    return _beginning_with(now, _positional_values(before, parser))


def _rejoined(before: list[str], now: str) -> tuple[list[str], str, bool]:
    """bash takes `--gpu=4070` for three words, and wants only the third one finished."""
    if now == "=" and len(before) > 1:
        return before[:-1], f"{before[-1]}=", True
    if len(before) > 2 and before[-1] == "=":
        return before[:-2], f"{before[-2]}={now}", True
    return before, now, False


def _beginning_with(start: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.lower().startswith(start.lower())]


def _action(parser: argparse.ArgumentParser, option: str) -> argparse.Action | None:
    return next((action for action in parser._actions if option in action.option_strings), None)


def _takes_value(parser: argparse.ArgumentParser, option: str) -> bool:
    action = _action(parser, option)
    return action.nargs != 0 if action else bool(_values(parser, option))


def _keys(parser: argparse.ArgumentParser) -> list[str]:
    """Config keys as options, where the verb takes them."""
    if parser.get_default("overrides") is None:
        return []
    from gptfit.config.keys import KEYS

    return [f"--{key}=" for key in KEYS if f"--{key}" not in parser._option_string_actions]


def _values(parser: argparse.ArgumentParser, option: str) -> list[str]:
    """What an option or a config key takes, where that is a matter of choice."""
    action = _action(parser, option)
    if option == "--gpu":
        return ["here", "cpu", *_cards()]
    if action is not None:
        return [str(choice) for choice in action.choices or ()]
    return _key_values(option.removeprefix("--")) if parser.get_default("overrides") is not None else []


def _key_values(key: str) -> list[str]:
    from gptfit.config.keys import KEYS

    if key not in KEYS:
        return []
    found: list[Any] = list(KEYS[key].choices)
    if isinstance(KEYS[key].default, bool) and not found:
        found = [True, False]
    return [str(value) for value in found]


def _positional_values(before: list[str], parser: argparse.ArgumentParser) -> list[str]:
    verb = before[0]
    if verb == "gpus":
        return _cards()
    if verb == "keys":
        from gptfit.config.keys import KEYS

        return list(KEYS)
    if verb == "configs":
        from gptfit.verbs.configs import ready_configs

        return sorted(ready_configs())
    choices = next((action.choices or () for action in parser._actions if not action.option_strings), ())
    return [] if set(choices) & set(before[1:]) else [str(choice) for choice in choices]


def _cards() -> list[str]:
    """In words a shell need not quote: `rtx-4070-12gb`, and `4070-12gb` for those who leave out the brand."""
    from gptfit.gpus import all_gpus

    names = [re.sub(r"[^a-z0-9]+", "-", gpu.name.lower().partition(" (")[0]) for gpu in all_gpus()]
    return [*names, *(name[4:] for name in names if name.startswith(("rtx-", "gtx-")))]
