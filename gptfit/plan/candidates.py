"""Everything a wish allows: for each shape its fastest setting, and the loss after the time or the epochs it has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gptfit.config import recipe
from gptfit.config.keys import TrainConfig
from gptfit.gpus import GPU
from gptfit.plan import memory, usual_values
from gptfit.plan.calibration import Calibration, memory_of, place_for
from gptfit.plan.expected import block_parameters, expected_loss, nats_per_byte
from gptfit.plan.loss import GPT2_BYTES_PER_TOKEN
from gptfit.plan.many_epochs import keys_for_epochs
from gptfit.plan.resolve import in_nanogpt, setting_of
from gptfit.plan.result import DataFacts
from gptfit.plan.setting import Setting
from gptfit.plan.speed import Speed
from gptfit.shape import ModelShape

WIDTHS = (
    32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 896, 1024, 1152, 1280, 1536, 1792, 2048,
)  # fmt: skip
# Width per layer: GPT-2's four sizes go from 64 (124M) to 33 (1.5B). Within that the loss hardly cares (Kaplan et al.
# 2020, figure 5), so speed decides.
ASPECTS = (64, 48, 32)
LEAST_LAYERS = 2
MICRO_BATCHES = (64, 32, 16, 8, 4, 2, 1)  # powers of two divide every usual number of tokens per step
CPU_MICRO_TOKENS = 4096  # more at once does not make a CPU faster
# Published runs with that many parameters per unique token still gained: slowrun 27, nanoGPT's Shakespeare 35.
MOST_PARAMETERS_PER_UNIQUE_TOKEN = 30.0
# nanoGPT's shakespeare_char is at its best after 28 epochs (nanoGPT issue 211); no published run gained beyond.
EPOCHS = (30.0, 20.0, 12.0, 8.0, 5.0, 3.0)
EVAL_TIME = 0.04  # of the run, left for evaluations
LEAST_ITERS = 100  # a step is smaller where there would be fewer
SHORT_HOURS = 0.5  # compiling takes longer than it saves on a CPU in less


@dataclass(frozen=True)
class Wish:
    """What the user has: a card (None: this machine's CPU), a time, data."""

    gpu: GPU | None
    hours: float
    data: DataFacts
    vocab_size: int
    processes: int = 1
    block_size: int = 1024
    recipes: tuple[str, ...] = recipe.RECIPES
    only_nanogpt_keys: bool = False
    used_bytes: float | None = None
    calibrated: Calibration | None = None  # of the device that is in this machine
    cpu_rate: Callable[[], float | None] | None = None  # times a product, where nothing else is known of a CPU
    host_free_bytes: float | None = None  # of main memory
    dataset: str = ""  # what the config calls the data, where its name alone does not lead to it
    source: str = ""  # the file of text it is to be prepared from; empty where it is prepared
    column: str = "text"  # of that file
    # Vocabularies of its own by size, measured on it: bytes per token as a share of GPT-2's.
    shares: Mapping[int, float] = field(default_factory=dict, hash=False)

    @property
    def is_short_on_a_cpu(self) -> bool:
        return self.gpu is None and self.hours < SHORT_HOURS


@dataclass(frozen=True)
class PlannedRun:
    setting: Setting
    data: DataFacts
    tokens: float
    seconds: float  # of training, at the expected speed
    loss: float  # nats per byte

    @property
    def parameters(self) -> int:
        return self.setting.shape.parameters

    @property
    def epochs(self) -> float:
        return self.tokens / self.data.tokens.value


class Pace:
    """Where it is to run: the speed of a setting and the fastest setting of a shape, each worked out once."""

    def __init__(self, wish: Wish, speed_of: Callable[[Setting], Speed]) -> None:
        self._wish, self._speed_of = wish, speed_of
        self._place = place_for(wish.gpu, wish.used_bytes, wish.calibrated)
        self._speeds: dict[Setting, Speed] = {}
        self._fastest: dict[tuple[ModelShape, bool, bool], Setting | None] = {}

    def speed(self, setting: Setting) -> Speed:
        if setting not in self._speeds:
            self._speeds[setting] = self._speed_of(setting)
        return self._speeds[setting]

    def fastest(self, shape: ModelShape, only_nanogpt_keys: bool, compiled: bool) -> Setting | None:
        """The fastest way that fits: whole logits if possible, then chunks, then checkpoints."""
        key = (shape, only_nanogpt_keys, compiled)
        if key not in self._fastest:
            fitting = [found for way in self._ways(*key) if (found := self._largest(way, shape, only_nanogpt_keys))]
            self._fastest[key] = max(fitting, key=lambda s: self.speed(s).tokens_per_s.value, default=None)
        return self._fastest[key]

    def _ways(self, shape: ModelShape, only_nanogpt_keys: bool, compiled: bool) -> list[TrainConfig]:
        """The keys that decide speed and memory; a config leaves whole logits on a CPU to 'auto', which chunks large ones."""
        base = TrainConfig.unchecked(
            gradient_accumulation_steps=8 * self._wish.processes,
            compile=compiled,
            optimizer="muon" if shape.arch == "modern" else "adamw",
            chunked_loss="auto" if self._wish.gpu is None else False,
        )
        if only_nanogpt_keys:
            return [base]
        changes: tuple[dict[str, Any], ...] = (
            {},
            {"chunked_loss": True},
            {"chunked_loss": True, "checkpoint_activations": True},
        )
        return [TrainConfig.unchecked(**base.as_dict() | change) for change in changes]

    def _largest(self, way: TrainConfig, shape: ModelShape, for_nanogpt: bool) -> Setting | None:
        """The micro-batch from the list that is fastest among those that fit: speed only rises with it, so the largest."""
        wish, keys = self._wish, way.as_dict()
        for micro_batch in MICRO_BATCHES:
            config = TrainConfig.unchecked(**keys | {"batch_size": micro_batch})
            setting = setting_of(config, shape, self._place, wish.processes)
            if wish.gpu is None:
                if setting.micro_tokens <= CPU_MICRO_TOKENS or micro_batch == 1:
                    return setting
            # A proposal should fit even where the estimate is at its upper end; one for nanoGPT in nanoGPT's own code.
            elif fits_surely(wish, in_nanogpt(setting) if for_nanogpt else setting):
                return setting
        return None


def fits_surely(wish: Wish, setting: Setting) -> bool:
    """On the card of the wish, also at the upper end of the estimate."""
    return wish.gpu is None or _memory(wish, setting).device.high <= memory.usable_bytes(wish.gpu, wish.used_bytes)


def candidates(wish: Wish, pace: Pace) -> list[PlannedRun]:
    """Each recipe and shape in its fastest setting, for as many epochs as the time allows, and for fewer."""
    unique = wish.data.tokens.value * (wish.data.bytes_per_token or GPT2_BYTES_PER_TOKEN) / GPT2_BYTES_PER_TOKEN
    found: list[PlannedRun] = []
    for arch in wish.recipes:
        for shape in shapes(wish, arch):
            if block_parameters(shape) > MOST_PARAMETERS_PER_UNIQUE_TOKEN * unique:
                break  # wider ones have more
            found += _runs(wish, shape, pace)
    return found


def _runs(wish: Wish, shape: ModelShape, pace: Pace) -> Iterator[PlannedRun]:
    """The modern recipe has tables for few epochs and another model for many."""
    if shape.arch != "modern":
        yield from runs_of(wish, shape, pace, EPOCHS)
        return
    most = recipe.TABLES_UNTIL
    few, many = (recipe.edition_shape(shape, epochs) for epochs in (most, max(EPOCHS)))
    yield from runs_of(wish, few, pace, (most, *(epochs for epochs in EPOCHS if epochs < most)))
    repeated = runs_of(wish, many, pace, (epochs for epochs in EPOCHS if epochs > most))
    yield from (run for run in repeated if run.epochs > most)


def shapes(wish: Wish, arch: str) -> Iterator[ModelShape]:
    """Widths in steps of a head, a few depths each."""
    seen = set()
    for width in WIDTHS:
        for aspect in ASPECTS:
            layers = max(LEAST_LAYERS, round(width / aspect))
            if (width, layers) not in seen:
                seen.add((width, layers))
                heads = recipe.head_count(width)
                yield ModelShape(layers, heads, width, wish.block_size, wish.vocab_size, arch=arch)


def runs_of(
    wish: Wish, shape: ModelShape, pace: Pace, epochs: Iterable[float], least_iters: int = LEAST_ITERS
) -> Iterator[PlannedRun]:
    """A run for each number of epochs the time allows, and one for the whole time."""
    setting = pace.fastest(shape, wish.only_nanogpt_keys, not wish.is_short_on_a_cpu)
    if setting is None:
        return
    seen = set()
    for most in epochs:
        candidate = _run(wish, setting, pace, most, least_iters)
        if candidate is not None and candidate.tokens not in seen:  # the whole time, once
            seen.add(candidate.tokens)
            yield candidate


def _run(wish: Wish, setting: Setting, pace: Pace, epochs: float, least_iters: int) -> PlannedRun | None:
    most, shape = epochs * wish.data.tokens.value, setting.shape
    tokens = min(most, _tokens_in_time(wish, setting, pace))
    # The step is sized for the run's length, which the speed of that step decides: twice around is enough.
    largest = setting
    for _ in range(2):
        setting = _with_step(largest, min(_usual_step(wish, shape, tokens), int(tokens / least_iters)))
        setting = _of_length(setting, tokens)
        tokens = min(most, _tokens_in_time(wish, setting, pace))
    setting = _of_length(setting, tokens)
    if tokens < 0.9 * least_iters * setting.tokens_per_step:
        return None
    keys = keys_for_epochs(tokens / wish.data.tokens.value, shape.arch, 1, has_documents=False)
    expected = expected_loss(shape, tokens, wish.data, optimizer=setting.optimizer, weight_decay=keys["weight_decay"])
    if expected is None:
        return None
    seconds = tokens / pace.speed(setting).tokens_per_s.value
    setting = _averaged(wish, setting, keys.get("average_tail", 0.0))
    return PlannedRun(setting, wish.data, tokens, seconds, nats_per_byte(expected))


def _of_length(setting: Setting, tokens: float) -> Setting:
    """The modern model that a run of so many tokens trains: a short one may have no layer scalars."""
    if setting.shape.arch != "modern":
        return setting
    keys = recipe.length_keys(int(tokens // setting.tokens_per_step), setting.shape)
    return replace(setting, shape=replace(setting.shape, layer_scalars=keys["layer_scalars"]))


def _averaged(wish: Wish, setting: Setting, tail: float) -> Setting:
    """With its weights averaged over so much of its end, where there is memory for them; it takes no time."""
    averaged = replace(setting, average_tail=tail)
    return averaged if tail and fits_surely(wish, averaged) else setting


def _usual_step(wish: Wish, shape: ModelShape, tokens: float) -> int:
    """Tokens per step of a run of so many."""
    if shape.arch == "modern":
        least = recipe.least_tokens_per_step(shape.n_embd, shape.vocab_size, tokens, is_cpu=wish.gpu is None)
        return recipe.tokens_per_step(tokens, least)
    least = usual_values.LEAST_TOKENS_PER_STEP if wish.gpu else usual_values.LEAST_ON_A_CPU
    return usual_values.tokens_per_step(shape.parameters, tokens, least)


def _memory(wish: Wish, setting: Setting) -> memory.Memory:
    own = wish.calibrated
    return memory_of(setting, own) if own is not None and own.knows(setting) else memory.predict(setting)


def _tokens_in_time(wish: Wish, setting: Setting, pace: Pace) -> float:
    """At the slow end of the speed's range, so that the hours are kept."""
    return pace.speed(setting).tokens_per_s.low * wish.hours * 3600 * (1 - EVAL_TIME)


def _with_step(setting: Setting, tokens_per_step: int) -> Setting:
    """A micro-batch is never larger than the step: short runs on little data have small steps."""
    rows = max(1, tokens_per_step // (setting.shape.block_size * setting.processes))
    micro_batch = max(size for size in MICRO_BATCHES if size <= min(rows, setting.micro_batch))
    accumulation = max(1, round(tokens_per_step / (micro_batch * setting.shape.block_size * setting.processes)))
    return replace(setting, micro_batch=micro_batch, accumulation=accumulation)
