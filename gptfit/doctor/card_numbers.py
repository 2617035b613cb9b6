"""Card checks of numbers: attention kernels, losses and gradients, the float16 scale, Muon, sampling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from gptfit.config.keys import TrainConfig
from gptfit.device.device import Device, exact_products
from gptfit.doctor.verdict import Verdict, worst
from gptfit.model.build import build_model
from gptfit.model.cache import KVCache
from gptfit.model.head import token_loss
from gptfit.schedule import Knobs
from gptfit.shape import ModelShape
from gptfit.train.engine import build_engine
from gptfit.train.muon import orthogonalize

HEAD_SIZES = (64, 128)
TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2, "float16": 1e-2}  # of a gradient's norm; TF32 has ten bits
# Three rounds end in 0.73..1.27; the rounding of bfloat16 moves the small values of a square matrix further.
SINGULAR_VALUES = {torch.float32: (0.6, 1.4), torch.bfloat16: (0.6, 1.8)}
REPORT = "please report card.json"


def attention(device: Device) -> Verdict:
    """By the kernels that really ran: torch falls back in silence to one that writes all scores."""
    ran = {f"{size}{', dropout' if p else ''}": _kernels(device, size, p) for size, p in _attention_cases(device)}
    slow = [case for case, names in ran.items() if not any("flash" in name.lower() for name in names)]
    values = {"kernels": ran}
    if slow:
        remedy = "slower and with more memory; a newer torch build or another head size may have it"
        return Verdict("warning", f"no flash kernel for head size {'; '.join(slow)}", remedy, values)
    return Verdict("ok", f"the flash kernel runs for head size {'; '.join(ran)}", values=values)


def _attention_cases(device: Device) -> Iterator[tuple[int, float]]:
    for size in HEAD_SIZES:
        yield size, 0.0
        if device.kind == "cuda":
            yield size, 0.1  # a CPU has no flash kernel with dropout


def _kernels(device: Device, head_size: int, dropout: float) -> list[str]:
    """Names of what ran on the device in one forward and backward pass."""
    dtype = device.torch_dtype if device.kind != "cuda" or device.dtype != "float32" else torch.float16
    q, k, v = (
        torch.randn(2, 2, 256, head_size, device=device.torch_device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.kind == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout).sum().backward()  # type: ignore[no-untyped-call]
        device.synchronize()
    names = {event.key for event in profile.key_averages()}
    return sorted(
        name for name in names if "flash" in name.lower() or "fmha" in name.lower() or "attention" in name.lower()
    )


def loss_and_gradients(device: Device) -> Verdict:
    """Whole, in chunks, and in chunks as one compiled kernel where a card would: against float32 with all digits."""
    with exact_products():
        truth = _loss_and_gradients(replace(device, dtype="float32"), 0, False)
    ways = {"whole": (0, False), "chunked": (96, False)}
    if device.kind == "cuda":
        ways["fused chunks"] = (96, True)
    errors = {way: _error(truth, _loss_and_gradients(device, *how)) for way, how in ways.items()}
    largest, allowed = worst(errors.values()), TOLERANCE[device.dtype]
    text = f"{', '.join(ways)} in {device.dtype}: gradients within {largest:.1e} of float32's"
    if not largest <= allowed:
        return Verdict("error", text, f"{REPORT}; chunked_loss = False avoids chunks", {"errors": errors})
    return Verdict("ok", text, values={"errors": errors})


def _loss_and_gradients(device: Device, chunk_tokens: int, fused: bool) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(256, 64, generator=generator).to(device.torch_device).requires_grad_()
    weight = (torch.randn(1000, 64, generator=generator) * 0.1).to(device.torch_device).requires_grad_()
    targets = torch.randint(1000, (256,), generator=generator).to(device.torch_device)
    with device.autocast():
        loss = token_loss(hidden, weight, targets, chunk_tokens, fused=fused)
    loss.backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.detach().float(), hidden.grad.float(), weight.grad.float()


def _error(truth: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> float:
    return worst(float((a - b).norm() / a.norm()) for a, b in zip(truth, found, strict=True))


def scaler(device: Device) -> Verdict:
    """An infinite gradient must be skipped and the scale lowered; the next update must move the weights."""
    half = replace(device, dtype="float16")
    for optimizer in ("adamw", "muon"):
        shape = ModelShape(2, 2, 64, 64, 256, arch="modern" if optimizer == "muon" else "gpt2")
        config = TrainConfig(
            n_layer=2,
            n_head=2,
            n_embd=64,
            block_size=64,
            batch_size=2,
            arch=shape.arch,
            optimizer=optimizer,
            dtype="float16",
            device=str(device.torch_device),
            compile=False,
        )
        engine = build_engine(config, shape, half)
        ids = torch.randint(256, (2, 64), device=device.torch_device)
        applied = []
        for overflows in (True, *[False] * 20):
            loss = engine.forward_micro_step((ids, ids.clone()), is_last=True)
            engine.backward_micro_step(loss * (float("inf") if overflows else 1.0), 1)
            applied.append(engine.update(loss.detach(), 1, Knobs(1e-3)).applied)
            if applied[-1]:
                break
        if applied[0] or not applied[-1]:
            return Verdict(
                "error", f"{optimizer}: updates applied {applied}", f"{REPORT}; use dtype = 'bfloat16' or 'float32'"
            )
    return Verdict("ok", "an overflow is skipped and the next updates go on, with AdamW and Muon")


def muon(device: Device) -> Verdict:
    dtype = torch.bfloat16 if device.dtype == "bfloat16" else torch.float32
    low, high = [], []
    for rows, columns in ((128, 128), (512, 128), (128, 512)):
        matrices = torch.randn(3, rows, columns, generator=torch.Generator().manual_seed(0)).to(device.torch_device)
        values = torch.linalg.svdvals(orthogonalize(matrices.to(dtype)).float().cpu())
        low.append(float(values.min()))
        high.append(float(values.max()))
    # A square random matrix has singular values down to zero, which no few rounds lift.
    found = {"lowest": -worst(-value for value in low[1:]), "highest": worst(high)}
    text = f"singular values from {found['lowest']:.2f} to {found['highest']:.2f}"
    least, most = SINGULAR_VALUES[dtype]
    if not least <= found["lowest"] <= found["highest"] <= most:
        return Verdict("error", text, f"{REPORT}; use optimizer = 'adamw'", found)
    return Verdict("ok", text, values=found)


def sampling(device: Device) -> Verdict:
    """The same logits with keys and values remembered as with everything read again."""
    errors = []
    for arch in ("gpt2", "modern"):
        shape = ModelShape(2, 2, 64, 64, 256, arch=arch)
        torch.manual_seed(0)
        model = build_model(shape).to(device.torch_device).eval()
        ids = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(0)).to(device.torch_device)
        with torch.no_grad(), exact_products():
            whole = model.logits(ids)
            cache = KVCache(shape, 2, 24, device.torch_device, torch.float32)
            parts = [model.logits(ids[:, :10], cache), *(model.logits(ids[:, i : i + 1], cache) for i in range(10, 24))]
        errors.append(float((torch.cat(parts, dim=1) - whole).abs().max() / whole.abs().max()))
    error = worst(errors)
    text, values = f"cached and uncached logits differ by {error:.1e}", {"error": error}
    return Verdict("ok", text, values=values) if error < 1e-4 else Verdict("error", text, REPORT, values)
