"""The pieces of a training step, each timed on this device at a few sizes, as training meets them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gptfit.device.device import Device
from gptfit.device.settling import Action
from gptfit.doctor.rounds import Costs, CostsOfTwoWidths, Place, Prepared, Rounds, Timed, Watch, Yardstick
from gptfit.doctor.whole_models import plain_engine
from gptfit.model.build import build_model
from gptfit.model.head import token_loss
from gptfit.model.modern import NO_VALUES
from gptfit.model.rotary import rotary_tables
from gptfit.plan.calibration import block_weights
from gptfit.plan.grid import Grid, grid_of
from gptfit.schedule import Knobs
from gptfit.shape import ModelShape

TOKENS = (64, 256, 1024, 4096)  # more cost as much each, and take long
WIDTHS = (128, 256, 448, 768)
BLOCK_POSITIONS, BLOCK_HEAD = 128, 64
# A block finds nothing of its own in the caches when so many bytes of others came between.
COLD_BYTES = 64 * 2**20
MOST_LAYERS = 6
POSITIONS = (128, 256, 512, 1024)
HEAD_SIZES = (32, 64, 128)
ATTENTION_TOKENS, ATTENTION_HEADS = 1024, 4
HEAD_TOKENS = {"whole": (128, 512, 2048), "chunked": (512,)}
HEAD_WIDTHS = (128, 384)
VOCABULARIES = {"whole": (256, 8192, 50304), "chunked": (4096, 50304)}
OUTSIDE = ((1, 64, 128), (4, 256, 384), (16, 256, 384))  # micro-batch, positions, width
LOOKUPS = ((257, 128), (50304, 128), (50304, 768))
LOOKUP_TOKENS = 64
UPDATES = ((128, 1, 64), (512, 4, 64), (512, 1, 50304))  # (width, layers, vocabulary)
MUON_WIDTHS = (128, 256, 512, 768)

# A large vocabulary leaves the caches, which no smaller one tells. So do this many logits; more fetch memory for seconds.
LONGEST_HEAD_S, MOST_LOGITS = 0.7, 2**24
CACHE_BYTES = 96 * 2**20  # more than the caches of most processors

YARDSTICK_SIDE = 384
MUON_LAYERS = 2

Size = tuple[int, int, int]  # micro-batch, positions, width


def saved_bytes(result: Tensor, parameters: Iterable[Tensor]) -> int:
    """Of every tensor that the graph behind `result` keeps, each storage once, the parameters not."""
    own = {p.untyped_storage().data_ptr() for p in parameters}
    kept: dict[int, int] = {}
    seen: set[Any] = set()
    waiting: list[Any] = [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for tensor in _saved_by(node):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
        waiting += [after for after, _ in node.next_functions]
    return sum(kept.values())


def _saved_by(node: Any) -> list[Tensor]:
    if hasattr(node, "saved_tensors"):  # a function of our own, or compiled code
        return [tensor for tensor in node.saved_tensors if isinstance(tensor, Tensor)]
    values = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    return [value for value in values if isinstance(value, Tensor)]


def block_shape(arch: str, tokens: int, width: int, layers: int) -> ModelShape:
    return ModelShape(layers, max(1, width // BLOCK_HEAD), width, min(tokens, BLOCK_POSITIONS), 64, arch=arch)


def yardstick_of(device: Device) -> Yardstick | None:
    """A small product, whose matrices stay in the caches of a core. A card has a clock of its own and is nobody else's."""
    if device.kind != "cpu":
        return None
    matrix = torch.randn(YARDSTICK_SIDE, YARDSTICK_SIDE, generator=torch.Generator().manual_seed(0))
    watch = Watch(device)
    return Yardstick(lambda: watch.seconds(lambda: torch.mm(matrix, matrix)))


