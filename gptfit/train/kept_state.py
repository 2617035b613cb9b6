"""Optimizer state kept small or elsewhere between updates: in 8 bits, in host memory, or both.

An update goes through the weights in groups of bounded size: their state is brought to the device as float32, the usual
optimizer steps, and the state goes back. The arithmetic of the update is untouched, so state in host memory changes no
number. `state_dict` is that of the plain optimizer, so a checkpoint resumes with any way of keeping.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from gptfit.device.device import Device
from gptfit.plan.memory import WEIGHTS_AT_ONCE
from gptfit.train.packed import Packed, pack, unpack
from gptfit.train.parts import whole_shape

SMALLEST_PACKED = 4096  # vectors and scalars stay in float32: they are nothing in bytes and much in effect
SQUARES = ("exp_avg_sq", "row_squares")

Kept = Tensor | Packed


class StatefulOptimizer(Protocol):
    """An optimizer that can allocate its state, and what memory a step needs, without changing a weight."""

    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]
    state: Any

    def make_state(self) -> None: ...
    def step(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class KeptStateOptimizer(Optimizer):
    """Wraps an optimizer of ours. `state` is empty between updates; what is kept is in here."""

    def __init__(self, inner: StatefulOptimizer, device: Device, is_8bit: bool, is_on_host: bool) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self._inner, self._device = inner, device
        self._is_8bit, self.is_on_host = is_8bit, is_on_host
        self._kept: dict[Tensor, dict[str, Any]] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        assert closure is None, "the training loop computes gradients itself"
        self.make_state()
        for members in self._groups_of_weights():
            self._on_device(members, self._inner.step)
        self._device.synchronize()  # copies to the host have arrived
        return None

    def make_state(self) -> None:
        """All memory of the first update before the first weight moves: if it runs out, no update is left half done."""
        for members in self._groups_of_weights():
            if any(p not in self._kept for p in members):
                self._on_device(members, self._inner.make_state)

    def state_dict(self) -> dict[str, Any]:
        """As the wrapped optimizer would save it: float32, whatever way it is kept, and on the device only what is there."""
        self._device.synchronize()  # copies to the host have arrived
        self._inner.param_groups = self.param_groups
        self._inner.state.clear()
        saved = self._inner.state_dict()
        saved["state"] = {number: _saved(self._kept[p]) for number, p, _ in self._numbered(saved) if p in self._kept}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Weight by weight: the device may have no room for the state of all."""
        self._inner.param_groups = self.param_groups
        self._inner.load_state_dict({**state_dict, "state": {}})
        self.param_groups = self._inner.param_groups
        self._kept = {}
        for number, p, group in self._numbered(state_dict):
            if state := dict(state_dict["state"].get(number) or {}):
                if group.get("is_normalized"):  # a run that begins to even its rows has no squares of them yet
                    state.setdefault("row_squares", torch.zeros(p.shape[0], 1))
                is_fused = bool(group.get("fused"))
                self._kept[p] = self._keep({name: self._home(name, state[name], p, is_fused) for name in state})

    def kept_bytes(self) -> int:
        """Of state, between updates."""
        values = [value for kept in self._kept.values() for value in kept.values()]
        return sum(value.nbytes for value in values if isinstance(value, Tensor | Packed))

    def _numbered(self, saved: dict[str, Any]) -> Iterator[tuple[int, Tensor, dict[str, Any]]]:
        """What a state_dict calls a weight, the weight, and the group it is in."""
        for group, named in zip(self.param_groups, saved["param_groups"], strict=True):
            for p, number in zip(group["params"], named["params"], strict=True):
                yield number, p, group

    def _home(self, name: str, value: Tensor, p: Tensor, is_fused: bool) -> Tensor:
        """What a checkpoint has for a weight, where it is kept; a fused kernel wants the count of steps beside the weight."""
        if name == "step":
            return value.to(p.device, torch.float32) if is_fused else value
        return value.to("cpu" if self.is_on_host else p.device, p.dtype)

    def _groups_of_weights(self) -> Iterator[list[Tensor]]:
        """In order, as many as may have their state on the device at once. A larger single one goes alone."""
        members: list[Tensor] = []
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            # By whole sizes: all processes must come to the same groups.
            if members and sum(whole_shape(m).numel() for m in [*members, p]) > WEIGHTS_AT_ONCE:
                yield members
                members = []
            members.append(p)
        if members:
            yield members

    def _on_device(self, members: list[Tensor], action: Callable[[], object]) -> None:
        """Do it with the state of these weights, and only of these, where the optimizer wants it."""
        chosen = set(members)
        self._inner.param_groups = [
            {**group, "params": [p for p in group["params"] if p in chosen]} for group in self.param_groups
        ]
        self._inner.state.clear()
        self._inner.state.update({p: self._plain(self._kept[p], p.device) for p in members if p in self._kept})
        with _float32_gradients(members):
            action()
        for p in members:
            # Into the memory it had, where that is the host's: pinned memory is slow to come by.
            self._kept[p] = self._keep(self._inner.state.pop(p), into=self._kept.get(p))

    def _keep(self, state: dict[str, Any], into: dict[str, Any] | None = None) -> dict[str, Any]:
        return {name: self._kept_value(name, value, (into or {}).get(name)) for name, value in state.items()}

    def _kept_value(self, name: str, value: Any, before: Kept | None) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if not self._is_8bit or value.numel() < SMALLEST_PACKED:
            return self._to_host(value, before) if self.is_on_host else value
        packed = pack(value, name in SQUARES)
        if not self.is_on_host:
            return packed
        old = before if isinstance(before, Packed) else None
        codes = self._to_host(packed.codes, old.codes if old else None)
        return Packed(codes, self._to_host(packed.scales, old.scales if old else None), packed.shape)

    def _to_host(self, tensor: Tensor, before: Kept | None) -> Tensor:
        if not isinstance(before, Tensor) or before.device.type != "cpu" or before.shape != tensor.shape:
            before = self._device.pinned(torch.empty_like(tensor, device="cpu"))
        return before.copy_(tensor, non_blocking=True)

    def _plain(self, kept: dict[str, Any], device: torch.device) -> dict[str, Any]:
        return {name: self._plain_value(value, device) for name, value in kept.items()}

    def _plain_value(self, value: Any, device: torch.device) -> Any:
        if isinstance(value, Packed):
            codes, scales = value.codes.to(device, non_blocking=True), value.scales.to(device, non_blocking=True)
            return unpack(Packed(codes, scales, value.shape))
        if isinstance(value, Tensor) and value.dim() > 0:
            # A copy also where the host is the device: the optimizer writes into it.
            return value.to(device, non_blocking=True, copy=True) if self.is_on_host else value
        return value


def _saved(kept: dict[str, Any]) -> dict[str, Any]:
    """What is in 8 bits becomes four times as large, in host memory."""
    return {name: _on_host(value) if isinstance(value, Packed) else value for name, value in kept.items()}


def _on_host(packed: Packed) -> Tensor:
    return unpack(Packed(packed.codes.cpu(), packed.scales.cpu(), packed.shape))


@contextlib.contextmanager
def _float32_gradients(members: list[Tensor]) -> Iterator[None]:
    """16-bit gradients as the optimizer wants them, for as long as it works on these weights."""
    narrow = [(p, p.grad) for p in members if p.grad is not None and p.grad.dtype != p.dtype]
    for p, gradient in narrow:
        p.grad = None
        p.grad_dtype = p.dtype
        p.grad = gradient.to(p.dtype)
    try:
        yield
    finally:
        for p, gradient in narrow:
            p.grad = None
            p.grad_dtype = gradient.dtype
            p.grad = gradient
