"""RunFacts: one run reduced to what people compare; sizes, speed, MFU, time and its validation points."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gptfit.config.keys import GPT2_VOCAB_SIZES, TrainConfig
from gptfit.gpus import GPU, find, find_or_none
from gptfit.logs.events import Eval, Header, Step
from gptfit.logs.runlog import RunLog
from gptfit.logs.sanitise import whole
from gptfit.plan.matmul_rate import peak_tflops
from gptfit.plan.speed import A100_TFLOPS
from gptfit.shape import ModelShape

# GeForce cards boost above their data sheet, so a little over 100 % is real; much more is a wrong card or several.
BELIEVABLE_MFU = 1.15
# The first steps of a run compile, tune and warm up; they are left out of the median where enough others exist.
WARM_UP_STEPS = 5
# Half the distance between the quartiles of step times: below 1 % on a card of one's own, 20 % and more on shared cores.
BUSY_SPREAD = 0.1
FEWEST_TIMES = 12
CHAT_NOTE = (
    "trained on conversations: its losses are over the assistant's words alone, not to be compared with those of text"
)
OUR_MODELS = ("gptfit", "nanogpt")  # trainers whose model is what the config says; others have their own


@dataclass(frozen=True)
class EvalPoint:
    """One evaluation on all four axes at once. `None` where the log does not tell."""

    step: int
    val_loss: float | None
    train_loss: float | None = None
    val_bpb: float | None = None
    tokens: float | None = None
    seconds: float | None = None  # of training; evals and compiling left out
    flops: float | None = None
    eval_tokens: int | None = None


@dataclass(frozen=True)
class RunFacts:
    """What can be said about one run without the others."""

    name: str
    path: Path
    kind: str
    config: dict[str, Any]
    shape: ModelShape | None
    parameters: int | None
    flops_per_token: float | None
    tokens_per_step: int | None
    flops_per_step: float | None  # of all cards; from the log's own MFU where the model is not known
    processes: int
    micro_steps: int | None
    ms_per_step: float | None
    ms_spread: float | None  # half the distance between the quartiles of the step times, relative to their median
    gpu: GPU | None
    peak_tflops: float | None
    peak_basis: str
    memory_gib: float | None
    last_step: int
    max_iters: int | None
    seconds: float | None
    evals: tuple[EvalPoint, ...]
    tokenizer: str | None
    bytes_per_token: float | None
    train_tokens: int | None = None
    chat: str | None = None  # the loss is over the assistant's words alone
    versions: dict[str, Any] = field(default_factory=dict)
    device_name: str | None = None
    config_file: str | None = None
    ended: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def ms_per_micro_step(self) -> float | None:
        return self.ms_per_step / self.micro_steps if self.ms_per_step and self.micro_steps else None

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens_per_step / self.ms_per_step * 1000 if self.tokens_per_step and self.ms_per_step else None

    @property
    def tflops(self) -> float | None:
        """Achieved per card: the model's FLOPs per second, not the kernels'."""
        if self.flops_per_step is None or not self.ms_per_step:
            return None
        return self.flops_per_step / self.ms_per_step / self.processes / 1e9

    @property
    def mfu(self) -> float | None:
        return self.tflops / self.peak_tflops if self.tflops and self.peak_tflops else None

    @property
    def mfu_a100(self) -> float | None:
        return self.tflops / A100_TFLOPS if self.tflops else None

    @property
    def is_over(self) -> bool:
        """Whether it has made all the steps it was meant to make."""
        return bool(self.max_iters) and self.last_step >= (self.max_iters or 0) - 1

    @property
    def total_seconds(self) -> float | None:
        """Training time of the whole schedule: what it took if it is over, else at the usual step time."""
        if self.is_over and self.seconds:
            return self.seconds
        return self.max_iters * self.ms_per_step / 1000 if self.max_iters and self.ms_per_step else None

    @property
    def bits_per_byte_per_nat(self) -> float | None:
        """What turns a loss per token into bits per byte, through the data's own bytes per token."""
        return 1 / math.log(2) / self.bytes_per_token if self.bytes_per_token else None

    @property
    def is_busy(self) -> bool:
        """Whether the step times vary as on a machine that does other work too."""
        return self.ms_spread is not None and self.ms_spread > BUSY_SPREAD

    @property
    def has_few_times(self) -> bool:
        """Whether so few steps were timed that nothing can be said of how they vary."""
        return self.ms_per_step is not None and self.ms_spread is None

    def validation(self, point: EvalPoint, bpb: bool) -> float | None:
        """Its loss in nats per token, or in bits per byte: as the log says, else through the data's bytes per token."""
        if not bpb or point.val_bpb is not None:
            return point.val_bpb if bpb else point.val_loss
        scale = self.bits_per_byte_per_nat
        return point.val_loss * scale if point.val_loss is not None and scale else None

    @property
    def is_bpb(self) -> bool:
        """Whether validation is known in bits per byte only, as nanochat prints it."""
        return bool(self.evals) and all(point.val_loss is None for point in self.evals)

    @property
    def is_in_bits(self) -> bool:
        """Whether bits per byte come first: nats per token of a vocabulary of one's own say nothing to anybody else."""
        return self.is_bpb or (self.tokenizer not in (None, "gpt2") and self.bytes_per_token is not None)

    def as_config(self) -> TrainConfig | None:
        """The keys as a config for `plan`, or None when the model or the batch is not known."""
        known = all(key in self.config for key in ("n_layer", "n_embd", "block_size", "batch_size"))
        if not known or self.kind not in OUR_MODELS:
            return None
        own = {"chunked_loss": False} if self.kind == "nanogpt" else {}  # what gptfit would decide for itself
        config = TrainConfig.unchecked(**own | self.config)
        return None if config.problems() else config


