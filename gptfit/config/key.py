"""Key: everything there is to know about one config key, and the function that declares one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal

from gptfit.errors import Level, Problem

Effect = Literal["speed", "memory", "loss"]
# frozen: the saved tensors depend on it, a resume refuses another value. replan: may change, and the resume says so.
# free: changes no number that matters. anew: says what this start is to do, never taken over from the checkpoint.
OnResume = Literal["frozen", "replan", "free", "anew"]


@dataclass(frozen=True)
class Range:
    """Numbers a key takes."""

    holds: Callable[[Any], bool]
    words: str


SANE_SIZE = 10**9  # far above any real model; beyond it arithmetic stops making sense
COUNT = Range(lambda v: 1 <= v <= SANE_SIZE, f"a whole number from 1 to {SANE_SIZE:,}")
AMOUNT = Range(lambda v: 0 <= v < 2**63, "0 or more, below 2^63")
FRACTION = Range(lambda v: 0 <= v < 1, "a number from 0 up to but not including 1")
SHARES = Range(
    lambda v: v in ("auto", "equal") or re.fullmatch(r"\d*[1-9]\d*(:\d*[1-9]\d*)+", str(v)) is not None,
    "auto, equal, or one whole number for each process: 2:1",
)
SHARE = Range(lambda v: 0 < v <= 1, "a number above 0, up to 1")


@dataclass(frozen=True)
class Key:
    """One key of a config. Everything that treats keys differently asks here, so a new key is declared once."""

    name: str
    type: str  # the annotation as written: 'int', 'str | bool'
    default: Any
    meaning: str
    group: str
    choices: tuple[object, ...] = ()  # empty: anything of its type within its range
    within: Range | None = None
    affects: tuple[Effect, ...] = ()  # empty: only where things are written, how often, when the run ends
    on_resume: OnResume = "replan"
    tunable: bool = False  # whether `tune --also` may vary it
    nanogpt: bool = False  # whether stock nanoGPT reads it
    needs: tuple[str, object] | None = None  # it does nothing unless this other key has this value
    idle: Level = "warning"  # how bad it is when the key is set all the same
    portable: object = None  # the value that `portable = True` needs; None: any
    ignored: str = ""  # why nanoGPT's key is read and nothing is done with it
    always_written: bool = False  # shown in a written config even at its default

    def problem(self, values: Mapping[str, Any]) -> Problem | None:
        """What is wrong with this key's value alone."""
        value = values[self.name]
        # Types are compared too: 1 == True must not pass for a boolean choice.
        if self.choices and not any(value == choice and type(value) is type(choice) for choice in self.choices):
            names = ", ".join(str(choice) for choice in self.choices)
            return Problem("error", self.name, f"{self.name} = {value!r} is not known", f"use one of {names}")
        if self.within and not self.within.holds(value):
            return Problem("error", self.name, f"{self.name} = {value!r} is out of range", f"use {self.within.words}")
        return None

    def idle_problem(self, values: Mapping[str, Any]) -> Problem | None:
        """The key is set and would do nothing."""
        if values[self.name] == self.default:
            return None
        if self.ignored:
            message = f"{self.name} = {values[self.name]!r} is not used: {self.ignored}"
            return Problem("warning", self.name, message, f"nothing needs to change; {self.name} may be left out")
        if self.needs is None:
            return None
        other, wanted = self.needs
        if values[other] == wanted:
            return None
        message = f"{self.name} = {values[self.name]!r} needs {other} = {wanted!r}"
        return Problem(self.idle, self.name, message, f"set that, or leave {self.name} out")

    def portable_problem(self, values: Mapping[str, Any]) -> Problem | None:
        """The key asks for something that no other program computes, and `portable` says that one shall."""
        is_wanted = values["portable"] and values["arch"] == "modern" and self.portable is not None
        if not is_wanted or values[self.name] == self.portable:
            return None
        message = f"{self.name} = {values[self.name]!r} is nothing llama.cpp can compute, and portable = True"
        return Problem("error", self.name, message, f"use {self.name} = {self.portable!r}, or leave portable out")


def key(default: Any, meaning: str, **facts: Any) -> Any:
    """A dataclass field that carries what is known about the key it is; `facts` are the fields of Key."""
    return field(default=default, metadata={"meaning": meaning, **facts})


def keys_of(config: type) -> dict[str, Key]:
    """The table of a config class's keys, in the order they are written there."""
    return {found.name: _key_of(found) for found in fields(config)}


def _key_of(found: Field[Any]) -> Key:
    return Key(name=found.name, type=str(found.type), default=found.default, **found.metadata)
