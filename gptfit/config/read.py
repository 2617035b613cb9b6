"""Reads nanoGPT-style config files with `ast`, never executing them, and `--key=value` overrides."""

from __future__ import annotations

import ast
import difflib
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gptfit.config.keys import DEFAULTS, KEYS, PORTABLE, TrainConfig
from gptfit.errors import ConfigError, UsageError
from gptfit.files import read_plain, reason_of

LARGEST_FILE = 1_000_000  # bytes; a config is a page of text, so anything larger is the wrong file
COMMAND_LINE = "command line"
UNASKED = ("recipe", "portable", "init_from")  # sources of keys that follow from another


@dataclass(frozen=True)
class Loaded:
    """A config, where each changed key came from, and remarks that stop nothing."""

    config: TrainConfig
    sources: dict[str, str] = field(default_factory=dict)  # key -> "file:line", "command line", UNASKED
    notes: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()  # the files as written, for checks that read comments


@dataclass(frozen=True)
class ConfigFile:
    """One file's assignments to known keys."""

    values: dict[str, Any]
    sources: dict[str, str]
    notes: tuple[str, ...]
    text: str


def load_config(paths: Sequence[str | Path], overrides: Iterable[str] = ()) -> Loaded:
    """Defaults < files in order < overrides, and it can start."""
    return checked(read_config(paths, overrides))


def read_config(paths: Sequence[str | Path], overrides: Iterable[str] = ()) -> Loaded:
    """The same as it stands, even if it cannot start."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    notes: list[str] = []
    texts: list[str] = []
    for path in paths:
        file = read_config_file(path)
        values |= file.values
        sources |= file.sources
        notes += file.notes
        texts.append(file.text)
    for override in overrides:
        key, value = parse_override(override)
        values[key] = value
        sources[key] = COMMAND_LINE
    return with_portable(Loaded(TrainConfig.unchecked(**values), sources, tuple(notes), tuple(texts)))


def with_portable(loaded: Loaded) -> Loaded:
    """Without what `portable = True` leaves out.

    What a file asks for gives way to a `portable` on the command line; where both are in the same place, the check says
    that they clash.
    """
    config, sources = loaded.config, loaded.sources
    if not config.portable or config.arch != "modern":
        return loaded
    is_typed = sources["portable"] == COMMAND_LINE
    asked = {key for key in PORTABLE if sources.get(key) not in (None, *UNASKED)}
    kept = {key for key in asked if not is_typed or sources[key] == COMMAND_LINE}
    changes = {key: value for key, value in PORTABLE.items() if key not in kept and getattr(config, key) != value}
    notes = [f"{sources[key]}: {key} is left out, for portable = True" for key in changes if key in asked]
    if quiet := [f"{key} = {value!r}" for key, value in changes.items() if key not in asked]:
        notes.append(f"portable = True: {', '.join(quiet)}")
    changed = TrainConfig.unchecked(**config.as_dict() | changes)
    sources = sources | dict.fromkeys(changes, "portable")
    return replace(loaded, config=changed, sources=sources, notes=(*loaded.notes, *notes))


def checked(loaded: Loaded) -> Loaded:
    """The same, if it can start; else the first reason why not, with the line that said so."""
    for found in loaded.config.problems():
        raise ConfigError(found.message, where=loaded.sources.get(found.where, ""), fix=found.fix, key=found.where)
    return loaded


def read_config_file(path: str | Path) -> ConfigFile:
    """Top-level `name = expression` lines; docstrings and imports are tolerated, anything else is an error."""
    text = _read_text(Path(path))
    names: dict[str, Any] = {}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    notes: list[str] = []
    module = _parse(text, path)
    for node in module.body:
        where = f"{path}:{node.lineno}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            notes.append(f"{where}: import ignored; config files are read, not run")
        elif _is_docstring(node):
            continue
        else:
            name, value = _assignment(node, names, where)
            names[name] = value
            if name in KEYS:
                if name in values:
                    notes.append(f"{where}: {name} is set again; the last value counts (was {sources[name]})")
                values[name] = coerce(name, value, where)
                sources[name] = where
    _refuse_strangers(module, path)
    return ConfigFile(values, sources, tuple(notes), text)


def parse_override(override: str) -> tuple[str, Any]:
    """`--key=value`, the value read as a literal where it is one, else as text, as nanoGPT does."""
    body = override.removeprefix("--")
    key, equals, text = body.partition("=")
    if not override.startswith("--") or not equals:
        raise UsageError(f"{override}: give a value as --{body.strip('-')}=VALUE")
    if key not in KEYS:
        raise ConfigError(f"--{key} is not a key{_suggestion(key)}", key=key)
    value = _literal(text)
    if KEYS[key].type == "str" and value is not None and not isinstance(value, str):
        value = text  # a run may be called 123
    return key, coerce(key, value, f"--{body}")


def coerce(key: str, value: object, where: str) -> Any:
    """The value in the key's type, or one line that says what the key takes."""
    if value is None and key != "seed" and DEFAULTS[key] in (0, "", False):
        return DEFAULTS[key]  # None as "off", where the default is "off"
    spoken, convert = _KINDS[KEYS[key].type]
    converted = convert(value)
    if converted is None:
        shown = repr(value) if len(repr(value)) <= 40 else repr(value)[:37] + "..."
        raise ConfigError(f"{where}: {key} takes {spoken}, not {shown}", key=key)
    return converted


