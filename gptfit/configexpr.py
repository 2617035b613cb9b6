"""Evaluates the arithmetic a config file may contain, with bounds, so that no line can run code or hang."""

from __future__ import annotations

import ast
import operator
import time
from collections.abc import Callable, Mapping
from typing import Any

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
