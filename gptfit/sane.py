"""Values from files that somebody may have been sent: right type, sane size, before anything is built from them.

Each function returns the value or raises a ValueError that says what it is and what it should be.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

MOST_LAYERS = 10_000
MOST_SIDE = 10**7  # layers, heads, width, context, vocabulary of a model that a log names
MOST_WIDTH = 10**6
MOST_POSITIONS = 10**8
MOST_TOKENS = 10**8  # entries of a vocabulary
MOST_STEPS = 2**53


def integer(value: Any, what: str, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{what} is {short(value)}, not a whole number from {low:,} to {high:,}")
    return value


def number(value: Any, what: str, low: float = -math.inf, high: float = math.inf) -> float:
    """Also infinity, which stands for `none yet` in places; never NaN."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(
            f"{what} is {short(value)}, not a number" + (f" from {low:g} to {high:g}" if low > -1e300 else "")
        )
    return float(value)


def text(value: Any, what: str, most: int = 10_000) -> str:
    if not isinstance(value, str) or len(value) > most:
        raise ValueError(f"{what} is {short(value)}, not a text of at most {most:,} letters")
    return value


def choice(value: Any, what: str, allowed: Collection[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{what} is {short(value)}, not one of {', '.join(allowed)}")
    return value


def flag(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{what} is {short(value)}, not True or False")
    return value


def mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{what} is {short(value)}, not names with values")
    return dict(value)


def sequence(value: Any, what: str, most: int) -> list[Any]:
    if not isinstance(value, list | tuple) or len(value) > most:
        raise ValueError(f"{what} is {short(value)}, not a list of at most {most:,}")
    return list(value)


def are_sides(sides: Sequence[Any], n_layer: Any) -> bool:
    """Whether these are whole numbers of a model's inventory: that of a million layers would take all memory."""
    return all(type(side) is int and 1 <= side <= MOST_SIDE for side in sides) and n_layer <= MOST_LAYERS


def model_sizes(sizes: Mapping[str, Any], n_tensors: int, n_bytes: int) -> None:
    """A model's sizes as far as a file can hold it: no more layers than tensors, no more weights than bytes."""
    n_layer = integer(sizes.get("n_layer"), "n_layer", 1, min(MOST_LAYERS, max(1, n_tensors)))
    n_embd = integer(sizes.get("n_embd"), "n_embd", 1, MOST_WIDTH)
    n_head = integer(sizes.get("n_head"), "n_head", 1, n_embd)
    block_size = integer(sizes.get("block_size"), "block_size", 1, MOST_POSITIONS)
    vocab_size = integer(sizes.get("vocab_size"), "vocab_size", 1, MOST_TOKENS)
    if n_embd % n_head:
        raise ValueError(f"n_embd {n_embd} is not a multiple of n_head {n_head}")
    least = n_layer * 8 * n_embd * n_embd + vocab_size * n_embd  # of any block we know, in weights of a byte or more
    if least > n_bytes:
        raise ValueError(
            f"{n_layer} layers x {n_embd} with {vocab_size:,} tokens is more than the file's {n_bytes:,} bytes"
        )
    del block_size  # positions may be computed and not stored


def short(value: Any) -> str:
    """A value as part of a line, however large it is."""
    if isinstance(value, int | float | str | bool) or value is None:
        return repr(value)[:60] if not isinstance(value, int) or abs(value) < 10**40 else "a number of many digits"
    return f"a {type(value).__name__}"
