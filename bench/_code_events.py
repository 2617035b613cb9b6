"""Inductor's generated `call` as tensors that come and go, run against an allocator."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod

from _allocator import CachingAllocator, Piece

BYTES = {"float32": 4, "bfloat16": 2, "int64": 8, "int32": 4, "uint64": 8, "bool": 1, "int8": 1}
SIZES = r"\(([\d, ]*)\)"
FLASH = r"torch\.ops\.aten\._scaled_dot_product_flash_attention"
FOUR_SIZES = r"\((\d+), (\d+), (\d+), (\d+)\)"


class Reference:
    """A tensor under as many names as the code gives it; given back with the last."""

    def __init__(self, memory: CachingAllocator, n_bytes: float) -> None:
        self.memory, self.piece, self.names = memory, memory.take(n_bytes), 1

    def another(self) -> Reference:
        self.names += 1
        return self

    def forget(self) -> None:
        self.names -= 1
        if not self.names:
            self.memory.give_back(self.piece)


Named = dict[str, "Reference | list[Reference | None]"]


class GeneratedCode:
    """One module of Inductor's: `run` takes references over and returns those of its results."""

    def __init__(self, source: str) -> None:
        text = source[source.index("def call(self, args):") :]
        self.lines = [line.strip() for line in text.splitlines()[1:]]
        arguments = next(line for line in self.lines if line.endswith("= args"))
        self.arguments = [word.strip() for word in arguments.removesuffix("= args").split(",") if word.strip()]

    def run(self, memory: CachingAllocator, inputs: list[Reference]) -> list[Reference]:
        names: Named = dict(zip(self.arguments, inputs, strict=True))
        for line in self.lines:
            if line.startswith("return "):
                return _returned(line, names)
            for pattern, action in ACTIONS:
                if match := re.match(pattern, line):
                    action(memory, names, match)
                    break
        raise AssertionError("the code returns nothing")


def _returned(line: str, names: Named) -> list[Reference]:
    words = re.findall(r"(?<![\w.])(?:buf|primals_|workspace_)\d+", re.sub(r"reinterpret_tensor\((\w+),", r"\1,", line))
    results = []
    for word in words:
        found = names[word]
        assert isinstance(found, Reference)
        results.append(found.another())
    for left in names.values():
        _forget(left)
    return results


def _forget(found: Reference | list[Reference | None]) -> None:
    for each in found if isinstance(found, list) else [found]:
        if each is not None:
            each.forget()


def _new(memory: CachingAllocator, names: Named, match: re.Match[str]) -> None:
    sizes = [int(word) for word in match[2].split(",") if word.strip()]
    names[match[1]] = Reference(memory, prod(sizes) * BYTES[match[3]])


def _renamed(memory: CachingAllocator, names: Named, match: re.Match[str]) -> None:
    names[match[1]] = names.pop(match[2])


def _view(memory: CachingAllocator, names: Named, match: re.Match[str]) -> None:
    found = names[match[2]]
    assert isinstance(found, Reference)
    names[match[1]] = found.another()


def _deleted(memory: CachingAllocator, names: Named, match: re.Match[str]) -> None:
    _forget(names.pop(match[1]))


def _item(memory: CachingAllocator, names: Named, match: re.Match[str]) -> None:
    found = names[match[2]]
    assert isinstance(found, list)
    one = found[int(match[3])]
    assert one is not None
    names[match[1]] = one.another()


def _flash(memory: CachingAllocator, names: Named, match: re.Match[str]) -> None:
    """The result, its sums of the softmax, and a seed and offset for dropout."""
    batch, heads, tokens, size = (int(match[i]) for i in range(2, 6))
    rows = batch * heads * tokens
    seed = [Reference(memory, 16), Reference(memory, 8)]
    names[match[1]] = [Reference(memory, 2 * rows * size), Reference(memory, 4 * rows), *[None] * 4, *seed]


def _flash_backward(memory: CachingAllocator, names: Named, match: re.Match[str]) -> None:
    """Three gradients; meanwhile a number per row and the queries' gradient in float32."""
    batch, heads, tokens, size = (int(match[i]) for i in range(2, 6))
    rows = batch * heads * tokens
    sums = memory.take(4 * rows)
    gradients: list[Reference | None] = [Reference(memory, 2 * rows * size) for _ in range(3)]
    names[match[1]] = gradients
    wide = memory.take(4 * rows * size)
    memory.give_back(sums, wide)


Action = Callable[[CachingAllocator, Named, "re.Match[str]"], None]
ACTIONS: list[tuple[str, Action]] = [
    (rf"(\w+) = empty_strided_cuda\({SIZES}, \(.*?\), torch\.(\w+)\)", _new),
    (r"(\w+) = workspace_\d+\[.*\.view\(\d+, (\d+)\)\.sum\(dim=0\)\.view\(\[\d+\]\)()", lambda m, n, found: n.update({found[1]: Reference(m, 4 * int(found[2]))})),
    (r"(\w+) = .*; del (\w+)", _renamed),
    (r"(\w+) = reinterpret_tensor\((\w+),.*# alias", _view),
    (rf"(\w+) = {FLASH}\.default\(.*?{FOUR_SIZES}", _flash),
    (rf"(\w+) = {FLASH}_backward\.default\(.*?{FOUR_SIZES}", _flash_backward),
    (r"(\w+) = (\w+)\[(\d+)\]$", _item),
    (r"del (\w+)", _deleted),
]  # fmt: skip


def replay_code(
    sources: list[str], weights: list[tuple[str, list[int]]], returns_logits: bool, workspace_bytes: int
) -> CachingAllocator:
    """Two updates of two micro-steps with AdamW, as bench/_lifetimes.py replays them."""
    memory = CachingAllocator()
    memory.take(workspace_bytes)
    forward, backward = map(GeneratedCode, sources)
    inputs = [Reference(memory, 4 * prod(sizes)) for _, sizes in weights]
    inputs += [
        Reference(memory, 8) for _ in range(len(forward.arguments) - len(inputs))
    ]  # the tokens are counted nowhere
    state: list[Piece] = []
    held: list[Reference] = []
    for _ in range(2):
        gradients: list[Reference] = []
        for _ in range(2):
            results = forward.run(memory, [each.another() for each in inputs])
            outputs, saved = results[: 1 + returns_logits], results[1 + returns_logits :]
            for each in held:
                each.forget()
            held = outputs
            tangents = [Reference(memory, each.piece.size) for each in outputs]
            new = backward.run(memory, saved + tangents)
            if gradients:
                for each in new:
                    each.forget()
            else:
                gradients = new
        state = state or [memory.take(4 * prod(sizes)) for _, sizes in weights for _ in range(2)]
        for each in gradients:
            each.forget()
    return memory