def run_facts(run: RunLog, gpu_name: str | None = None) -> RunFacts:
    """`gpu_name` overrides the card the log names; an unknown name is an error, an unnamed card is None."""
    header, shape, dataset = run.header, run.header.shape, run.header.dataset
    config = dict(header.config)
    if shape is not None and not config.get("vocab_size") and config:
        config["vocab_size"] = shape.vocab_size  # 0 means "from the data"
    per_token = header.flops_per_token or (shape.flops_per_token if shape else None)
    per_step = header.tokens_per_step or _tokens_per_step(config)
    gpu, peak, basis = _peak(header, config, gpu_name)
    facts = RunFacts(
        name=run.name,
        path=run.path,
        kind=header.kind,
        config=config,
        shape=shape,
        parameters=header.parameters or (shape.parameters if shape else None),
        flops_per_token=per_token,
        tokens_per_step=per_step,
        flops_per_step=per_token * per_step if per_token and per_step else header.flops_per_step,
        processes=header.processes,
        micro_steps=_micro_steps(config, per_step, header.processes),
        ms_per_step=usual_step_ms(run.steps),
        ms_spread=_spread(settled_ms(run.steps)),
        gpu=gpu,
        peak_tflops=peak,
        peak_basis=basis,
        memory_gib=header.memory_gib or _largest(step.memory_gib for step in run.steps),
        last_step=run.last_step,
        max_iters=run.planned_steps,
        seconds=_largest(events[-1].seconds for events in (run.steps, run.evals) if events),
        evals=tuple(_eval_point(event, per_step, per_token) for event in run.evals),
        tokenizer=_tokenizer(header, config),
        bytes_per_token=dataset.bytes_per_token,
        train_tokens=dataset.train_tokens,
        chat=dataset.chat,
        versions=header.versions,
        device_name=header.device.name,
        config_file=header.config_file,
        ended=run.end.reason if run.end else None,
        notes=(*run.notes, *_card_note(header, gpu, gpu_name), *([CHAT_NOTE] if dataset.chat else [])),
    )
    return _doubting(facts)


def usual_step_ms(steps: Sequence[Step]) -> float | None:
    """The median over steps that did nothing but train."""
    settled = settled_ms(steps)
    return statistics.median(settled) if settled else None