def _whole(value: object) -> int | None:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)  # max_iters = 6e5 is what people write
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e308 else None


def _yes_or_no(value: object) -> bool | None:
    if type(value) is int and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return value if isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _text_or_yes_or_no(value: object) -> str | bool | None:
    decided = _yes_or_no(value)
    return _text(value) if decided is None else decided


# A field's annotation -> what an error calls it, and the conversion (None: cannot be).
_KINDS: dict[str, tuple[str, Callable[[object], Any]]] = {
    "int": ("a whole number", _whole),
    "float": ("a number", _number),
    "bool": ("True or False", _yes_or_no),
    "str": ("text", _text),
    "str | bool": ("'auto', True or False", _text_or_yes_or_no),
}


def _read_text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if path.is_dir():
            raise ConfigError(f"{path}: is a folder", fix=f"name a config file such as {path / 'train_gpt2.py'}")
        if size > LARGEST_FILE:
            raise ConfigError(f"{path}: {size:,} bytes is too large for a config file", fix="is it the right file?")
        return read_plain(path, LARGEST_FILE).decode("utf-8-sig").replace("\r\n", "\n")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file{_similar_files(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})", fix="is it a config file?") from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({reason_of(error)})", fix="check the name and permissions"
        ) from None


def _similar_files(path: Path) -> str:
    try:
        names = sorted(p.name for p in path.parent.glob("*.py"))
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else "; check the path"


def _parse(text: str, path: str | Path) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno or 1}: not valid Python ({error.msg})", fix="fix the line") from None
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error) or "nested too deeply"
        raise ConfigError(f"{path}: cannot be parsed ({reason})", fix="write plain `key = value` lines") from None


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _assignment(node: ast.stmt, names: dict[str, Any], where: str) -> tuple[str, Any]:
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target, expression = node.targets[0], node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        target, expression = node.target, node.value
    else:
        raise ConfigError(f"{where}: only `key = value` lines are read, and code is never run", fix="remove this line")
    if not isinstance(target, ast.Name):
        raise ConfigError(f"{where}: assign to one plain name, as in `batch_size = 8`")
    try:
        return target.id, evaluate(expression, {**DEFAULTS, **names})
    except NotAllowed as error:
        raise ConfigError(f"{where}: {target.id}: {error}") from None


