"""Muon: momentum made orthogonal for the matrices, AdamW for the rest; one optimizer, one state_dict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from gptfit.config.keys import TrainConfig
from gptfit.config.recipe import OwnRate, adamw_rate, scalar_rates
from gptfit.device.device import Device, has_bf16
from gptfit.device.processes import ALONE, Processes
from gptfit.model.base import LanguageModel
from gptfit.shape import ModelShape
from gptfit.train.muon_together import norm_of_rows, of_copies, of_rows
from gptfit.train.parts import Part, whole_shape

# Three quintics a*x + b*x^3 + c*x^5, each the best for the interval the one before leaves (Amsel et al. 2025, "Polar
# Express"), for singular values from 0.01 to 1: they end in 0.73..1.27. Jordan's five rounds end in 0.69..1.13; near 1
# is enough, and the rounds are Muon's whole cost.
ROUNDS = ((8.0934, -23.6205, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526))
SAFETY = 1.02  # rounding must not lift a singular value above 1, where the first quintic explodes
EPSILON = 1e-30  # of a squared norm: a zero gradient stays zero instead of becoming NaN
LONG = 1.5  # times as many columns as rows, or rows as columns
ADAM_EPSILON = 1e-10  # modded-nanogpt: at 1e-8 the rows of rarely seen tokens hardly move

Group = dict[str, Any]
Quintic = tuple[float, float, float]


def make_muon(
    model: LanguageModel,
    config: TrainConfig,
    device: Device,
    processes: Processes = ALONE,
    parameters: Mapping[str, nn.Parameter] | None = None,
) -> Muon:
    """Muon at `learning_rate` for the matrices of the blocks; AdamW at rates of their own for everything else."""
    named = dict(model.named_parameters()) if parameters is None else parameters
    groups = [group for group in _groups(named, model.shape, config, device) if group["params"]]
    # bfloat16 is enough where there are units for it: a card's float32 products have hardly more digits, a CPU's are real.
    is_bf16 = has_bf16(device.torch_device) and (device.dtype == "bfloat16" or device.kind == "cuda")
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    return Muon(groups, config.learning_rate, config.momentum, (config.beta1, config.beta2), dtype, processes)


def _groups(
    parameters: Mapping[str, nn.Parameter], shape: ModelShape, config: TrainConfig, device: Device
) -> Iterator[Group]:
    weights, scalars = shape.weights(), scalar_rates(config.tokens_per_iter())
    matrices = [w.name for w in weights if w.kind == "matrix"]
    for parts in (1, 3):
        members = [parameters[name] for name in matrices if _parts(name) == parts]
        how = {"is_normalized": config.normuon, "is_cautious": config.cautious_decay}
        yield {"params": members, "parts": parts, "weight_decay": config.weight_decay, **how}
    for kind in ("embedding", "table", "position", "head", "gate", "vector", "scalar"):
        named = {w.name: scalars.get(w.name, OwnRate()) for w in weights if w.kind == kind}
        for own in sorted(set(named.values())):
            rate = own.rate or _own_rate(kind, config, shape)
            scale = rate / config.learning_rate if config.learning_rate else 1.0
            members = [parameters[name] for name, its_own in named.items() if its_own == own]
            beta2 = config.embedding_beta2 if kind in ("embedding", "table") else 0.0
            betas = own.beta1 or config.beta1, beta2 or config.beta2
            yield {"params": members, "lr_scale": scale, "fused": device.kind in ("cpu", "cuda"), "betas": betas}


def _parts(name: str) -> int:
    """Queries, keys and values are one tensor for speed but three matrices in meaning, each orthogonal by itself."""
    return 3 if name.endswith("attn.c_attn.weight") else 1


def _own_rate(kind: str, config: TrainConfig, shape: ModelShape) -> float:
    if kind == "embedding" and config.embedding_lr:
        return config.embedding_lr
    if kind == "head" and config.head_lr:
        return config.head_lr
    return adamw_rate(kind, shape, config.tokens_per_iter())


class Muon(Optimizer):
    """Groups with `parts` are matrices, each `parts` square-ish blocks stacked by rows; groups without are AdamW's.

    Every group's rate is the schedule's times its own `lr_scale`, as for the other optimizers. Momentum is made
    orthogonal in `dtype`.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        dtype: torch.dtype = torch.float32,
        processes: Processes = ALONE,
    ) -> None:
        plain = {"weight_decay": 0.0, "decay_share": 1.0, "is_normalized": False, "is_cautious": False}
        super().__init__(list(groups), {"lr": lr, "momentum": momentum, "betas": betas, **plain})
        for group in self.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        self._dtype, self._is_rehearsed, self._processes = dtype, False, processes
        self._is_divided = any(isinstance(p, Part) for group in self.param_groups for p in group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        assert closure is None, "the training loop computes gradients itself"
        if not self._is_rehearsed or not self.state:  # a state from before the first step may have been loaded
            self.make_state()
        for group, members in self._parts_of_step():
            (self._step_matrices if "parts" in group else self._step_adamw)(group, members)
        return None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; a run that begins to even its rows has no squares of them yet."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for p in group["params"]:
                if group["is_normalized"] and self.state.get(p):
                    self.state[p].setdefault("row_squares", p.new_zeros(p.shape[0], 1))

    def _parts_of_step(self) -> Iterator[tuple[Group, list[Tensor]]]:
        """Matrices of one shape together: torch.optim.Muon's loop over them leaves a GPU waiting for launches."""
        for group in self.param_groups:
            together: dict[torch.Size | None, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    together.setdefault(whole_shape(p) if "parts" in group else None, []).append(p)
            for members in together.values():
                yield group, members

    def make_state(self) -> None:
        """Allocate all that a step needs before the first weight changes: running out of memory leaves no step half done."""
        for group, members in self._parts_of_step():
            for p in members:
                if self.state[p]:
                    continue
                if "parts" in group:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                    if group["is_normalized"]:
                        self.state[p]["row_squares"] = p.new_zeros(p.shape[0], 1)
                else:
                    averages = torch.zeros_like(p), torch.zeros_like(p)
                    self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"] = averages
                    self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        for group, members in self._parts_of_step():
            if "parts" in group:
                members = members[: -(-len(members) // self._processes.count)]  # this process's part of them
                zeros = members[0].new_zeros(len(members), *whole_shape(members[0]), dtype=self._dtype)
                orthogonalize_parts(zeros, group["parts"])
        self._is_rehearsed = True

    def _step_matrices(self, group: Group, members: list[Tensor]) -> None:
        gradients = members[0].new_empty(len(members), *members[0].shape, dtype=self._dtype)
        for p, slot in zip(members, gradients, strict=True):
            self._average_gradient(p, group["momentum"], slot)
        n_rows, n_columns = whole_shape(members[0])
        updates = self._orthogonal(gradients, group["parts"], n_rows)
        rate = group["lr"] * update_scale(n_rows // group["parts"], n_columns)
        decay = group["lr"] * group["weight_decay"] * group["decay_share"]
        total_norm = norm_of_rows if self._is_divided else Tensor.norm
        for p, update in zip(members, (each.to(members[0].dtype) for each in updates), strict=True):
            if group["is_cautious"]:
                p.addcmul_(p, (p * update).gt_(0), value=-decay)
            else:
                p.mul_(1 - decay)
            if group["is_normalized"]:
                factors = row_factors(update, self.state[p]["row_squares"], group["betas"][1], total_norm)
                p.addcmul_(update, factors, value=-rate)
            else:
                p.add_(update, alpha=-rate)

    def _orthogonal(self, gradients: Tensor, parts: int, n_rows: int) -> Tensor:
        make = partial(orthogonalize_parts, parts=parts)
        if self._processes.is_alone:
            return make(gradients)
        if self._is_divided:
            return of_rows(gradients, n_rows, make, self._processes)
        return of_copies(gradients, make, self._processes)

    def _average_gradient(self, parameter: Tensor, momentum: float, out: Tensor) -> None:
        """The averaged gradient, one step ahead (Nesterov), in the format of `out`."""
        gradient = parameter.grad
        assert gradient is not None
        average: Tensor = self.state[parameter]["momentum_buffer"].lerp_(gradient, 1 - momentum)
        torch.lerp(gradient, average, momentum, out=out)

    def _step_adamw(self, group: Group, parameters: list[Tensor]) -> None:
        states = [self.state[p] for p in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=group["fused"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=ADAM_EPSILON,
            maximize=False,
        )


def row_factors(
    update: Tensor, squares: Tensor, beta: float, total_norm: Callable[[Tensor], Tensor] = Tensor.norm
) -> Tensor:
    """(rows, 1): what divides each row by its own size over time and keeps the whole's (Li et al. 2025, "NorMuon")."""
    sizes: Tensor = torch.linalg.vector_norm(update, dim=1, keepdim=True)
    squares.lerp_(sizes.square() / update.shape[1], 1 - beta)
    shares = squares.clamp_min(EPSILON).rsqrt()
    # An average that began at zero is too small at first by the same factor in every row, which the norms take back.
    return shares * (total_norm(sizes) / total_norm(sizes * shares).clamp_min(EPSILON))


def orthogonalize_parts(matrices: Tensor, parts: int) -> Tensor:
    """Each of the `parts` blocks of rows of every matrix by itself."""
    _, rows, columns = matrices.shape
    return orthogonalize(matrices.view(-1, rows // parts, columns)).reshape(matrices.shape)


def update_scale(rows: int, columns: int) -> float:
    """What an orthogonal update is multiplied with, so that one rate serves every width and depth.

    An orthogonal (rows, columns) matrix moves outputs by sqrt(columns / rows) times too little when it is tall.
    """
    return math.sqrt(max(1.0, rows / columns))


def orthogonalize(x: Tensor) -> Tensor:
    """(K, m, n) -> the same singular vectors with all singular values near 1."""
    is_tall = x.shape[-2] > x.shape[-1]
    shrink: Tensor | None = None
    for rounds in _stages(x):
        gram: Tensor = x.mT @ x if is_tall else x @ x.mT
        if shrink is None:
            # The largest singular value is at most the root of the Gram matrix's norm: a bound up to m^(1/4) times
            # closer than the norm of x itself, which is worth two more rounds and costs nothing.
            bound: Tensor = gram.norm(dim=(-2, -1), keepdim=True) * SAFETY + EPSILON
            gram, shrink = gram / bound, bound.rsqrt()
            factor = _total_factor(gram, rounds) * shrink
        else:
            factor = _total_factor(gram, rounds)
        x = x @ factor if is_tall else factor @ x
    return x


def _stages(x: Tensor) -> Sequence[Sequence[Quintic]]:
    """Rounds that are taken together, on the smaller Gram matrix alone: less work where x has a longer side.

    All three need float32's digits. With bfloat16's the first must have lifted the small singular values before.
    """
    if max(x.shape[-2:]) < LONG * min(x.shape[-2:]):
        return [[each] for each in ROUNDS]
    return [ROUNDS[:1], ROUNDS[1:]] if x.dtype == torch.bfloat16 else [ROUNDS]


def _total_factor(gram: Tensor, rounds: Sequence[Quintic]) -> Tensor:
    """What all `rounds` multiply x with, found on its Gram matrix."""
    factor = total = _factor(gram, *rounds[0])
    for coefficients in rounds[1:]:
        gram = factor @ gram @ factor
        factor = _factor(gram, *coefficients)
        total = factor @ total
    return total


def _factor(gram: Tensor, a: float, b: float, c: float) -> Tensor:
    factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    factor.diagonal(dim1=-2, dim2=-1).add_(a)
    return factor
