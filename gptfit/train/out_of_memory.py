"""What a run does when memory runs out: a smaller micro-batch for the same step, and advice when there is none."""

from __future__ import annotations

from dataclasses import replace

from gptfit.plan.memory import predict
from gptfit.plan.setting import Setting
from gptfit.units import gib


def smaller_micro_batch(micro_batch: int, share: int) -> int | None:
    """At most half, and still a divisor of the windows per update, so that the step stays the same. None below 1."""
    return next((size for size in range(micro_batch // 2, 0, -1) if share % size == 0), None)


def out_of_memory_advice(setting: Setting) -> str:
    """One line: what was tried, what the plan says is needed, and the change that saves most."""
    shape, micro_batch = setting.shape, setting.micro_batch
    needed = predict(setting).allocated.value
    line = f"out of memory with a micro-batch of {micro_batch}: about {gib(needed)} are needed"
    block_size, n_layer = max(1, shape.block_size // 2), max(1, shape.n_layer // 2)
    ways = {
        "--checkpoint_activations=True": replace(setting, checkpoint_activations=True),
        "--chunked_loss=True": replace(setting, chunked_loss=True),
        f"--block_size={block_size}": replace(setting, shape=replace(shape, block_size=block_size)),
        f"--n_layer={n_layer}": replace(setting, shape=replace(shape, n_layer=n_layer)),
    }
    if micro_batch > 1:
        ways[f"--batch_size={micro_batch // 2}"] = replace(setting, micro_batch=micro_batch // 2)
    ways = {words: changed for words, changed in ways.items() if changed != setting}  # what is on already saves nothing
    best = min(ways, key=lambda way: predict(ways[way]).allocated.value)
    return f"{line}; {best} brings it to about {gib(predict(ways[best]).allocated.value)}"
