"""TrainConfig: the table of every key, nanoGPT's and ours, each declared once; checked when a config is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from gptfit.config.check import find_conflicts
from gptfit.config.key import AMOUNT, COUNT, FRACTION, SHARE, SHARES, Key, key, keys_of
from gptfit.config.optimizer_facts import OPTIMIZERS
from gptfit.errors import ConfigError, Problem
from gptfit.schedule import SCHEDULE_NAMES, batch_part, batches_until
from gptfit.shape import ModelShape

# What nanoGPT takes when the data folder has no meta.pkl: GPT-2's 50,257 padded to a multiple of 64.
NANOGPT_VOCAB_SIZE = 50304
GPT2_VOCAB_SIZES = (50257, NANOGPT_VOCAB_SIZE)

# The groups in the order a person reads a config, with what the keys of a group have in common.
_everything = ("speed", "memory", "loss")
_model = partial(key, group="model", affects=_everything, on_resume="frozen")
_modern = partial(_model, group="modern block", needs=("arch", "modern"), idle="error")
_step = partial(key, group="step", within=COUNT, affects=_everything)
_horizon = partial(key, group="horizon", within=AMOUNT, on_resume="free")
_rate = partial(key, group="learning rate", affects=("loss",))
_optimizer = partial(key, group="optimizer", within=AMOUNT, affects=("loss",))
_muon = partial(_optimizer, group="Muon", needs=("optimizer", "muon"))
_data = partial(key, group="data", affects=("loss",))
_files = partial(key, group="evaluation and files", on_resume="free")
_tracking = partial(key, group="tracking", on_resume="free")
_machine = partial(key, group="machine", affects=("speed", "memory"), on_resume="free")


@dataclass(frozen=True)
class TrainConfig:
    """A whole run as flat keys: nanoGPT's names and defaults, letter for letter, and gptfit's own.

    A new key is one line here; checking, writing, resuming, comparing, tuning, help and docs follow from it.

    >>> TrainConfig(n_embd=512, n_head=12)
    Traceback (most recent call last):
    gptfit.errors.ConfigError: n_embd 512 is not divisible by n_head 12; use n_head = 8 (head size 64)
    """

    arch: str = _model(
        "gpt2", "the model: GPT-2's block, or the modern one of docs/recipe.md", choices=("gpt2", "modern")
    )
    n_layer: int = _model(12, "layers (blocks)", within=COUNT, nanogpt=True, always_written=True)
    n_head: int = _model(
        12, "attention heads per layer; must divide n_embd", within=COUNT, nanogpt=True, always_written=True
    )
    n_embd: int = _model(768, "width: channels of a token's state", within=COUNT, nanogpt=True, always_written=True)
    block_size: int = _model(
        1024,
        "context: tokens the model sees at once, and those of one window",
        within=COUNT,
        nanogpt=True,
        always_written=True,
    )
    vocab_size: int = _model(0, "tokens the model knows; 0: what the data says, else 50304, as nanoGPT", within=AMOUNT)
    dropout: float = _model(
        0.0,
        "share of activations dropped while training; useful when data is seen many times",
        within=FRACTION,
        on_resume="replan",
        nanogpt=True,
        always_written=True,
    )
    bias: bool = _model(
        False, "biases in linear layers and norms, as OpenAI's GPT-2 has", nanogpt=True, always_written=True
    )

    # The ingredients of arch='modern'; what each is worth: docs/recipe.md
    portable: bool = _modern(
        False,
        "leave out what llama.cpp cannot compute, so that the model can be exported to GGUF (docs/export.md)",
        affects=(),  # but those of the keys it turns off
        on_resume="free",
        needs=None,  # GPT-2's block is portable as it is
    )
    positions: str = _modern(
        ModelShape.positions, "how tokens know their place", choices=("rotary", "learned"), portable="rotary"
    )
    norm: str = _modern(
        ModelShape.norm, "RMS norm without weights, or GPT-2's LayerNorm", choices=("rms", "layer"), portable="rms"
    )
    qk_norm: bool = _modern(ModelShape.qk_norm, "normalise queries and keys", portable=False)
    activation: str = _modern(
        ModelShape.activation, "between the MLP's matrices", choices=("relu2", "gelu"), portable="relu2"
    )
    zero_init: bool = _modern(
        ModelShape.zero_init, "projections into the residual stream, and the head, start at zero", affects=("loss",)
    )
    tied_head: bool = _modern(ModelShape.tied_head, "the token embedding is also the head, as in GPT-2")
    smear: bool = _modern(ModelShape.smear, "each token sees a share of the one before", portable=False)
    value_residual: bool = _modern(
        ModelShape.value_residual, "every layer's values mixed with the first layer's", portable=False
    )
    layer_scalars: bool = _modern(
        ModelShape.layer_scalars, "a learned scale of the stream and of the embedding per layer", portable=False
    )
    logit_softcap: float = _modern(
        ModelShape.logit_softcap, "logits bent softly below this; 0: not", within=AMOUNT, portable=0.0
    )
    value_embeddings: str = _modern(
        ModelShape.value_embeddings,
        "the token's own value in every second layer: a table of the vocabulary each, or a projection",
        choices=("none", "tables", "projections"),
        portable="none",
    )
    bigram: bool = _modern(ModelShape.bigram, "a hashed table of token pairs on a quarter of the width", portable=False)
    qk_scale: float = _modern(
        ModelShape.qk_scale, "factor on normalised queries and keys", within=AMOUNT, affects=("loss",)
    )
    mlp_init: float = _modern(
        ModelShape.mlp_init,
        "first matrix of the MLP starts this many times its usual size",
        within=AMOUNT,
        affects=("loss",),
    )
    backout: bool = _modern(
        ModelShape.backout, "take a learned share of the stream at half the depth off its end", portable=False
    )
    smear_gate: bool = _modern(
        ModelShape.smear_gate, "each token says how much of the one before it wants", portable=False
    )

    batch_size: int = _step(
        12, "micro-batch: windows computed at once on one device", nanogpt=True, always_written=True
    )
    gradient_accumulation_steps: int = _step(
        5 * 8,
        "micro-batches per update, those of all processes together; tokens_per_step overrides it",
        nanogpt=True,
        always_written=True,
    )
    tokens_per_step: int = _step(
        0,
        "tokens per update, from which the accumulation follows; 0: batch_size * block_size * gradient_accumulation_steps",
        within=AMOUNT,
        affects=("loss",),
    )

    grow_batch_iters: int = _step(
        0, "updates of a quarter and then of half the batch before the whole ones", within=AMOUNT, affects=("loss",)
    )

    max_iters: int = _horizon(
        600000, "updates in all", affects=("loss",), on_resume="replan", nanogpt=True, always_written=True
    )
    max_hours: float = _horizon(
        0.0,
        "stop and save after this many hours of running (resumed parts count, sleep does not); 0: no limit",
    )
    early_stop_evals: int = _horizon(0, "stop after this many evaluations without a better val loss; 0: never")

    learning_rate: float = _rate(
        6e-4, "its peak; with optimizer = 'muon' that of the matrices", within=AMOUNT, nanogpt=True, always_written=True
    )
    decay_lr: bool = _rate(True, "warm up and decay; False: learning_rate all along", nanogpt=True)
    schedule: str = _rate("cosine", "how the rate falls after the warm-up", choices=SCHEDULE_NAMES)
    warmup_iters: int = _rate(
        2000, "updates over which the rate rises", within=AMOUNT, nanogpt=True, always_written=True
    )
    lr_decay_iters: int = _rate(
        600000,
        "update at which the rate has reached min_lr; usually max_iters",
        within=AMOUNT,
        nanogpt=True,
        always_written=True,
    )
    decay_fraction: float = _rate(
        0.2, "share of lr_decay_iters, at its end, over which 'wsd' decays", within=SHARE, needs=("schedule", "wsd")
    )
    min_lr: float = _rate(
        6e-5, "the rate at the end, usually a tenth of learning_rate", within=AMOUNT, nanogpt=True, always_written=True
    )

    optimizer: str = _optimizer(
        "adamw",
        "AdamW, or Muon for the blocks' matrices and AdamW for the rest",
        within=None,
        choices=tuple(OPTIMIZERS),
        affects=_everything,
        on_resume="frozen",
    )
    weight_decay: float = _optimizer(1e-1, "pull of matrices towards zero", nanogpt=True, always_written=True)
    beta1: float = _optimizer(0.9, "AdamW's memory of the gradient", within=FRACTION, nanogpt=True)
    beta2: float = _optimizer(
        0.95, "AdamW's memory of the gradient's square", within=FRACTION, nanogpt=True, always_written=True
    )
    average_tail: float = _optimizer(
        0.0,
        "share of the run, at its end, over which weights are averaged: what is evaluated and exported; 0: not",
        within=FRACTION,
        affects=("memory", "loss"),
    )
    grad_clip: float = _optimizer(1.0, "largest norm of the gradient; 0: not limited", nanogpt=True)

    momentum: float = _muon(0.95, "Muon's memory of the gradient", within=FRACTION)
    momentum_start: float = _muon(
        0.0, "rising from here to momentum over the first updates; 0: momentum from the start", within=FRACTION
    )
    momentum_end: float = _muon(0.0, "reached at the end of the decay; 0: momentum to the end", within=FRACTION)
    normuon: bool = _muon(False, "make the rows of an update equally large on average", within=None)
    cautious_decay: bool = _muon(
        False, "weight decay only where the update agrees, falling to zero over the run", within=None
    )
    lookahead: float = _muon(
        0.0,
        "gradients are taken this many averaged updates ahead, in the middle of the run (EMA-Nesterov); 0: not",
        within=FRACTION,
        affects=("memory", "loss"),
    )
    embedding_beta2: float = _muon(0.0, "beta2 of the embedding; 0: beta2", within=FRACTION)
    embedding_lr: float = _muon(0.0, "rate of the embedding; 0: from the model's size")
    head_lr: float = _muon(0.0, "rate of the head; 0: from the model's size")

    dataset: str = _data(
        "openwebtext", "folder under data_root with train.bin and val.bin", nanogpt=True, always_written=True
    )
    data_root: str = _data("data", "where data sets are", affects=(), on_resume="free")
    sampling: str = _data(
        "epoch", "every window once per epoch, or nanoGPT's random windows", choices=("epoch", "random")
    )
    shuffle_documents: bool = _data(
        False,
        "every epoch after the first reads the documents in another order",
        needs=("sampling", "epoch"),
        idle="error",
    )
    seed: int = _data(1337, "of the initial weights, the order of the data and dropout", within=AMOUNT)

    out_dir: str = _files(
        "out", "folder of checkpoints, run.jsonl and report", on_resume="anew", nanogpt=True, always_written=True
    )
    init_from: str = _files(
        "scratch",
        "scratch, resume, gpt2 (-medium, -large, -xl), or a run, checkpoint or Hugging Face folder whose weights to start from",
        affects=("loss",),
        on_resume="anew",
        nanogpt=True,
    )
    eval_interval: int = _files(2000, "updates between evaluations", within=COUNT, nanogpt=True, always_written=True)
    eval_iters: int = _files(200, "batches per evaluation and split", within=COUNT, nanogpt=True, always_written=True)
    eval_only: bool = _files(False, "evaluate once and end", on_resume="anew", nanogpt=True)
    sample_interval: int = _files(
        0, "updates between samples, which the log and the page keep; 0: none are made", within=AMOUNT
    )
    sample_prompts: str = _files(
        "", "what the samples continue, several with | between them; empty: a new document and two from validation"
    )
    log_interval: int = _files(1, "updates between lines of output and log", within=COUNT, nanogpt=True)
    always_save_checkpoint: bool = _files(
        True,
        "not used: ckpt.pt is always the last state, to resume from, and best.pt the best model",
        nanogpt=True,
        ignored="ckpt.pt is the last state, which a run is resumed from, and best.pt is the model nanoGPT would keep",
    )
    keep_checkpoints: int = _files(1, "earlier checkpoints kept beside ckpt.pt", within=COUNT)

    track: str = _tracking("none", "also send curves to a tracker", choices=("none", "wandb", "tensorboard", "trackio"))
    wandb_log: bool = _tracking(False, "the same as track = 'wandb'", nanogpt=True)
    wandb_project: str = _tracking("owt", "the tracker's project", nanogpt=True)
    wandb_run_name: str = _tracking("gpt2", "the run's name in the tracker", nanogpt=True)
    notify: str = _tracking(
        "",
        "tell when the run ends, stops or goes wrong: desktop, or an address that text is posted to, such as an ntfy topic",
    )

    device: str = _machine(
        "auto", "auto, cpu, cuda, cuda:0 or mps; auto takes the card where there is one", nanogpt=True
    )
    dtype: str = _machine(
        "auto",
        "number format of the matrix products; auto: bfloat16, float16 or float32, whichever the device has",
        choices=("auto", "float32", "bfloat16", "float16"),
        affects=_everything,
        tunable=True,
        nanogpt=True,
    )
    matmul: str = _machine(
        "plain",
        "products: 'fp8' 8-bit floating point in the MLPs and the head (RTX 40 and newer), 'fp16acc' float16 sums (GeForce)",
        choices=("plain", "fp8", "fp16acc"),
        affects=_everything,
        on_resume="replan",
        tunable=True,
    )
    compile: bool = _machine(True, "compile the model: faster after a minute's start", tunable=True, nanogpt=True)
    chunked_loss: str | bool = _machine(
        "auto",
        "compute logits and loss piece by piece: less memory; auto: where whole logits would take too much of it",
        choices=("auto", True, False),
        tunable=True,
    )
    checkpoint_activations: str | bool = _machine(
        False,
        "compute activations again in backward: 'wide' only norms and activations, cheap; True whole blocks, a third slower",
        choices=(False, "wide", True),
        tunable=True,
    )
    attention: str = _machine(
        "auto",
        "kernel of the attention: torch's own choice, flash, cuDNN's, or 'math', which writes the scores of all pairs",
        choices=("auto", "flash", "cudnn", "math"),
        tunable=True,
    )
    fused_loss: bool = _machine(
        True,
        "compile the softmax of a chunked loss into one kernel, on a card where the model is compiled",
        tunable=True,
    )
    memory: str = _machine(
        "given",
        "'auto' takes what measures of the memory ladder are needed, by prediction and again when memory runs out",
        choices=("given", "auto"),
    )
    residual_dtype: str = _machine(
        "float32",
        "of the residual stream the blocks add to; bfloat16 moves and keeps half its bytes, for dtype bfloat16 or float16",
        choices=("float32", "bfloat16"),
        affects=_everything,
        on_resume="replan",
    )
    gradient_dtype: str = _machine(
        "float32",
        "of the matrices' gradients; bfloat16 halves them and rounds what is accumulated",
        choices=("float32", "bfloat16"),
        affects=_everything,
        on_resume="replan",
    )
    optimizer_state: str = _machine(
        "float32",
        "optimizer state between updates; '8bit' keeps a quarter of the bytes, with one scale for 256 numbers",
        choices=("float32", "8bit"),
        affects=_everything,
        on_resume="replan",
    )
    optimizer_device: str = _machine(
        "auto",
        "where optimizer state is kept between updates; 'cpu': in host memory, fetched once an update",
        choices=("auto", "cpu"),
    )
    embedding_device: str = _machine(
        "auto",
        "where weights, gradients and state of embeddings and head are; 'cpu': in host memory, streamed every micro-step",
        choices=("auto", "cpu"),
    )
    parallel: str = _machine(
        "ddp",
        "several processes: 'ddp', everyone has the whole model, or 'fsdp', weights and optimizer state divided",
        choices=("ddp", "fsdp"),
    )
    shares: str = _machine(
        "auto",
        "of the micro-steps: 'auto', by measured speed where devices are unlike; 'equal'; or speeds, '2:1'",
        within=SHARES,
        affects=("speed",),
    )
    gpu: str = _machine("", "name of the card in the table, where its own name is not there", affects=())
    backend: str = _machine("nccl", "torch.distributed's, for several processes", affects=(), nanogpt=True)

    def __post_init__(self) -> None:
        problems = find_problems(self.as_dict())
        if problems:
            raise ConfigError(problems[0].message, fix=problems[0].fix, key=problems[0].where)

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

    def problems(self) -> list[Problem]:
        return find_problems(self.as_dict())

    def micro_steps(self, step: int, processes: int = 1) -> int:
        """Of update number `step` in each process; fewer at first where the batch grows."""
        return self.accumulation(processes) // batch_part(self.grow_batch_iters, step)

    def windows_until(self, step: int, processes: int = 1) -> int:
        """Windows that all updates before `step` have read, all processes together."""
        whole = self.accumulation(processes) * processes * self.batch_size
        return round(whole * batches_until(self.grow_batch_iters, step))

    def accumulation(self, processes: int = 1) -> int:
        """Micro-steps per update and process, of a whole batch. nanoGPT's key counts all processes together."""
        if self.tokens_per_step:
            return self.tokens_per_step // (self.batch_size * self.block_size * processes)
        return self.gradient_accumulation_steps // processes

    def tokens_per_iter(self, processes: int = 1) -> int:
        return self.accumulation(processes) * processes * self.batch_size * self.block_size

    def shape(self, vocab_size: int | None = None) -> ModelShape:
        """The model these keys describe; the vocabulary comes from the data unless the config sets it."""
        values = {name: getattr(self, name) for name in MODEL_KEYS}
        return ModelShape(**values | {"vocab_size": self.vocab_size or vocab_size or NANOGPT_VOCAB_SIZE})


