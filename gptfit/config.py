"""TrainConfig: every nanoGPT key with its default, plus ours; checked at birth."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from gptfit.configcheck import ConfigProblem, find_problems
from gptfit.errors import ConfigError
from gptfit.shape import INGREDIENTS, ModelShape

# What nanoGPT takes when the data folder has no meta.pkl: GPT-2's 50,257 padded to a multiple of 64.
NANOGPT_VOCAB_SIZE = 50304


@dataclass(frozen=True)
class TrainConfig:
    """A whole run as flat keys: nanoGPT's names and defaults, letter for letter, then gptfit's own.

    >>> TrainConfig(n_embd=512, n_head=12)
    Traceback (most recent call last):
    gptfit.errors.ConfigError: n_embd 512 is not divisible by n_head 12; use n_head = 8 (head size 64)
    """

    # I/O
    out_dir: str = "out"
    eval_interval: int = 2000
    log_interval: int = 1
    eval_iters: int = 200
    eval_only: bool = False
    always_save_checkpoint: bool = True
    init_from: str = "scratch"
    # wandb
    wandb_log: bool = False
    wandb_project: str = "owt"
    wandb_run_name: str = "gpt2"
    # data
    dataset: str = "openwebtext"
    gradient_accumulation_steps: int = 5 * 8
    batch_size: int = 12
    block_size: int = 1024
    # model
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = False
    # AdamW
    learning_rate: float = 6e-4
    max_iters: int = 600000
    weight_decay: float = 1e-1
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    # learning rate schedule
    decay_lr: bool = True
    warmup_iters: int = 2000
    lr_decay_iters: int = 600000
    min_lr: float = 6e-5
    # several processes
    backend: str = "nccl"
    # system; nanoGPT says 'cuda' and asks torch for a dtype, 'auto' finds the same and works elsewhere too
    device: str = "auto"
    dtype: str = "auto"
    compile: bool = True

    # gptfit's own keys from here on
    arch: str = "gpt2"
    optimizer: str = "adamw"
    schedule: str = "cosine"
    decay_fraction: float = 0.2  # of lr_decay_iters, schedule='wsd' only
    chunked_loss: str | bool = "auto"
    checkpoint_activations: bool = False
    sampling: str = "epoch"
    tokens_per_step: int = 0  # 0: batch_size * block_size * gradient_accumulation_steps, as nanoGPT
    vocab_size: int = 0  # 0: from the data's manifest or meta.pkl, else 50304, as nanoGPT
    data_root: str = "data"
    seed: int = 1337
    max_hours: float = 0.0  # 0: no limit
    early_stop_evals: int = 0  # 0: never
    keep_checkpoints: int = 1
    track: str = "none"
    gpu: str = ""  # override the card's name
    # arch='modern' only: its ingredients, each worth what docs/recipe.md says
    positions: str = "rotary"  # or 'learned'
    norm: str = "rms"  # without weights; or 'layer'
    qk_norm: bool = True
    activation: str = "relu2"  # or 'gelu'
    zero_init: bool = False  # whether projections into the residual stream, and the head, start at zero
    tied_head: bool = False
    smear: bool = True  # each token sees a share of the one before
    value_residual: bool = False
    layer_scalars: bool = False
    logit_softcap: float = 0.0  # 0: none
    # optimizer='muon' only; learning_rate is the matrices'
    momentum: float = 0.95
    embedding_lr: float = 0.0  # 0: from the size, as gptfit/recipe.py says
    head_lr: float = 0.0  # 0: the same

    def __post_init__(self) -> None:
        problems = find_problems(self.as_dict())
        if problems:
            raise ConfigError(problems[0].line, key=problems[0].key)

    @classmethod
    def unchecked(cls, **values: Any) -> TrainConfig:
        """A config that may be unable to start, so that `plan` can still say what can be said."""
        config = object.__new__(cls)
        for field in fields(cls):
            object.__setattr__(config, field.name, values.get(field.name, field.default))
        return config

    def replace(self, **changes: Any) -> TrainConfig:
        return dataclasses.replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def problems(self) -> list[ConfigProblem]:
        return find_problems(self.as_dict())

    def accumulation(self, processes: int = 1) -> int:
        """Micro-steps per update and process. nanoGPT's key counts those of all processes together."""
        if self.tokens_per_step:
            return self.tokens_per_step // (self.batch_size * self.block_size * processes)
        return self.gradient_accumulation_steps // processes

    def tokens_per_iter(self, processes: int = 1) -> int:
        return self.accumulation(processes) * processes * self.batch_size * self.block_size

    def shape(self, vocab_size: int | None = None) -> ModelShape:
        """The model these keys describe; the vocabulary comes from the data unless the config sets it."""
        return ModelShape(
            n_layer=self.n_layer,
            n_head=self.n_head,
            n_embd=self.n_embd,
            block_size=self.block_size,
            vocab_size=self.vocab_size or vocab_size or NANOGPT_VOCAB_SIZE,
            bias=self.bias,
            arch=self.arch,
            **{key: getattr(self, key) for key in INGREDIENTS},
        )


FIELD_TYPES: Mapping[str, str] = {field.name: str(field.type) for field in fields(TrainConfig)}
DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in fields(TrainConfig)}
GPTFIT_KEYS: frozenset[str] = frozenset(list(FIELD_TYPES)[list(FIELD_TYPES).index("arch") :])
