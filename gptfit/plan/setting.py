"""Setting: what memory and speed depend on, with nothing left open; and the key its timings are kept under."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields

from gptfit.gpus import GPU
from gptfit.measured import SpeedKey
from gptfit.shape import ModelShape

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Setting:
    """One way to run one shape: a whole step is `accumulation` micro-steps on each of `processes` devices."""

    shape: ModelShape
    micro_batch: int
    accumulation: int = 1  # per process
    processes: int = 1
    nodes: int = 1  # machines the processes are spread over
    network_gbs: float | None = None  # between machines, per machine; None: what is usual beside such cards
    parallel: str = "ddp"  # or 'fsdp': weights, gradients and optimizer state divided among the processes
    # With 'fsdp': gradients stay whole until the last micro-step and are summed once, or are summed in every micro-step.
    sums_late: bool = True
    dtype: str = "bfloat16"
    compile: bool = True
    chunked_loss: bool = False
    checkpoint_activations: str | bool = False
    attention: str = "auto"
    fused_loss: bool = True
    matmul: str = "plain"
    residual_dtype: str = "float32"
    gradient_dtype: str = "float32"
    optimizer: str = "adamw"
    optimizer_state: str = "float32"
    optimizer_device: str = "auto"
    lookahead: float = 0.0
    average_tail: float = 0.0
    embedding_device: str = "auto"
    muon_rounds: int = 3  # of train/muon.py; published Muon runs have 5
    # What becomes of the logits, which depends on whose program runs: 'replaced' by their gradient in gptfit's, which
    # returns a loss alone; 'kept' beside it (torch before 2.6); 'returned' to the loop, as nanoGPT's model does.
    logits: str = "replaced"
    flash: bool = True  # False: attention that writes its (T, T) scores, as code before PyTorch 2.0 did

    @property
    def writes_scores(self) -> bool:
        """Whether attention puts its (T, T) scores into memory."""
        return not self.flash or self.attention == "math"

    @property
    def micro_tokens(self) -> int:
        """Tokens of one micro-step on one device."""
        return self.micro_batch * self.shape.block_size

    @property
    def is_sharded(self) -> bool:
        return self.parallel == "fsdp" and self.processes > 1

    @property
    def processes_per_machine(self) -> int:
        return -(-self.processes // self.nodes)

    @property
    def tokens_per_step(self) -> int:
        return self.micro_tokens * self.accumulation * self.processes

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Spread:
    """Where the processes of a run are: on how many machines, over which network, on which cards if they differ."""

    nodes: int = 1
    network_gbs: float | None = None  # between machines, per machine; None: what is usual beside such cards
    cards: tuple[GPU, ...] = ()  # one per process, where they are unlike


ONE_MACHINE = Spread()


def speed_key(setting: Setting, device: str) -> SpeedKey:
    """Under which a timing of this setting is kept, on the device torch calls `device`. The only way a key is made."""
    shape = setting.shape
    named = {name: getattr(shape, name) for name in _fields(SpeedKey) if hasattr(shape, name)}
    named |= {name: getattr(setting, name) for name in _fields(SpeedKey) if name in _fields(Setting)}
    return SpeedKey(device=device, **named, ingredients=_unusual(shape, _fields(SpeedKey)), more=_more(setting))


def _more(setting: Setting) -> str:
    """What else makes a micro-step another one; how often it is repeated and on how many devices does not."""
    return _unusual(setting, (*_fields(SpeedKey), "shape", "accumulation", "processes", "nodes", "network_gbs"))


def _unusual(noun: ModelShape | Setting, known: Collection[str]) -> str:
    """Fields that have no place of their own in the key and are not at their default: 'norm=layer smear=False'."""
    if isinstance(noun, ModelShape) and noun.arch != "modern":
        return ""
    rest = [field for field in fields(noun) if field.name not in known]
    changed = [field.name for field in rest if getattr(noun, field.name) != field.default]
    return " ".join(f"{name}={getattr(noun, name)}" for name in changed)


def _fields(noun: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(noun))
