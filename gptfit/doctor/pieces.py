"""The pieces of a training step, each timed by itself on this device at a few sizes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gptfit.config.keys import TrainConfig
from gptfit.device.device import Device
from gptfit.model.build import build_model
from gptfit.model.head import token_loss
from gptfit.model.rotary import rotary_tables
from gptfit.plan.calibration import WEIGHT_FLOPS, block_weights
from gptfit.plan.grid import Grid, grid_of
from gptfit.schedule import Knobs
from gptfit.shape import ModelShape
from gptfit.train.engine import Engine, build_engine

TOKENS = (64, 256, 1024, 4096)
WIDTHS = (128, 256, 512, 768)
POSITIONS = (128, 256, 512, 1024)
HEAD_SIZES = (32, 64, 128)
ATTENTION_TOKENS = 2048
HEAD_TOKENS = {"whole": (128, 1024), "chunked": (1024,)}
HEAD_WIDTHS = (128, 768)
VOCABULARIES = {"whole": (256, 4096, 50304), "chunked": (4096, 50304)}
# (micro-batch, positions, width) of the blocks that are timed whole, the largest last.
BLOCKS = ((1, 64, 128), (1, 256, 256), (4, 256, 384), (16, 256, 384))
BLOCK_LAYERS = 2
LOOKUPS = ((257, 128), (50304, 128), (50304, 768))
WEIGHTS = ((128, 1), (256, 4), (512, 12))  # (width, layers)
UPDATES = ((128, 1, 64), (512, 4, 64), (512, 1, 50304))  # (width, layers, vocabulary)

BUDGET_S = 0.12  # per piece; more where one run takes longer
FEWEST, MOST = 5, 40
LONG_S, FEWEST_LONG = 0.5, 2
LEAST_SHARE, MOST_SHARE = 0.4, 1.2  # of a compiled block's small operations, of the eager one's

Clock = Callable[[], float]
Points = dict[tuple[float, ...], float]


def seconds_of(action: Callable[[], object], device: Device, clock: Clock = time.perf_counter) -> float:
    """One call, warm: the best of a few, as the first ones also fetch memory and others only add to it."""
    times = [_timed(action, device, clock)]
    fewest = FEWEST if times[0] < LONG_S else FEWEST_LONG
    while len(times) < fewest or (sum(times) < BUDGET_S and len(times) < MOST):
        times.append(_timed(action, device, clock))
    return min(times)


def smooth(costs: Mapping[float, float]) -> Grid:
    """Costs per channel as a fixed cost and one per channel: differences of measurements are too noisy to be read apart."""
    places = sorted(costs)
    per_channel = median(costs[place] for place in places[len(places) // 2 :])
    fixed = median(max(0.0, costs[place] - per_channel) * place for place in places[: len(places) // 2])
    return grid_of({(place,): per_channel + fixed / place for place in places})


def _timed(action: Callable[[], object], device: Device, clock: Clock) -> float:
    began = clock()
    action()
    device.synchronize()
    return clock() - began


@dataclass(frozen=True)
class Blocks:
    rest: Grid
    saved_bytes: float  # per token and channel of one block


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


class Ruler:
    """Times pieces on one device, in one number format at a time."""

    def __init__(self, device: Device, clock: Clock = time.perf_counter) -> None:
        self.device, self.clock = device, clock
        self.generator = torch.Generator().manual_seed(0)

    def seconds(self, action: Callable[[], object]) -> float:
        return seconds_of(action, self.device, self.clock)

    def random(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*size, generator=self.generator).to(dtype).to(self.device.torch_device)

    def ids(self, vocab_size: int, *size: int) -> Tensor:
        return torch.randint(vocab_size, size, generator=self.generator).to(self.device.torch_device)

    # Matrix products

    def products(self) -> Grid:
        """The twelve products of a block: each matrix forward, and backward for its input and for itself."""
        return grid_of(
            {(n, c): self._block_products(n, c) / (12 * WEIGHT_FLOPS * n * c**2) for n in TOKENS for c in WIDTHS}
        )

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
        return grid_of({(t, size): self._attention(t, size) for t in POSITIONS for size in HEAD_SIZES})

    def _attention(self, positions: int, head_size: int) -> float:
        """Per token, channel and position."""
        batch, heads, dtype = max(1, ATTENTION_TOKENS // positions), 4, self.device.torch_dtype
        joined = self.random(batch, positions, 3 * heads * head_size, dtype=dtype).requires_grad_()
        gradient = self.random(batch, heads, positions, head_size, dtype=dtype)

        def forward_and_backward() -> None:
            q, k, v = (
                part.view(batch, positions, heads, head_size).transpose(1, 2)
                for part in joined.detach().requires_grad_().chunk(3, dim=2)
            )
            F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(gradient)  # type: ignore[no-untyped-call]

        return self.seconds(forward_and_backward) / (batch * positions * heads * head_size * positions)

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
        ids, gradient = self.ids(vocab_size, 2, 256), self.random(2, 256, width)
        return self.seconds(lambda: table(ids).backward(gradient))

    # The loss

    def head(self, kind: str) -> Grid:
        """Per token, vocabulary entry and channel."""
        places = itertools.product(HEAD_TOKENS[kind], HEAD_WIDTHS, VOCABULARIES[kind])
        return grid_of({(n, c, v): self._head(kind, n, c, v) / (n * c * v) for n, c, v in places})

    def _head(self, kind: str, tokens: int, width: int, vocab_size: int) -> float:
        weight = self.random(vocab_size, width).mul_(0.02).requires_grad_()
        hidden, targets = self.random(tokens, width).requires_grad_(), self.ids(vocab_size, tokens)

        def forward_and_backward() -> None:
            with self.device.autocast():
                loss = token_loss(hidden, weight, targets, tokens if kind == "chunked" else 0)
            loss.backward()  # type: ignore[no-untyped-call]

        return self.seconds(forward_and_backward)

    # Whole blocks

    def blocks(self, arch: str, known: Mapping[str, Grid]) -> Blocks:
        """What a block takes besides its products, its attention and its weights, and what it keeps for backward."""
        measured = {float(b * t * c): self._rest(arch, (b, t, c), False, known) for b, t, c in BLOCKS}
        return Blocks(smooth({channels: cost for channels, (cost, _) in measured.items()}), measured[max(measured)][1])

    def compiled_blocks(self, arch: str, known: Mapping[str, Grid], eager: Grid) -> Blocks:
        """Compiling takes too long for every size: the largest is timed, the others are in proportion to eager ones."""
        seconds, saved = self._rest(arch, BLOCKS[-1], True, known)
        share = min(max(seconds / eager.values[-1], LEAST_SHARE), MOST_SHARE)
        return Blocks(Grid(eager.axes, tuple(value * share for value in eager.values)), saved)

    def _rest(
        self, arch: str, size: tuple[int, int, int], compiled: bool, known: Mapping[str, Grid]
    ) -> tuple[float, float]:
        """(seconds, bytes kept) per token and channel of one block."""
        batch, positions, width = size
        shape = ModelShape(BLOCK_LAYERS, max(1, width // 64), width, positions, 64, arch=arch)
        seconds, saved = self._block(shape, batch, compiled)
        channels = batch * positions * width
        # Two measurements are subtracted; their noise must not make the rest nothing or less.
        return max(seconds - self._accounted(shape, batch, known), 0.02 * seconds) / channels, saved / channels

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
        """Muon's own work per matrix weight: the whole update less what AdamW does for the rest."""
        points: Points = {}
        for width in WIDTHS:
            engine = self._engine(width, 2, 64, "modern", "muon")
            matrices = block_weights(engine.model.shape)
            others = engine.model.shape.n_weights - matrices
            seconds = self._update(engine) - others * adamw.at(others)
            points[(float(width),)] = max(seconds, 1e-6) / matrices
        return grid_of(points)

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
        gradients = [torch.full_like(p, 1e-3) for p in engine.model.parameters()]
        loss = torch.zeros((), device=self.device.torch_device)

        def update() -> None:
            for parameter, gradient in zip(engine.model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            engine.update(loss, 1, Knobs(1e-5))

        return self.seconds(update)