def few(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The least, the middle and the largest.

    >>> few((64, 256, 1024, 4096)), few((4096, 50304)), few((512,))
    ((64, 256, 4096), (4096, 50304), (512,))
    """
    return tuple(dict.fromkeys((sizes[0], sizes[(len(sizes) - 1) // 2], sizes[-1])))


class Ruler:
    """Times pieces on one device, in one number format; at fewer sizes where hardly anyone trains in it."""

    def __init__(self, device: Device, yardstick: Yardstick | None = None, is_seldom: bool = False) -> None:
        self.sizes: Callable[[tuple[int, ...]], tuple[int, ...]] = few if is_seldom else lambda sizes: sizes
        self.device, self.watch = device, Watch(device, yardstick=yardstick)
        self.rounds = Rounds(self.watch)
        self.generator = torch.Generator().manual_seed(0)

    def random(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*size, generator=self.generator).to(dtype).to(self.device.torch_device)

    def ids(self, vocab_size: int, *size: int) -> Tensor:
        return torch.randint(vocab_size, size, generator=self.generator).to(self.device.torch_device)

    # Blocks

    def blocks(self) -> Costs:
        """Of gpt2, eager: seconds per token and weight."""

        def work(tokens: int, width: int) -> float:
            return self.layers(tokens, width) * tokens * 12 * width**2

        places = itertools.product(*map(self.sizes, (TOKENS, WIDTHS)))
        return self.rounds.costs(places, work, lambda n, c: self._stack("gpt2", n, c))

    def layers(self, tokens: float, width: float) -> int:
        """As many blocks as a micro-step meets cold: the activations they keep, their weights and gradients."""
        return min(MOST_LAYERS, math.ceil(COLD_BYTES / (64 * tokens * width + 96 * width**2)))

    def other_block(self, arch: str, place: Place, usual: Timed) -> Timed:
        """Of another architecture, beside the usual one of the same size."""
        tokens, width = map(int, place)
        return self.rounds.timed(self._stack(arch, tokens, width), usual)

    def kept(self, arch: str, tokens: int, width: int, compiled: bool) -> float:
        """Bytes kept for backward per token and channel of a block."""
        shape = block_shape(arch, tokens, width, 1)
        forward, model = self._blocks(shape, tokens, compiled)
        copies = 0 if self.device.dtype == "float32" else 2 * block_weights(shape)  # in 16 bits, counted elsewhere
        return (saved_bytes(forward(), model.parameters()) - copies) / (tokens * width)

    def _stack(self, arch: str, tokens: int, width: int) -> Action:
        forward, _ = self._blocks(block_shape(arch, tokens, width, self.layers(tokens, width)), tokens, False)
        gradient = self.random(tokens, width).view(-1, min(tokens, BLOCK_POSITIONS), width)
        return lambda: forward().backward(gradient)  # type: ignore[no-untyped-call]

    def _blocks(self, shape: ModelShape, tokens: int, compiled: bool) -> tuple[Callable[[], Tensor], nn.Module]:
        model = build_model(shape).to(self.device.torch_device)
        blocks = list(model.transformer["h"].children())
        if compiled:
            for block in blocks:
                block.compile(dynamic=False)
        x = self.random(tokens // shape.block_size, shape.block_size, shape.n_embd)
        tables = rotary_tables(0, shape.block_size, shape.n_embd // shape.n_head, self.device.torch_device)
        extra = (None, NO_VALUES, tables) if shape.arch == "modern" else ()

        def forward() -> Tensor:
            y = x.detach().requires_grad_()
            with self.device.autocast():
                for block in blocks:
                    y = block(y, *extra)
            return y

        return forward, model

    def attention(self) -> Costs:
        """Per token, channel and position."""
        places, work = itertools.product(*map(self.sizes, (POSITIONS, HEAD_SIZES))), ATTENTION_TOKENS * ATTENTION_HEADS
        return self.rounds.costs(places, lambda t, size: work * size * t, self._attention)

    def _attention(self, positions: int, head_size: int) -> Action:
        batch, heads, dtype = ATTENTION_TOKENS // positions, ATTENTION_HEADS, self.device.torch_dtype
        joined = self.random(batch, positions, 3 * heads * head_size, dtype=dtype).requires_grad_()
        gradient = self.random(batch, heads, positions, head_size, dtype=dtype)

        def forward_and_backward() -> None:
            q, k, v = (
                part.view(batch, positions, heads, head_size).transpose(1, 2)
                for part in joined.detach().requires_grad_().chunk(3, dim=2)
            )
            F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(gradient)  # type: ignore[no-untyped-call]

        return forward_and_backward

    # The loss, and what is in no block

    def head(self, kind: str) -> Costs:
        """Per token, vocabulary entry and channel."""
        return self.rounds.costs(
            itertools.product(*map(self.sizes, (HEAD_TOKENS[kind], HEAD_WIDTHS, VOCABULARIES[kind]))),
            lambda n, c, v: n * c * v,
            functools.partial(self._head, kind),
            CostsOfTwoWidths,
            LONGEST_HEAD_S,
            lambda n, c, v: n * v <= MOST_LOGITS,
        )

    def _head(self, kind: str, tokens: int, width: int, vocab_size: int) -> Action:
        weight = self.random(vocab_size, width).mul_(0.02).requires_grad_()
        hidden, targets = self.random(tokens, width).requires_grad_(), self.ids(vocab_size, tokens)

        def forward_and_backward() -> None:
            with self.device.autocast():
                loss = token_loss(hidden, weight, targets, tokens if kind == "chunked" else 0)
            loss.backward()  # type: ignore[no-untyped-call]

        return forward_and_backward

    def lookup(self) -> Costs:
        """Per weight of a table."""
        tables = {(float(v * c),): (v, c) for v, c in LOOKUPS}
        return self.rounds.costs(tables, lambda weights: weights, lambda weights: self._lookup(*tables[(weights,)]))

    def _lookup(self, vocab_size: int, width: int) -> Action:
        table = nn.Embedding(vocab_size, width).to(self.device.torch_device)
        ids, gradient = self.ids(vocab_size, 1, LOOKUP_TOKENS), self.random(1, LOOKUP_TOKENS, width)
        return lambda: table(ids).backward(gradient)

    def outside(self, arch: str) -> Costs:
        """Per token and channel, what a model does besides its blocks, its loss and its large tables."""
        sizes = {(float(math.prod(size)),): size for size in OUTSIDE}
        return self.rounds.costs(
            sizes, lambda channels: channels, lambda channels: self._outside(arch, sizes[(channels,)])
        )

    def _outside(self, arch: str, size: Size) -> Action:
        batch, positions, width = size
        model = build_model(ModelShape(1, width // BLOCK_HEAD, width, positions, 64, arch=arch))
        model = model.to(self.device.torch_device)
        model.transformer["h"] = nn.ModuleList()
        ids, gradient = self.ids(64, batch, positions), self.random(*size)

        def forward_and_backward() -> None:
            with self.device.autocast():
                hidden = model.hidden(ids)
            hidden.backward(gradient.to(hidden.dtype))  # type: ignore[no-untyped-call]

        return forward_and_backward

    # The update

    def update(self) -> Costs:
        """AdamW's, per weight."""
        shapes = [ModelShape(layers, width // BLOCK_HEAD, width, 64, vocab) for width, layers, vocab in UPDATES]
        by_weights = {(float(shape.n_weights),): shape for shape in shapes}
        return self.rounds.costs(
            by_weights, lambda weights: weights, lambda weights: self._update(by_weights[(weights,)], "adamw")
        )

    def orthogonal(self) -> Orthogonal:
        """Muon's update of a model with little else than matrices, by width."""

        def work(width: float) -> float:
            return block_weights(_muon_shape(int(width))) * width

        widths = [(width,) for width in MUON_WIDTHS]
        return self.rounds.costs(widths, work, lambda width: self._update(_muon_shape(width), "muon"), Orthogonal)

    def _update(self, shape: ModelShape, optimizer: str) -> Prepared:
        """As an update comes: after micro-steps that filled the caches, with gradients too small to be clipped."""
        engine = plain_engine(self.device, shape, optimizer)
        loss = torch.zeros((), device=self.device.torch_device)

        def micro_steps() -> None:
            for parameter in engine.model.parameters():
                parameter.grad = torch.full_like(parameter, 1e-6)
            torch.ones(CACHE_BYTES // 4, device=self.device.torch_device)
            self.device.synchronize()

        def update() -> None:
            engine.update(loss, 1, Knobs(1e-5))

        micro_steps()
        update()  # a first one makes the optimizer's state
        return Prepared(update, micro_steps)


def _muon_shape(width: int) -> ModelShape:
    return ModelShape(MUON_LAYERS, width // BLOCK_HEAD, width, 64, 64, arch="modern")


class Orthogonal(Costs):
    """Muon's own work per matrix weight and channel: the whole update less what AdamW does for the rest."""

    def grid_beside(self, adamw: Grid) -> Grid:
        points: dict[Place, float] = {}
        for (width,), cost in self.points().items():
            shape = _muon_shape(int(width))
            work, others = self._work(width), shape.n_weights - block_weights(shape)
            points[(width,)] = max(cost * work - others * adamw.at(others), 1e-6) / work
        return grid_of(points)
