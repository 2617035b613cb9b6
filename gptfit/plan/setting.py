"""Setting: what memory and speed depend on, resolved from a config so that nothing is 'auto' any more."""

from __future__ import annotations

from dataclasses import dataclass

from gptfit.config import TrainConfig
from gptfit.gpus import GPU
from gptfit.measured import SpeedKey, speed_key
from gptfit.shape import ModelShape

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Setting:
    """One way to run one shape: a whole step is `accumulation` micro-steps on each of `processes` devices."""

    shape: ModelShape
    micro_batch: int
    accumulation: int = 1  # per process
    processes: int = 1
    dtype: str = "bfloat16"
    compile: bool = True
    chunked_loss: bool = False
    checkpoint_activations: bool = False
    optimizer: str = "adamw"
    muon_rounds: int = 3  # of run/muon.py; published Muon runs have 5
    flash: bool = True  # False: attention that writes its (T, T) scores, as code before PyTorch 2.0 did

    @property
    def micro_tokens(self) -> int:
        """Tokens of one micro-step on one device."""
        return self.micro_batch * self.shape.block_size

    @property
    def tokens_per_step(self) -> int:
        return self.micro_tokens * self.accumulation * self.processes

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]


def setting_of(config: TrainConfig, shape: ModelShape, gpu: GPU | None, processes: int = 1) -> Setting:
    """The setting a config means on this card.

    `chunked_loss='auto'` is planned as whole logits: what nanoGPT does, and the most a run can need. Where that does
    not fit, the plan says what `chunked_loss=True` needs.
    """
    return Setting(
        shape=shape,
        micro_batch=config.batch_size,
        accumulation=max(1, config.accumulation(processes)),
        processes=processes,
        dtype=resolve_dtype(config.dtype, gpu),
        compile=config.compile,
        chunked_loss=config.chunked_loss is True,
        checkpoint_activations=config.checkpoint_activations,
        optimizer=config.optimizer,
    )


def resolve_dtype(dtype: str, gpu: GPU | None) -> str:
    """'auto' is bfloat16 where the card has it, float16 on older tensor cores, float32 on cards without them."""
    if dtype != "auto":
        return dtype
    if gpu is None or gpu.has_bf16:
        return "bfloat16"
    return "float16" if gpu.bf16_tflops else "float32"


def measured_key(setting: Setting, device: str) -> SpeedKey:
    """The key under which `tune` and `train` keep what this setting did on the device torch calls `device`."""
    return speed_key(
        device,
        setting.shape,
        setting.micro_batch,
        dtype=setting.dtype,
        compile=setting.compile,
        chunked_loss=setting.chunked_loss,
        checkpoint_activations=setting.checkpoint_activations,
        optimizer=setting.optimizer,
    )