def _refuse_strangers(module: ast.Module, path: str | Path) -> None:
    """A name that is no key is fine when another line uses it; otherwise it is a misspelt key."""
    names = [node for node in ast.walk(module) if isinstance(node, ast.Name)]
    used = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    for node in names:
        if isinstance(node.ctx, ast.Store) and node.id not in KEYS and node.id not in used:
            message = f"{path}:{node.lineno}: {node.id} is not a key{_suggestion(node.id)}"
            raise ConfigError(message, key=node.id)


def _suggestion(key: str) -> str:
    squashed = {name.replace("_", ""): name for name in KEYS}
    plain = key.replace("_", "").replace("-", "").lower()
    close = [squashed[plain]] if plain in squashed else difflib.get_close_matches(key.lower(), KEYS, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else "; `gptfit train --help` lists the keys"


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return text


LARGEST_NUMBER = 2**63  # nothing in a config is larger
LONGEST_TEXT = 10_000
DEEPEST = 100


class NotAllowed(Exception):
    """The expression is more than a config may say."""


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}


def evaluate(node: ast.expr, names: Mapping[str, Any], depth: int = 0) -> Any:
    """Literals, earlier names, + - * / // % ** on bounded numbers, text joined with +."""
    if depth > DEEPEST:
        raise NotAllowed("nested too deeply; write a plain value")
    if isinstance(node, ast.Constant):
        return _bounded(node.value)
    if isinstance(node, ast.Name):
        if node.id not in names:
            raise NotAllowed(f"{node.id} is not defined above; assign it first")
        return names[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _apply(_UNARY[type(node.op)], evaluate(node.operand, names, depth + 1))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left = evaluate(node.left, names, depth + 1)
        right = evaluate(node.right, names, depth + 1)
        _refuse_growth(node.op, left, right)
        return _apply(_BINARY[type(node.op)], left, right)
    if isinstance(node, ast.Call):
        return _bounded(_known_call(node, names, depth))
    raise NotAllowed(f"{_spoken(node)} is not read from a config, and code is never run; write a plain value")


def _known_call(node: ast.Call, names: Mapping[str, Any], depth: int) -> Any:
    """The two calls nanoGPT's own configs make, in `'ft-' + str(time.time())`; none other."""
    called = ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""
    if called == "time.time" and not node.args and not node.keywords:
        return time.time()
    if called == "str" and len(node.args) == 1 and not node.keywords:
        return str(evaluate(node.args[0], names, depth + 1))
    raise NotAllowed(f"{_spoken(node)} is not read from a config, and code is never run; write a plain value")


def _apply(function: Callable[..., Any], *operands: Any) -> Any:
    for operand in operands:
        if not isinstance(operand, int | float | str):
            raise NotAllowed(f"cannot calculate with {operand!r}")
    try:
        return _bounded(function(*operands))
    except (TypeError, ArithmeticError, ValueError) as error:
        raise NotAllowed(f"cannot be calculated ({error})") from None


def _refuse_growth(op: ast.operator, left: Any, right: Any) -> None:
    """Powers and repeats are refused before they are computed: 9**9**9 would never come back."""
    if isinstance(op, ast.Pow) and isinstance(left, int | float) and isinstance(right, int | float):
        if abs(right) > 64 or abs(left) > LARGEST_NUMBER:
            raise NotAllowed("the power is too large; write the number")
    elif not isinstance(op, ast.Add) and (isinstance(left, str) or isinstance(right, str)):
        raise NotAllowed("text can only be joined with +")


def _bounded(value: Any) -> Any:
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        raise NotAllowed("the text is too long for a config")
    if isinstance(value, int | float) and abs(value) > LARGEST_NUMBER:
        raise NotAllowed("the number is too large for a config")
    if value is not None and not isinstance(value, int | float | str | bool):
        raise NotAllowed(f"{type(value).__name__} is not a config value; use a number, text, True, False or None")
    return value


def _spoken(node: ast.expr) -> str:
    names = {"Call": "a call", "Attribute": "an attribute", "Subscript": "an index", "Lambda": "a lambda"}
    return names.get(type(node).__name__, f"this expression ({type(node).__name__})")