KEYS: Mapping[str, Key] = keys_of(TrainConfig)
# The keys of each group, groups in the order a person reads a config.
GROUPS: Mapping[str, tuple[Key, ...]] = {
    group: tuple(key for key in KEYS.values() if key.group == group)
    for group in dict.fromkeys(key.group for key in KEYS.values())
}
DEFAULTS: Mapping[str, Any] = {name: key.default for name, key in KEYS.items()}
# What a model is: saved weights decide these. A ModelShape has nothing that no key sets.
MODEL_KEYS: tuple[str, ...] = tuple(field.name for field in fields(ModelShape))
INGREDIENTS = tuple(name for name in MODEL_KEYS if KEYS[name].needs == ("arch", "modern"))
# What portable = True needs of them.
PORTABLE: Mapping[str, Any] = {name: key.portable for name, key in KEYS.items() if key.portable is not None}
TUNABLE = tuple(name for name, key in KEYS.items() if key.tunable)
GPTFIT_KEYS = frozenset(name for name, key in KEYS.items() if not key.nanogpt)


def find_problems(values: Mapping[str, Any], processes: int = 1) -> list[Problem]:
    """Why a run cannot start: values that are none first, as conflicts between values can only be told among sane ones."""
    wrong = [problem for key in KEYS.values() if (problem := key.problem(values))]
    return wrong or [problem for problem in _found(values, processes) if problem.level == "error"]


def find_warnings(values: Mapping[str, Any], processes: int = 1) -> list[Problem]:
    """What a run does otherwise than its keys may suggest; of values that can start."""
    return [problem for problem in _found(values, processes) if problem.level == "warning"]


def _found(values: Mapping[str, Any], processes: int) -> list[Problem]:
    idle = [problem for key in KEYS.values() if (problem := key.idle_problem(values))]
    strange = [problem for key in KEYS.values() if (problem := key.portable_problem(values))]
    return [*find_conflicts(values, processes), *idle, *strange]
