"""The setting a config means at a place: every 'auto' decided, the same way for plan, tune, doctor and training."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from gptfit.config.check import NEEDED_DTYPES
from gptfit.config.keys import GROUPS, KEYS, MODEL_KEYS, TrainConfig
from gptfit.gpus import GPU
from gptfit.plan.memory import FITTED, predict, usable_bytes
from gptfit.plan.setting import ONE_MACHINE, Setting, Spread
from gptfit.shape import ModelShape

# On a CPU chunks of more than this were faster than whole logits (bench/train.py), as they stay in place.
WHOLE_LOGITS_BYTES = 256 * 1024**2

# Keys a setting has under the same name; those that may be 'auto' are resolved one by one.
_SAME_NAME = tuple(field.name for field in fields(Setting) if field.name in KEYS)
_TAKEN_OVER = tuple(name for name in _SAME_NAME if name not in ("dtype", "chunked_loss"))
# Every key that plan's memory and speed depend on; others (dropout, the learning rate) are the same to it.
PLANNED_KEYS = frozenset((*MODEL_KEYS, *_SAME_NAME, *(key.name for key in GROUPS["step"])))


@dataclass(frozen=True)
class Place:
    """Where a run is to be, as far as it decides what a config leaves open."""

    kind: str = "cuda"  # cpu | cuda | mps
    dtype: str = "bfloat16"  # what dtype = 'auto' is there
    free_bytes: float | None = None  # for tensors, the CUDA context taken off; None: not known, taken as enough
    can_compile: bool = True


def on_card(gpu: GPU | None, used_bytes: float | None = None) -> Place:
    """A card of the table, of which others use `used_bytes`; None is a CPU that nobody calibrated."""
    if gpu is None:
        return Place("cpu", "float32")
    return Place("cuda", resolve_dtype("auto", gpu), usable_bytes(gpu, used_bytes) - FITTED.context_bytes)


def setting_of(
    config: TrainConfig,
    shape: ModelShape,
    place: Place,
    processes: int = 1,
    spread: Spread = ONE_MACHINE,
    program: str = "gptfit",
) -> Setting:
    """The setting a config means here, trained by gptfit or by 'nanogpt'."""
    whole = Setting(
        shape=shape,
        micro_batch=config.batch_size,
        accumulation=max(1, config.accumulation(processes)),
        processes=processes,
        nodes=spread.nodes,
        network_gbs=spread.network_gbs,
        dtype=NEEDED_DTYPES.get(config.matmul, place.dtype) if config.dtype == "auto" else config.dtype,
        chunked_loss=False,
        **{name: getattr(config, name) for name in _TAKEN_OVER},
    )
    whole = replace(whole, compile=whole.compile and place.can_compile)
    if program == "nanogpt":
        return in_nanogpt(whole)
    return decided(whole, config.chunked_loss, place)


def decided(setting: Setting, chunked_loss: bool | str, place: Place) -> Setting:
    """What depends on the room there is: whether the loss comes in chunks, where that is 'auto', and when gradients are summed."""
    late = replace(setting, chunked_loss=False, sums_late=True)
    is_chunked = chunked_loss if chunked_loss != "auto" else not whole_logits_will_do(late, place)
    late = replace(late, chunked_loss=bool(is_chunked))
    return replace(late, sums_late=not late.is_sharded or _has_room(late, place))


def in_nanogpt(setting: Setting) -> Setting:
    """The same config run by nanoGPT's train.py: AdamW, none of the keys that spare memory, and logits that come back."""
    kept = ("shape", "micro_batch", "accumulation", "processes", "nodes", "network_gbs", "dtype", "compile")
    return Setting(**{name: getattr(setting, name) for name in kept}, logits="returned")


def whole_logits_will_do(setting: Setting, place: Place) -> bool:
    """What `chunked_loss = 'auto'` asks. On a card whole logits compile into one graph, so chunks are for what does not fit."""
    if place.kind == "cpu":
        return 4 * setting.micro_tokens * setting.shape.vocab_size <= WHOLE_LOGITS_BYTES
    return _has_room(setting, place)


def _has_room(setting: Setting, place: Place) -> bool:
    return place.free_bytes is None or predict(setting).device.value - FITTED.context_bytes <= place.free_bytes


def resolve_dtype(dtype: str, gpu: GPU | None) -> str:
    """'auto' is bfloat16 where the card has it, float16 on older tensor cores, float32 on cards without them."""
    if dtype != "auto":
        return dtype
    if gpu is None or gpu.has_bf16:
        return "bfloat16"
    return "float16" if gpu.bf16_tflops else "float32"
