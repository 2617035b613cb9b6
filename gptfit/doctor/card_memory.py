"""Card checks of memory: do its counts agree, is running out survived, does a run grow."""

from __future__ import annotations

import gc
from collections.abc import Callable

import psutil
import torch
from torch import Tensor

from gptfit.config.keys import TrainConfig
from gptfit.device.device import Device, spill_limit_bytes
from gptfit.device.out_of_memory import is_out_of_memory
from gptfit.doctor.verdict import Verdict
from gptfit.schedule import Knobs
from gptfit.shape import ModelShape
from gptfit.train.batches import Batch
from gptfit.train.engine import Engine, build_engine, collection_frozen
from gptfit.units import MIB, gib

PROBE_BYTES = 512 * MIB
AGREE = 0.05  # of what was asked for
BYTES_PER_ROW = 32 * 1024  # twice a row's hidden states: two such tensors fill the probe, and a step has many
STEPS = 200
GROWTH_BYTES = 8 * MIB  # of caches that fill once
SMALL = ModelShape(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=256)


def counts(device: Device, context: int = 0) -> Verdict:
    """A tensor of known size: what torch says it allocated, what it reserved, and what the system shows.

    `context`: what this process takes on a card by being there, where that is known.
    """
    before = _shown(device)
    tensor = torch.ones(PROBE_BYTES // 4, device=device.torch_device)
    device.synchronize()
    shown = _shown(device) - before
    empty = context if device.kind == "cuda" else before  # all that is in use on a card may be anybody's
    values = {"asked": PROBE_BYTES, "shown": shown, "context": empty}
    if device.kind == "cuda":
        values["allocated"] = torch.cuda.memory_allocated(device.torch_device)
        values["reserved"] = torch.cuda.memory_reserved(device.torch_device)
    del tensor
    wrong = [
        name
        for name in ("allocated", "reserved", "shown")
        if abs(values.get(name, PROBE_BYTES) / PROBE_BYTES - 1) > AGREE
    ]
    text = f"{gib(PROBE_BYTES)} asked for, {gib(shown)} shown"
    text += f"; a process without a model takes {gib(empty)}" if empty else ""
    if wrong:
        return Verdict("warning", f"{text}: {' and '.join(wrong)} differ", "close other programs and repeat", values)
    return Verdict("ok", text, values=values)


def out_of_memory(device: Device) -> Verdict:
    """A training step too large for a cap must run out; the next one must need what it needs in a fresh process."""
    engine = _small_engine(device)
    small, large = (_batch(device, rows) for rows in (4, PROBE_BYTES // BYTES_PER_ROW))
    _steps(engine, small, 1)  # the optimizer's state is there
    fresh = _peak_of_step(engine, small)
    limit = PROBE_BYTES + (_data_bytes() if device.kind == "cpu" else fresh)
    device.limit_memory(limit)
    ran_out = _refused(lambda: _steps(engine, large, 1))
    engine.forget_gradients()
    gc.collect()
    device.release_memory()
    refused = _refused(lambda: _steps(engine, small, 1))
    afterwards = 0 if refused else _peak_of_step(engine, small)
    values = {"limit": limit, "error": ran_out, "fresh": fresh, "afterwards": afterwards}
    if ran_out is None:
        return Verdict(
            "error",
            "a process may take more than its cap: running out is not noticed",
            "please report card.json",
            values,
        )
    # Libraries keep workspaces of a few MiB that they made for the large step.
    if refused or afterwards - fresh > AGREE * PROBE_BYTES:
        return Verdict("error", "memory stays taken after running out", "please report card.json", values)
    return Verdict(
        "ok",
        f"at a cap of {gib(PROBE_BYTES)} more a step ran out, gave back what it took and the next went on",
        values=values,
    )


def spilling(device: Device) -> Verdict:
    limit = spill_limit_bytes(device.torch_device)
    if limit is None:
        return Verdict("ok", "this system says when the card is full; nothing spills into main memory")
    total = device.total_memory_bytes()
    kept: list[Tensor] = []
    ran_out = _fill(device, kept, total)
    values = {"limit": limit, "total": total, "error": ran_out}
    if ran_out is None:
        return Verdict(
            "error",
            "the driver lends main memory beyond the card's",
            "in the NVIDIA control panel set CUDA - Sysmem Fallback Policy to 'Prefer No Sysmem Fallback'",
            values,
        )
    return Verdict(
        "ok", f"this system lends main memory; the process is held to {gib(limit)} of {gib(total)}", values=values
    )


def growth(device: Device) -> Verdict:
    """Two hundred steps with activations checkpointed, which leave cyclic objects, and the collector off as in a run."""
    engine = _small_engine(device)
    batch = _batch(device, 4)
    with collection_frozen():
        _steps(engine, batch, STEPS // 4)
        gc.collect()
        host, card = _host_bytes(), _card_bytes(device)
        _steps(engine, batch, STEPS)
        gc.collect()
        grown_host, grown_card = _host_bytes() - host, _card_bytes(device) - card
    values = {"host": grown_host, "card": grown_card, "steps": STEPS}
    text = f"{STEPS} steps: {grown_host / MIB:.1f} MiB more of main memory, {grown_card / MIB:.1f} on the device"
    if grown_host > GROWTH_BYTES or grown_card > 0:
        return Verdict("warning", text, "please report card.json: a long run would fill memory", values)
    return Verdict("ok", text, values=values)


def _small_engine(device: Device) -> Engine:
    config = TrainConfig(
        n_layer=SMALL.n_layer,
        n_head=SMALL.n_head,
        n_embd=SMALL.n_embd,
        block_size=SMALL.block_size,
        batch_size=4,
        device=str(device.torch_device),
        dtype=device.dtype,
        compile=False,
        checkpoint_activations=True,
    )
    return build_engine(config, SMALL, device)


def _batch(device: Device, rows: int) -> Batch:
    ids = torch.randint(SMALL.vocab_size, (rows, SMALL.block_size), device=device.torch_device)
    return ids, ids.clone()


def _peak_of_step(engine: Engine, batch: Batch) -> int:
    """What torch allocates on a card for it; nothing on a CPU, whose allocator keeps what was freed."""
    engine.device.reset_peak_memory()
    _steps(engine, batch, 1)
    return engine.device.peak_memory_bytes() if engine.device.kind == "cuda" else 0


def _steps(engine: Engine, batch: Batch, count: int) -> None:
    for _ in range(count):
        loss = engine.forward_micro_step(batch, is_last=True)
        engine.backward_micro_step(loss, 1)
        engine.update(loss.detach(), 1, Knobs(1e-4))


def _fill(device: Device, kept: list[Tensor], upto: int) -> str | None:
    """Take memory piece by piece; how it was refused, or None."""

    def take() -> None:
        while sum(tensor.nbytes for tensor in kept) < upto:
            kept.append(torch.ones(PROBE_BYTES // 32, device=device.torch_device))
            device.synchronize()

    return _refused(take)


def _refused(action: Callable[[], None]) -> str | None:
    """How memory was refused to it, or None."""
    try:
        action()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return str(error).splitlines()[0][:120]
    return None


def _shown(device: Device) -> int:
    """By the system: this process's main memory, or everything on the card."""
    return device.total_memory_bytes() - device.free_memory_bytes() if device.kind == "cuda" else _host_bytes()


def _host_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _data_bytes() -> int:
    """What the limit of a CPU process counts: its private writable pages."""
    memory = psutil.Process().memory_info()
    return int(getattr(memory, "data", memory.vms))


def _card_bytes(device: Device) -> int:
    return torch.cuda.memory_allocated(device.torch_device) if device.kind == "cuda" else 0
