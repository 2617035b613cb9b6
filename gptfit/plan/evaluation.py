"""A config that only evaluates (`eval_only`): the memory of forward passes, without gradients or optimizer state."""

from __future__ import annotations

from dataclasses import replace

from gptfit.config.keys import TrainConfig
from gptfit.estimate import Estimate
from gptfit.plan import memory
from gptfit.plan.memory import Memory
from gptfit.plan.setting import Setting

EVAL_SPLITS = 2  # nanoGPT evaluates train and val
EVAL_ITER_TOKENS = 16_384  # of one of eval_iters at most: nanoGPT's batches are 12 x 1024 and 64 x 256
FORWARD_SHARE = 1 / 3  # of a micro-step's time: the backward pass does twice the work


def eval_windows(config: TrainConfig, processes: int = 1) -> int:
    """Windows of one split that an evaluation looks at.

    With sampling='random' nanoGPT's eval_iters batches; else a number that does not depend on the micro-batch, so that
    8 x 1 and 2 x 4, or a run before and after it ran out of memory, are judged on the same windows.
    """
    if config.sampling == "random":
        return config.eval_iters * config.batch_size
    per_update = max(1, config.tokens_per_iter(processes) // config.block_size)
    return config.eval_iters * min(per_update, max(1, EVAL_ITER_TOKENS // config.block_size))


def eval_seconds(config: TrainConfig, ms_per_micro_step: float) -> float:
    """One evaluation: forward passes of micro-batches over the windows of each split."""
    passes = eval_windows(config) / config.batch_size
    return EVAL_SPLITS * passes * ms_per_micro_step / 1e3 * FORWARD_SHARE


def eval_tokens(config: TrainConfig) -> int:
    return EVAL_SPLITS * eval_windows(config) * config.block_size


def predict(setting: Setting) -> Memory:
    """Weights, one block's activations at a time and the logits; nothing is kept for a backward pass."""
    training = memory.predict(setting)
    one_block = replace(setting, shape=replace(setting.shape, n_layer=1))
    parts = {
        "weights": training.parts["weights"],
        "activations": memory.activation_bytes(one_block),
        "logits": memory.logit_bytes(setting),
    }
    allocated = sum(parts.values())
    parts["workspace"] = memory.FITTED.context_bytes
    return Memory(
        parts,
        Estimate.within(allocated, memory.ALLOCATED_ERROR, "fit"),
        Estimate.within(sum(parts.values()), memory.DEVICE_ERROR, "fit"),
    )
