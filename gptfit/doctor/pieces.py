"""The pieces of a training step, each timed by itself on this device at a few sizes."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gptfit.config.keys import TrainConfig
from gptfit.device.device import Device
from gptfit.model.build import build_model
from gptfit.model.head import token_loss
from gptfit.model.rotary import rotary_tables
from gptfit.plan.calibration import WEIGHT_FLOPS, BlockCost, block_weights
from gptfit.plan.grid import Grid, grid_of
from gptfit.schedule import Knobs
from gptfit.shape import ModelShape
from gptfit.train.engine import Engine, build_engine

TOKENS = (64, 256, 1024, 2048)
WIDTHS = (128, 256, 512, 768)
POSITIONS = (128, 256, 512, 1024)
HEAD_SIZES = (32, 64, 128)
ATTENTION_TOKENS, ATTENTION_HEADS = 2048, 4
HEAD_TOKENS = {"whole": (128, 1024), "chunked": (1024,)}
HEAD_WIDTHS = (128, 768)
VOCABULARIES = {"whole": (256, 4096, 16384, 50304), "chunked": (4096, 50304)}
# (micro-batch, positions, width) of the blocks that are timed whole, the largest last.
BLOCKS = ((1, 64, 128), (1, 256, 256), (1, 256, 768), (4, 256, 384), (16, 128, 192), (12, 256, 384))
BLOCK_LAYERS = 2
OUTSIDE = ((1, 64, 128), (4, 256, 384), (12, 256, 384))
LOOKUPS = ((257, 128), (50304, 128), (50304, 768))
LOOKUP_TOKENS = 64
WEIGHTS = ((128, 1), (256, 4), (512, 12))  # (width, layers)
UPDATES = ((128, 1, 64), (512, 4, 64), (512, 1, 50304))  # (width, layers, vocabulary)

BUDGET_S = 0.12  # per piece; more where one run takes longer
MOST = 40
FEWEST = ((0.1, 5), (0.3, 3), (1.0, 2))  # runs of what takes less than so long; one of what takes longer
# What would take longer is not run: a number format without units of its own may be a hundred times slower.
LONGEST_S = 1.0
LEAST_SHARE = 0.2  # of an eager block's small operations that a compiled one takes at least
# Of the bytes that an eager block keeps in 16 bits; counted where such blocks are fast enough to be compiled and run.
COMPILED_KEEPS = {"gpt2": 0.94, "modern": 0.80}
CACHE_BYTES = 96 * 2**20  # more than the caches of most processors

MUON_LAYERS = 2
UPDATE_RUNS = 4  # the first of which makes the optimizer's state
FIT_ROUNDS = 2000

Size = tuple[int, int, int]  # micro-batch, positions, width
Clock = Callable[[], float]
Points = dict[tuple[float, ...], float]


def seconds_of(action: Callable[[], object], device: Device, clock: Clock = time.perf_counter) -> float:
    """One call, warm: the best of a few, as the first ones also fetch memory and others only add to it."""
    times = [_timed(action, device, clock)]
    fewest = next((runs for below, runs in FEWEST if times[0] < below), 1)
    while len(times) < fewest or (sum(times) < BUDGET_S and len(times) < MOST):
        times.append(_timed(action, device, clock))
    return min(times)


@dataclass(frozen=True)
class Sum:
    """Seconds that so many units of each kind took together, and by how much they may be wrong."""

    amounts: tuple[float, ...]
    seconds: float
    error: float


def fitted(sums: Sequence[Sum]) -> list[float]:
    """What a unit of each kind takes, never less than nothing, so that the sums are missed by least for their errors.

    >>> [round(cost, 6) for cost in fitted([Sum((1, 2), 8, 1), Sum((1, 4), 14, 1), Sum((2, 1), 7, 1)])]
    [2.0, 3.0]
    """
    costs = [0.0] * len(sums[0].amounts)
    rows = [([amount / each.error for amount in each.amounts], each.seconds / each.error) for each in sums]
    for _ in range(FIT_ROUNDS):  # coordinate descent: a few unknowns, and it keeps them from going below zero
        for i in range(len(costs)):
            left = [t - sum(x * c for j, (x, c) in enumerate(zip(a, costs, strict=True)) if j != i) for a, t in rows]
            size = sum(a[i] ** 2 for a, _ in rows)
            costs[i] = max(0.0, sum(a[i] * t for (a, _), t in zip(rows, left, strict=True)) / size) if size else 0.0
    return costs


def _timed(action: Callable[[], object], device: Device, clock: Clock) -> float:
    began = clock()
    action()
    device.synchronize()
    return clock() - began


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


def _distance(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    return sum(abs(math.log(a / b)) for a, b in zip(one, other, strict=True))


class Ruler:
    """Times pieces on one device, in one number format at a time."""

    def __init__(self, device: Device, clock: Clock = time.perf_counter) -> None:
        self.device, self.clock = device, clock
        self.generator = torch.Generator().manual_seed(0)

    def seconds(self, action: Callable[[], object]) -> float:
        return seconds_of(action, self.device, self.clock)

    def points(
        self, places: Iterable[tuple[float, ...]], work: Callable[..., float], seconds: Callable[..., float]
    ) -> Points:
        """Seconds per unit of work at each place, the little work first; what would take too long costs what is next to it."""
        found: Points = {}
        for place in sorted(places, key=lambda place: work(*place)):
            near = min(found, key=lambda other: _distance(other, place), default=None)
            is_long = near is not None and found[near] * work(*place) > LONGEST_S
            found[place] = found[near] if near is not None and is_long else seconds(*place) / work(*place)
        return found

    def random(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*size, generator=self.generator).to(dtype).to(self.device.torch_device)

    def ids(self, vocab_size: int, *size: int) -> Tensor:
        return torch.randint(vocab_size, size, generator=self.generator).to(self.device.torch_device)

    # Matrix products

    def products(self) -> Grid:
        """The twelve products of a block: each matrix forward, and backward for its input and for itself."""
        places = itertools.product(TOKENS, WIDTHS)
        return grid_of(self.points(places, lambda n, c: 12 * WEIGHT_FLOPS * n * c**2, self._block_products))

    def _block_products(self, tokens: int, width: int) -> float:
        return sum(
            self._product(tokens, rows * width, columns * width) for rows, columns in ((3, 1), (1, 1), (4, 1), (1, 4))
        )

    def _product(self, tokens: int, rows: int, columns: int) -> float:
        dtype = self.device.torch_dtype
        x, weight = self.random(tokens, columns, dtype=dtype), self.random(rows, columns, dtype=dtype)
        gradient = self.random(tokens, rows, dtype=dtype)

        def forward_and_backward() -> None:
            torch.mm(x, weight.t())
            torch.mm(gradient, weight)
            torch.mm(gradient.t(), x)

        return self.seconds(forward_and_backward)

    def attention(self) -> Grid:
        """Per token, channel and position."""
        places = itertools.product(POSITIONS, HEAD_SIZES)
        work = ATTENTION_TOKENS * ATTENTION_HEADS
        return grid_of(self.points(places, lambda t, size: work * size * t, self._attention))

    def _attention(self, positions: int, head_size: int) -> float:
        batch, heads, dtype = ATTENTION_TOKENS // positions, ATTENTION_HEADS, self.device.torch_dtype
        joined = self.random(batch, positions, 3 * heads * head_size, dtype=dtype).requires_grad_()
        gradient = self.random(batch, heads, positions, head_size, dtype=dtype)

        def forward_and_backward() -> None:
            q, k, v = (
                part.view(batch, positions, heads, head_size).transpose(1, 2)
                for part in joined.detach().requires_grad_().chunk(3, dim=2)
            )
            F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(gradient)  # type: ignore[no-untyped-call]

        return self.seconds(forward_and_backward)

    # Weights

    def weights(self) -> Grid:
        """Each micro-step casts every weight to the run's format and adds to its gradient."""
        points: Points = {}
        for width, layers in WEIGHTS:
            matrices = [self.random(4 * width, width) for _ in range(3 * layers)]
            points[(12.0 * layers * width**2,)] = self._weights(matrices) / (12.0 * layers * width**2)
        return grid_of(points)

    def _weights(self, matrices: Sequence[Tensor]) -> float:
        dtype = self.device.torch_dtype
        fresh = [torch.ones_like(weight, dtype=dtype) for weight in matrices]
        gradients = [torch.zeros_like(weight) for weight in matrices]

        def copy_and_add() -> None:
            for weight, new, gradient in zip(matrices, fresh, gradients, strict=True):
                weight.to(dtype)
                gradient.add_(new.float())

        return self.seconds(copy_and_add)

    def lookup(self) -> Grid:
        return grid_of({(float(v * c),): self._lookup(v, c) / (v * c) for v, c in LOOKUPS})

    def _lookup(self, vocab_size: int, width: int) -> float:
        table = nn.Embedding(vocab_size, width).to(self.device.torch_device)
        ids, gradient = self.ids(vocab_size, 1, LOOKUP_TOKENS), self.random(1, LOOKUP_TOKENS, width)
        return self.seconds(lambda: table(ids).backward(gradient))

    # The loss

    def head(self, kind: str) -> Grid:
        """Per token, vocabulary entry and channel."""
        places = itertools.product(HEAD_TOKENS[kind], HEAD_WIDTHS, VOCABULARIES[kind])
        seconds = functools.partial(self._head, kind)
        return grid_of(self.points(places, lambda n, c, v: n * c * v, seconds))

    def _head(self, kind: str, tokens: int, width: int, vocab_size: int) -> float:
        weight = self.random(vocab_size, width).mul_(0.02).requires_grad_()
        hidden, targets = self.random(tokens, width).requires_grad_(), self.ids(vocab_size, tokens)

        def forward_and_backward() -> None:
            with self.device.autocast():
                loss = token_loss(hidden, weight, targets, tokens if kind == "chunked" else 0)
            loss.backward()  # type: ignore[no-untyped-call]

        return self.seconds(forward_and_backward)

    # Whole blocks

    def blocks(self, arch: str, known: Mapping[str, Grid]) -> BlockCost:
        """Two measurements are subtracted; a fixed cost, one per channel and one per weight leave their noise out."""
        sums, saved = [], 0.0
        for size in self._short_enough(BLOCKS, known):
            shape, channels = self._block_shape(arch, size), math.prod(size)
            seconds, kept = self._block(shape, size[0], False)
            amounts = (1.0, float(channels), block_weights(shape) / shape.n_layer)
            sums.append(Sum(amounts, seconds - self._accounted(shape, size[0], known), error=seconds))
            saved = kept / channels
        fixed, per_channel, per_weight = fitted(sums)
        return BlockCost(fixed, per_channel, per_weight, saved)

    def compiled_blocks(self, arch: str, known: Mapping[str, Grid], eager: BlockCost) -> BlockCost:
        """Compiling takes too long for every size: at the largest, what it saves or adds; small ones a tiny model tells."""
        size = self._short_enough(BLOCKS, known)[-1]
        shape, channels = self._block_shape(arch, size), math.prod(size)
        if size != BLOCKS[-1]:  # so slow that nobody would run it: what it keeps is known well enough
            return replace(eager, saved_bytes=eager.saved_bytes * COMPILED_KEEPS[arch])
        before, _ = self._block(shape, size[0], False)
        seconds, saved = self._block(shape, size[0], True)
        slope = eager.per_channel_s + (seconds - before) / channels
        return replace(eager, per_channel_s=max(slope, LEAST_SHARE * eager.per_channel_s), saved_bytes=saved / channels)

    def _short_enough(self, sizes: Sequence[Size], known: Mapping[str, Grid]) -> list[Size]:
        """The sizes whose products take no longer than they may, at least the first."""
        products = known[f"products {self.device.dtype}"]

        def seconds(batch: int, positions: int, width: int) -> float:
            n = batch * positions
            return BLOCK_LAYERS * 12 * WEIGHT_FLOPS * n * width**2 * products.at(n, width)

        return [size for size in sizes if size == sizes[0] or seconds(*size) < LONGEST_S]

    def _block_shape(self, arch: str, size: Size) -> ModelShape:
        _, positions, width = size
        return ModelShape(BLOCK_LAYERS, max(1, width // 64), width, positions, 64, arch=arch)

    def outside(self, arch: str) -> Grid:
        """Per token and channel, what a model does besides its blocks, its loss and its large tables."""
        return grid_of({(float(math.prod(size)),): self._outside(arch, size) / math.prod(size) for size in OUTSIDE})

    def _outside(self, arch: str, size: Size) -> float:
        model = build_model(self._block_shape(arch, size)).to(self.device.torch_device)
        model.transformer["h"] = nn.ModuleList()
        ids, gradient = self.ids(64, *size[:2]), self.random(*size)

        def forward_and_backward() -> None:
            with self.device.autocast():
                hidden = model.hidden(ids)
            hidden.backward(gradient.to(hidden.dtype))  # type: ignore[no-untyped-call]

        return self.seconds(forward_and_backward)

    def _accounted(self, shape: ModelShape, batch: int, known: Mapping[str, Grid]) -> float:
        """Seconds per layer of what is in the other grids."""
        n, c, dtype = batch * shape.block_size, shape.n_embd, self.device.dtype
        products = 12 * WEIGHT_FLOPS * n * c**2 * known[f"products {dtype}"].at(n, c)
        attention = n * c * shape.block_size * known[f"attention {dtype}"].at(shape.block_size, c / shape.n_head)
        weights = block_weights(shape)
        return products + attention + weights / shape.n_layer * known[f"weights {dtype}"].at(weights)

    def _block(self, shape: ModelShape, batch: int, compiled: bool) -> tuple[float, float]:
        """(seconds, bytes kept for backward) of one block, forward and backward."""
        model = build_model(shape).to(self.device.torch_device)
        blocks = list(model.transformer["h"].children())
        if compiled:
            torch.compiler.reset()
            for block in blocks:
                block.compile(dynamic=False)
        size = (batch, shape.block_size, shape.n_embd)
        x, gradient = self.random(*size), self.random(*size)
        tables = rotary_tables(0, shape.block_size, shape.n_embd // shape.n_head, self.device.torch_device)
        extra = (None, tables) if shape.arch == "modern" else ()

        def forward() -> Tensor:
            y = x.detach().requires_grad_()
            with self.device.autocast():
                for block in blocks:
                    y = block(y, *extra)
            return y

        y = forward()
        copies = 0 if self.device.dtype == "float32" else 2 * block_weights(shape)  # in 16 bits, counted elsewhere
        saved = saved_bytes(y, model.parameters()) - copies
        y.backward(gradient)  # type: ignore[no-untyped-call]
        seconds = self.seconds(lambda: forward().backward(gradient))  # type: ignore[no-untyped-call]
        return seconds / shape.n_layer, saved / shape.n_layer

    # The update

    def update(self) -> Grid:
        points: Points = {}
        for width, layers, vocab_size in UPDATES:
            engine = self._engine(width, layers, vocab_size, "gpt2", "adamw")
            weights = engine.model.shape.n_weights
            points[(float(weights),)] = self._update(engine) / weights
        return grid_of(points)

    def orthogonal(self, adamw: Grid) -> Grid:
        """Muon's own work per matrix weight and channel: the whole update less what AdamW does for the rest."""

        def seconds(width: int) -> float:
            engine = self._engine(width, MUON_LAYERS, 64, "modern", "muon")
            others = engine.model.shape.n_weights - block_weights(engine.model.shape)
            return max(self._update(engine) - others * adamw.at(others), 1e-6)

        return grid_of(self.points([(w,) for w in WIDTHS], lambda w: 12 * MUON_LAYERS * w**3, seconds))

    def _engine(self, width: int, layers: int, vocab_size: int, arch: str, optimizer: str) -> Engine:
        shape = ModelShape(layers, max(1, width // 64), width, 64, vocab_size, arch=arch)
        config = TrainConfig(
            n_layer=layers,
            n_head=shape.n_head,
            n_embd=width,
            block_size=64,
            batch_size=1,
            arch=arch,
            optimizer=optimizer,
            dtype=self.device.dtype,
            device=self.device.kind,
            compile=False,
        )
        return build_engine(config, shape, self.device)

    def _update(self, engine: Engine) -> float:
        """As an update comes: after micro-steps that filled the caches, with gradients too small to be clipped."""
        loss = torch.zeros((), device=self.device.torch_device)
        seconds: list[float] = []
        while len(seconds) < UPDATE_RUNS and (len(seconds) < 2 or seconds[-1] < LONGEST_S):
            for parameter in engine.model.parameters():
                parameter.grad = torch.full_like(parameter, 1e-6)
            torch.ones(CACHE_BYTES // 4, device=self.device.torch_device)
            self.device.synchronize()
            seconds.append(_timed(lambda: engine.update(loss, 1, Knobs(1e-5)), self.device, self.clock))
        return min(seconds)
