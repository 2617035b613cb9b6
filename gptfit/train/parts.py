"""Parts of weights: with parallel='fsdp' a process has some rows of each, and the optimizer works on those alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from gptfit.device.processes import Processes, all_gather, own_rows


class Part(nn.Parameter):
    """This process's rows of a weight, in the memory of the divided weight itself; there may be none."""

    whole_shape: torch.Size


def part_of(divided: nn.Parameter) -> Part:
    """`divided` is a DTensor of `fully_shard`."""
    part = Part(divided.to_local().detach())  # type: ignore[attr-defined]
    part.whole_shape = divided.shape
    return part


def whole_shape(tensor: Tensor) -> torch.Size:
    """Of the weight that a part is a part of; a whole one's own."""
    return tensor.whole_shape if isinstance(tensor, Part) else tensor.shape


def gather(rows: Tensor, n_rows: int, processes: Processes) -> Tensor:
    """The whole of what is divided as `own_rows` says; all processes must call this, and all receive it."""
    each = -(-n_rows // processes.count)
    sent = rows.new_zeros(each, *rows.shape[1:])
    sent[: len(rows)] = rows
    everything = rows.new_empty(each * processes.count, *rows.shape[1:])
    all_gather(everything, sent)
    return everything[:n_rows]


def whole_state(saved: dict[str, Any], parameters: list[Tensor], processes: Processes) -> dict[str, Any]:
    """An optimizer's state_dict with whole tensors, in the host's memory of the first process; empty in the others.

    `parameters` are in the order of the state's numbers.
    """
    state: dict[int, dict[str, Any]] = {}
    for number, name, value in entries(saved):
        if isinstance(value, Tensor) and value.dim() > 0:
            p = parameters[number]  # what is kept on the host goes through the device, one at a time
            value = gather(value.to(p.device), whole_shape(p)[0], processes)
        if processes.is_master:
            state.setdefault(number, {})[name] = value.cpu() if isinstance(value, Tensor) else value
    return {**saved, "state": state}


def own_state(saved: Mapping[str, Any], processes: Processes) -> dict[str, Any]:
    """The other way round: what this process needs of a whole state_dict."""
    state: dict[int, dict[str, Any]] = {}
    for number, name, value in entries(saved):
        if isinstance(value, Tensor) and value.dim() > 0:
            value = own_rows(value, processes.rank, processes.count).clone()  # a view would keep the whole in memory
        state.setdefault(number, {})[name] = value
    return {**saved, "state": state}


def entries(saved: Mapping[str, Any]) -> Iterator[tuple[int, str, Any]]:
    """Of an optimizer's state_dict: a weight's number, and each value kept for it by name."""
    for number, entry in cast(Mapping[int, Mapping[str, Any]], saved["state"]).items():
        for name, value in entry.items():
            yield number, name, value


def tied_names(model: nn.Module) -> dict[str, str]:
    """Second names of weights -> their first, where one weight has two places."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in named if first[parameter] != name}
