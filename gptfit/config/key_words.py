"""What is known about the config keys, in words: for --help, `gptfit keys` and docs/keys.md."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from gptfit.config.key import Key
from gptfit.config.keys import GROUPS

WIDTH = 80  # columns of a terminal
ON_RESUME = {
    "frozen": "cannot change when a run is resumed",
    "replan": "may change when a run is resumed, which is said then",
    "free": "may change when a run is resumed",
    "anew": "belongs to a start, not to the run: a resume does not take it over",
}
TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "True or False",
    "str": "text",
}


def key_lines() -> Iterator[str]:
    """Every key with its default and meaning, group by group, in 80 columns."""
    for group, keys in GROUPS.items():
        yield f"\n{group}"
        for key in keys:
            name = f"  {key.name}={key.default}{'' if key.nanogpt else ' *'}"
            yield from textwrap.wrap(key.meaning, WIDTH, initial_indent=f"{name:<32} ", subsequent_indent=" " * 33)


def describe(key: Key) -> list[str]:
    """One key, each fact on a line."""
    return [
        f"{key.name} = {key.default!r}",
        *textwrap.wrap(key.meaning, WIDTH, initial_indent="  ", subsequent_indent="  "),
        f"  takes: {takes(key)}",
        f"  affects: {', '.join(key.affects) or 'nothing that is learnt or timed'}",
        f"  on resume: {ON_RESUME[key.on_resume]}",
        *([f"  only with {key.needs[0]} = {key.needs[1]!r}"] if key.needs else []),
        *([f"  portable = True makes it {key.portable!r}"] if key.portable is not None else []),
        *(["  `gptfit tune --also` can vary it"] if key.tunable else []),
        f"  {nanogpt_words(key)}",
    ]


def takes(key: Key) -> str:
    if key.choices:
        return ", ".join(repr(choice) for choice in key.choices)
    return key.within.words if key.within else TYPES[key.type]


def nanogpt_words(key: Key) -> str:
    return "a key of nanoGPT" if key.nanogpt else "gptfit only: stock nanoGPT ignores it in a config file"


def as_json(key: Key) -> dict[str, Any]:
    return {
        "name": key.name,
        "default": key.default,
        "meaning": key.meaning,
        "group": key.group,
        "takes": takes(key),
        "choices": list(key.choices),
        "affects": list(key.affects),
        "on_resume": key.on_resume,
        "needs": dict([key.needs]) if key.needs else None,
        "tunable": key.tunable,
        "nanogpt": key.nanogpt,
    }


def markdown() -> str:
    """docs/keys.md, which is written by `gptfit keys --markdown`."""
    lines = [INTRODUCTION]
    for group, keys in GROUPS.items():
        lines += [
            f"## {group}",
            "",
            "| key | default | meaning | takes | affects | on resume |",
            "|---|---|---|---|---|---|",
        ]
        lines += [_row(key) for key in keys] + [""]
    return "\n".join(lines).rstrip("\n") + "\n"


INTRODUCTION = """# Keys

Every key of a config file or of the command line (`--key=value`), written by `gptfit keys --markdown`;
`gptfit keys NAME` prints one. A key with * is gptfit's own: stock nanoGPT ignores it in a config file and refuses it
on its command line. All others have nanoGPT's name, meaning and default.

*affects*: what another value can change. *on resume*: **frozen** keys cannot change when a run is resumed, **replan**
keys may and the run says so, **free** ones may, and those said **anew** belong to a start and are not taken over.
"""


def _row(key: Key) -> str:
    name = f"`{key.name}`" if key.nanogpt else f"`{key.name}` *"
    only = f" (only with `{key.needs[0]} = {key.needs[1]!r}`)" if key.needs else ""
    cells = [name, f"`{key.default!r}`", key.meaning + only, takes(key), ", ".join(key.affects) or "-", key.on_resume]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
