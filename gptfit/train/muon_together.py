"""Muon in several processes: each makes its part of the matrices orthogonal, then all have the results."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from gptfit.device.processes import Processes, all_gather

Orthogonalize = Callable[[Tensor], Tensor]  # (K, m, n) -> the same shape, each matrix by itself


def of_copies(matrices: Tensor, orthogonalize: Orthogonalize, processes: Processes) -> Tensor:
    """(K, m, n) that all processes have; each does K/count of them and sends them to the others."""
    each = -(-len(matrices) // processes.count)
    mine = matrices[processes.rank * each : (processes.rank + 1) * each]
    done = matrices.new_zeros(each, *matrices.shape[1:])
    if len(mine):
        done[: len(mine)] = orthogonalize(mine)
    everything = done.new_empty(each * processes.count, *matrices.shape[1:])
    all_gather(everything, done)
    return everything[: len(matrices)]


def of_rows(rows: Tensor, n_rows: int, orthogonalize: Orthogonalize, processes: Processes) -> Tensor:
    """(K, this process's rows, n) of matrices of `n_rows`, divided as torch's chunk does; the same rows come back.

    Rows travel to the process that does their matrix, and home again.
    """
    each, per_process = -(-len(rows) // processes.count), -(-n_rows // processes.count)
    sent = rows.new_zeros(each * processes.count, per_process, rows.shape[2])
    sent[: len(rows), : rows.shape[1]] = rows
    # (process, its matrices, rows, n) -> after the exchange the first axis says whose rows they are
    gathered = torch.empty_like(sent)
    dist.all_to_all_single(gathered, sent)
    whole = gathered.view(processes.count, each, per_process, -1).transpose(0, 1).flatten(1, 2)  # (each, rows, n)
    done = torch.zeros_like(whole)
    done[:, :n_rows] = orthogonalize(whole[:, :n_rows])
    back = done.view(each, processes.count, per_process, -1).transpose(0, 1).contiguous()
    home = torch.empty_like(back)
    dist.all_to_all_single(home, back)
    return home.flatten(0, 1)[: len(rows), : rows.shape[1]]


def norm_of_rows(rows: Tensor) -> Tensor:
    """Of the whole that every process has some rows of."""
    square = rows.square().sum()
    dist.all_reduce(square)
    return square.sqrt()
