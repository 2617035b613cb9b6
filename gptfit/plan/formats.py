"""What faster number formats of the products are worth: which arithmetic they do, at what rate, and what casting moves."""

from __future__ import annotations

from gptfit.gpus import GPU
from gptfit.plan.setting import Setting

# Data sheets: 8-bit floating point at twice the 16-bit rate on every card that has it (half the bits, half the power);
# float16 sums at twice the rate of float32 sums on GeForce cards, whose float32 sums run at half of it by design.
FAST_RATE = 2.0
FP8_CAPABILITY = 8.9
TENSOR_CAPABILITY = 7.0

# matmul = 'fp8' takes the MLPs' two matrices, 8 of a block's 12 * C^2 weights, and the head where its logits are whole.
FP8_BLOCK_SHARE = 8 / 12
FP8_BLOCK_CHANNELS = 10  # inputs and outputs of those matrices: C + 4C and 4C + C
# Casting: bytes per input and output channel of such a matrix and token, forward and backward, and per weight and
# micro-step (read in float32 for its largest number and again for the cast, written, in forward and in backward). The
# first is fitted on torchao's two published rows: nanochat on 8 x H100, +17 % at 26 layers and slower at 12.
FP8_CAST_BYTES = 12.0
FP8_WEIGHT_BYTES = 18.0
# Wider than the prediction's own range: torchao's casts may fuse better (LLMQ's own kernels: +20 % at 0.5B and +45 % at
# 1.5B on an RTX 4090), and float16 sums at twice the rate may meet the power limit.
EXTRA_RANGE = {"plain": (0.0, 0.0), "fp8": (0.10, 0.25), "fp16acc": (0.25, 0.0)}

PUBLISHED = {
    "fp8": (
        "published for fp8: torchao on 8 x H100 +17 % at 1B parameters, slower at 0.3B (nanochat); kernels of its own on an "
        "RTX 4090 +20 % at 0.5B, +45 % at 1.5B (LLMQ)"
    ),
    "fp16acc": "no training run with float16 sums is published",
}


def matmul_problem(matmul: str, gpu: GPU) -> str | None:
    """Why a card does not have that format; None where it does."""
    if matmul == "plain":
        return None
    if not gpu.is_nvidia:
        return f"needs an NVIDIA card, and {gpu.name} is none"
    least, has = FP8_CAPABILITY if matmul == "fp8" else TENSOR_CAPABILITY, float(gpu.compute_capability)
    if has < least or not gpu.bf16_tflops:
        return f"needs compute capability {least:g} with tensor cores, and {gpu.name} has {gpu.compute_capability}"
    return None


def gains(matmul: str, gpu: GPU) -> bool:
    """Whether the card computes faster in that format."""
    if matmul == "plain" or matmul_problem(matmul, gpu):
        return False
    return matmul == "fp8" or gpu.is_geforce


def saved_flops(setting: Setting, gpu: GPU, block_flops: float, head_flops: float) -> float:
    """Per token, as if at the plain rate: what the faster rate spares."""
    if not gains(setting.matmul, gpu):
        return 0.0
    if setting.matmul == "fp16acc":
        fast = block_flops + head_flops
    else:
        fast = FP8_BLOCK_SHARE * block_flops + (0.0 if setting.chunked_loss else head_flops)
    return fast * (1 - 1 / FAST_RATE)


def cast_bytes(setting: Setting) -> float:
    """Of one micro-step."""
    if setting.matmul != "fp8":
        return 0.0
    shape = setting.shape
    channels, head = FP8_BLOCK_CHANNELS * shape.n_layer * shape.n_embd, shape.vocab_size * shape.n_embd
    weights = FP8_BLOCK_SHARE * (shape.matmul_weights - head)
    if not setting.chunked_loss:
        channels, weights = channels + shape.n_embd + shape.vocab_size, weights + head
    return FP8_CAST_BYTES * channels * setting.micro_tokens + FP8_WEIGHT_BYTES * weights
