"""Card checks of memory: do its counts agree, is running out survived, does a run grow."""

from __future__ import annotations

import gc

import psutil
import torch
from torch import Tensor

from gptfit.config.keys import TrainConfig
from gptfit.device.device import Device, spill_limit_bytes
from gptfit.device.out_of_memory import is_out_of_memory
from gptfit.doctor.verdict import Verdict
from gptfit.schedule import Knobs
from gptfit.shape import ModelShape
from gptfit.train.engine import Engine, build_engine, collection_frozen
from gptfit.units import MIB, gib

PROBE_BYTES = 512 * MIB
AGREE = 0.05  # of what was asked for
STEPS = 200
GROWTH_BYTES = 8 * MIB  # of caches that fill once
SMALL = ModelShape(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=256)


def counts(device: Device) -> Verdict:
    """A tensor of known size: what torch says it allocated, what it reserved, and what the system shows."""
    before = _shown(device)
    tensor = torch.ones(PROBE_BYTES // 4, device=device.torch_device)
    device.synchronize()
    shown = _shown(device) - before
    values = {"asked": PROBE_BYTES, "shown": shown, "context": before}
    if device.kind == "cuda":
        values["allocated"] = torch.cuda.memory_allocated(device.torch_device)
        values["reserved"] = torch.cuda.memory_reserved(device.torch_device)
    del tensor
    wrong = [
        name
        for name in ("allocated", "reserved", "shown")
        if abs(values.get(name, PROBE_BYTES) / PROBE_BYTES - 1) > AGREE
    ]
    text = f"{gib(PROBE_BYTES)} asked for, {gib(shown)} shown; a process without a model takes {gib(before)}"
    if wrong:
        return Verdict("warning", f"{text}: {' and '.join(wrong)} differ", "close other programs and repeat", values)
    return Verdict("ok", text, values=values)


def out_of_memory(device: Device) -> Verdict:
    """Capped at a little more than it has, it must run out, free what it had, and go on."""
    limit = PROBE_BYTES + (_data_bytes() if device.kind == "cpu" else 0)
    device.limit_memory(limit)
    kept: list[Tensor] = []
    ran_out = _fill(device, kept, 4 * PROBE_BYTES)
    kept.clear()
    gc.collect()
    device.release_memory()
    left = torch.cuda.memory_allocated(device.torch_device) if device.kind == "cuda" else 0
    works = _fill(device, kept, PROBE_BYTES // 4) is None
    values = {"limit": limit, "error": ran_out, "left": left}
    if ran_out is None:
        return Verdict(
            "error",
            "a process may take more than its cap: running out is not noticed",
            "please report card.json",
            values,
        )
    if left or not works:
        return Verdict("error", "memory stays taken after running out", "please report card.json", values)
    return Verdict("ok", f"at a cap of {gib(PROBE_BYTES)} more it ran out, freed everything and went on", values=values)


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
    ids = torch.randint(SMALL.vocab_size, (4, SMALL.block_size), device=device.torch_device)
    batch = (ids, ids.clone())
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


def _steps(engine: Engine, batch: tuple[Tensor, Tensor], count: int) -> None:
    for _ in range(count):
        loss = engine.forward_micro_step(batch, is_last=True)
        engine.backward_micro_step(loss, 1)
        engine.update(loss.detach(), 1, Knobs(1e-4))


def _fill(device: Device, kept: list[Tensor], upto: int) -> str | None:
    """Take memory piece by piece; how it was refused, or None."""
    try:
        while sum(tensor.nbytes for tensor in kept) < upto:
            kept.append(torch.ones(PROBE_BYTES // 32, device=device.torch_device))
            device.synchronize()
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