def settled_ms(steps: Sequence[Step]) -> list[float]:
    timed = [step.ms for step in steps if step.ms is not None]
    return timed[WARM_UP_STEPS:] if len(timed) > 4 * WARM_UP_STEPS else timed


def _spread(times: list[float]) -> float | None:
    """As tune measures it inside a trial; a few steps say nothing."""
    if len(times) < FEWEST_TIMES:
        return None
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / 2 / middle


def run_letter(index: int) -> str:
    """A to Z, then AA, AB, ... as in a spreadsheet.

    >>> run_letter(0), run_letter(25), run_letter(26)
    ('A', 'Z', 'AA')
    """
    more, last = divmod(index, 26)
    return (run_letter(more - 1) if more else "") + chr(ord("A") + last)


def _tokens_per_step(config: dict[str, Any]) -> int | None:
    if all(config.get(key, 0) > 0 for key in ("batch_size", "block_size", "gradient_accumulation_steps")):
        return whole(TrainConfig.unchecked(**config).tokens_per_iter())
    return None


def _micro_steps(config: dict[str, Any], per_step: int | None, processes: int) -> int | None:
    micro = config.get("batch_size", 0) * config.get("block_size", 0) * processes
    return per_step // micro if per_step and micro and per_step % micro == 0 else None


def _peak(header: Header, config: dict[str, Any], gpu_name: str | None) -> tuple[GPU | None, float | None, str]:
    """The card's own dense rate for the run's dtype, and where that figure comes from."""
    device = header.device
    named = device.gpu or device.name
    gpu = find(gpu_name) if gpu_name else (find_or_none(named) if named else None)
    if not gpu_name and device.peak_tflops:
        return gpu, device.peak_tflops, device.peak_basis or "spec"
    if gpu is None:
        return None, None, ""
    if config.get("dtype") == "float32":
        return gpu, gpu.tf32_tflops or gpu.fp32_tflops, "spec"  # nanoGPT and gptfit allow tf32
    peak = peak_tflops(gpu)
    return gpu, peak.value if peak else None, peak.basis if peak else ""


def _doubting(facts: RunFacts) -> RunFacts:
    if facts.mfu is None or facts.mfu <= BELIEVABLE_MFU:
        return facts
    doubt = f"{facts.mfu:.0%} of {facts.peak_tflops:g} TFLOPS is more than the card can do: another card, or several?"
    return replace(facts, notes=(*facts.notes, doubt))


def _card_note(header: Header, gpu: GPU | None, gpu_name: str | None) -> list[str]:
    basis = header.device.gpu_basis
    if gpu is None or gpu_name or not basis:
        return []
    return [f"the card, {gpu.name}, is read from the {basis}; --gpu NAME says otherwise"]


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _eval_point(event: Eval, per_step: int | None, per_token: float | None) -> EvalPoint:
    tokens = event.tokens
    if tokens is None and per_step:
        tokens = float(event.step * per_step)
    return EvalPoint(
        step=event.step,
        val_loss=event.val_loss,
        train_loss=event.train_loss,
        val_bpb=event.val_bpb,
        tokens=tokens,
        seconds=event.seconds,
        eval_tokens=event.eval_tokens,
        flops=tokens * per_token if tokens is not None and per_token else None,
    )


def _tokenizer(header: Header, config: dict[str, Any]) -> str | None:
    """What text became tokens: the name and hash where known, else the vocabulary's size, which tells most apart."""
    if header.dataset.tokenizer:
        # GPT-2's vocabulary and bytes are the same everywhere; others are told apart by their hash.
        fixed = header.dataset.tokenizer in ("gpt2", "bytes")
        sha = "" if fixed else header.dataset.tokenizer_sha256 or ""
        return f"{header.dataset.tokenizer} {sha[:8]}".strip()
    if header.kind not in OUR_MODELS:
        own = f"{header.kind}'s own"
        return f"{own}, {config['vocab_size']:,} tokens" if config.get("vocab_size") else own
    vocab = config.get("vocab_size") or (header.shape.vocab_size if header.shape else None)
    if not vocab:
        return None
    return "gpt2" if vocab in GPT2_VOCAB_SIZES else f"{vocab:,} tokens"
