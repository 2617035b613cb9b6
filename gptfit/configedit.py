"""Changes keys in a config file's text and leaves every other character, comments included, as it was."""

from __future__ import annotations

import ast
from collections.abc import Mapping


def set_keys(text: str, values: Mapping[str, object], remark: str = "") -> str:
    """The text with these keys set, in place where they stand, else at the end below a comment line.

    A key that another line computes with is set at the end too, so that the other line keeps its value.

    >>> set_keys("batch_size = 12  # as it fits\\n", {"batch_size": 8})
    'batch_size = 8  # as it fits\\n'
    """
    module = ast.parse(text)
    in_place = {key: node for key in values if (node := _last_value(module, key)) and not _is_used(module, key, values)}
    edited = _replace(text, {node: values[key] for key, node in in_place.items()})
    at_end = [f"{key} = {value!r}" for key, value in values.items() if key not in in_place]
    if not at_end:
        return edited
    heading = [f"# {remark}"] if remark else []
    return edited.rstrip("\n") + "\n\n" + "\n".join([*heading, *at_end]) + "\n"


def _last_value(module: ast.Module, key: str) -> ast.expr | None:
    """The expression of the assignment that counts: the last one."""
    found: ast.expr | None = None
    for node in module.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == key for t in node.targets):
            found = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == key:
            found = node.value or found
    return found


def _is_used(module: ast.Module, key: str, changing: Mapping[str, object]) -> bool:
    """Whether a line computes with this key; lines of keys that change as well do not count."""
    for node in module.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if all(isinstance(target, ast.Name) and target.id in changing for target in targets):
            continue
        if any(isinstance(part, ast.Name) and part.id == key for part in ast.walk(node.value)):
            return True
    return False


def _replace(text: str, changes: Mapping[ast.expr, object]) -> str:
    """Each expression by its new value, last first so that earlier places stay valid. ast counts bytes."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    raw = text.encode()
    for node in sorted(changes, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        raw = raw[:begin] + repr(changes[node]).encode() + raw[end:]
    return raw.decode()
