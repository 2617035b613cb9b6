"""Plan a run: config, shape, GPU and data in; memory, speed, time, loss and problems out."""

from __future__ import annotations

from dataclasses import replace

from gptfit.config import TrainConfig
from gptfit.configcheck import find_problems
from gptfit.estimate import Estimate
from gptfit.gpus import GPU, find_or_none
from gptfit.measured import MeasuredSpeed, Measurements
from gptfit.plan import loss as loss_law
from gptfit.plan import memory, speed
from gptfit.plan.check import check
from gptfit.plan.knowndata import KNOWN_DATA
from gptfit.plan.result import DataFacts, Plan
from gptfit.plan.setting import Setting, measured_key, setting_of
from gptfit.shape import ModelShape
from gptfit.startmodel import is_pretrained
from gptfit.units import GIB

LARGEST_SIZE = 10**7  # of any dimension; beyond it a config is a typing error
EVAL_SPLITS = 2  # nanoGPT evaluates train and val
FORWARD_SHARE = 1 / 3  # of a micro-step's time: the backward pass does twice the work


def plan(
    config: TrainConfig,
    shape: ModelShape,
    gpu: GPU | None,
    *,
    data: DataFacts | None = None,
    processes: int = 1,
    measurements: Measurements | None = None,
    device_name: str | None = None,
    used_bytes: float | None = None,
    watts: float | None = None,
    texts: tuple[str, ...] = (),
) -> Plan:
    """Everything that can be said, even about a config that cannot start.

    `device_name` is what torch calls this machine's card, under which measurements are looked up; `used_bytes` is
    what the card holds already; `watts` is the power at the wall; `texts` are the config files, for their comments.
    """
    problems = find_problems(config.as_dict(), processes)
    data = data or KNOWN_DATA.get(config.dataset)
    setting = setting_of(config, shape, gpu, processes) if _is_sane(config, shape) else None
    answer = Plan(
        config=config,
        shape=shape,
        gpu=gpu,
        data=data,
        processes=processes,
        setting=setting,
        starts=not problems,
        tokens_per_step=setting.tokens_per_step if setting else 0,
        tokens=setting.tokens_per_step * max(0, config.max_iters) if setting else 0,
        memory=None,
        usable_bytes=None,
        fits=None,
        largest_micro_batch=None,
        speed=None,
        seconds=None,
        eval_share=None,
        kwh=None,
        epochs=None,
        loss=None,
    )
    if setting is not None:
        # A card that is not in this machine has no measurements here; without a card it is the CPU that counts.
        here = device_name is not None or gpu is None
        measured = find_measurement(config, setting, measurements, device_name) if measurements and here else None
        answer = _with_loss(answer, measurements)
        answer = _with_memory(answer, setting, measured, used_bytes)
        answer = _with_speed(answer, setting, measured, watts)
    return replace(answer, problems=tuple(check(answer, problems, texts)), notes=tuple(_notes(answer)))


def eval_seconds(config: TrainConfig, ms_per_micro_step: float) -> float:
    """One evaluation: `eval_iters` forward passes of a micro-batch on each split."""
    return EVAL_SPLITS * config.eval_iters * ms_per_micro_step / 1e3 * FORWARD_SHARE


def measured_on_cpu(config: TrainConfig, shape: ModelShape, measurements: Measurements) -> bool:
    """Whether `tune` or a run has timed this config on this machine's CPU."""
    if not _is_sane(config, shape):
        return False
    return find_measurement(config, setting_of(config, shape, None), measurements, None) is not None


def _is_sane(config: TrainConfig, shape: ModelShape) -> bool:
    """Sizes on which arithmetic makes sense, even if they do not fit together."""
    sizes = (shape.n_layer, shape.n_head, shape.n_embd, shape.block_size, shape.vocab_size, config.batch_size)
    return all(isinstance(size, int) and 1 <= size < LARGEST_SIZE for size in sizes)


def find_measurement(
    config: TrainConfig, setting: Setting, measurements: Measurements, device_name: str | None
) -> MeasuredSpeed | None:
    """What was timed for this setting on `device_name`, or on this machine's CPU when that is None.

    What the config leaves to the machine ('auto') was resolved by the trial, so either answer counts.
    """
    left_open = {key for key in ("chunked_loss", "dtype") if getattr(config, key) == "auto"}
    if device_name is not None:
        return measurements.speed(measured_key(setting, device_name), left_open)
    here = Measurements(tuple(speed for speed in measurements.speeds if find_or_none(speed.key.device) is None))
    return here.speed(measured_key(setting, ""), left_open | {"device"})


def _with_loss(answer: Plan, measurements: Measurements | None) -> Plan:
    data, config = answer.data, answer.config
    expected = loss_law.predict(
        answer.shape.tied_parameters,
        answer.tokens,
        unique_tokens=data.tokens.value if data else None,
        dataset=data.name if data else config.dataset,
        arch=config.arch,
        optimizer=config.optimizer,
        bytes_per_token=data.bytes_per_token if data and not data.is_gpt2 else None,
        own_runs=measurements.losses if measurements else (),
    )
    is_known = not data or data.is_gpt2 or data.bytes_per_token
    if is_known and not is_pretrained(config):
        answer = replace(answer, loss=expected)
    if data and data.tokens.value > 0:
        tokens = answer.tokens
        epochs = Estimate(
            tokens / data.tokens.value,
            tokens / max(1.0, data.tokens.high),
            tokens / max(1.0, data.tokens.low),
            data.tokens.basis,
        )
        answer = replace(answer, epochs=epochs)
    return answer


def _with_memory(answer: Plan, setting: Setting, measured: MeasuredSpeed | None, used_bytes: float | None) -> Plan:
    predicted = memory.predict(setting)
    if measured is not None and (measured.allocated_gib or measured.device_gib):
        allocated = (measured.allocated_gib or 0) * GIB or predicted.allocated.value
        device = (measured.device_gib or measured.reserved_gib or 0) * GIB or predicted.device.value
        predicted = replace(
            predicted,
            allocated=Estimate.within(allocated, 0.02, "measured"),
            device=Estimate.within(device, 0.02, "measured"),
        )
    answer = replace(answer, memory=predicted)
    if answer.gpu is None:
        return answer
    usable = memory.usable_bytes(answer.gpu, used_bytes)
    return replace(
        answer,
        usable_bytes=usable,
        fits=predicted.device.value <= usable,
        largest_micro_batch=memory.largest_micro_batch(setting, answer.gpu, used_bytes),
    )


def _with_speed(answer: Plan, setting: Setting, measured: MeasuredSpeed | None, watts: float | None) -> Plan:
    if answer.gpu is not None:
        predicted = speed.predict(setting, answer.gpu, measured)
    else:
        predicted = speed.from_measurement(setting, measured) if measured else None
    if predicted is None:
        return answer
    config, step_s = answer.config, predicted.ms_per_step.value / 1e3
    training = step_s * max(0, config.max_iters)
    evals = config.max_iters // config.eval_interval + 1 if config.eval_interval > 0 else 0
    evaluating = evals * eval_seconds(config, predicted.ms_per_micro_step.value)
    total = training + evaluating
    seconds = predicted.ms_per_step.map(total / predicted.ms_per_step.value)
    return replace(
        answer,
        speed=predicted,
        seconds=seconds,
        eval_share=evaluating / total if total else 0.0,
        kwh=seconds.map(watts / 3.6e6) if watts else None,
    )


def _notes(answer: Plan) -> list[str]:
    """What limits the answer, in sentences."""
    gpu, notes = answer.gpu, []
    if gpu is None:
        if answer.speed:
            return ["speed as measured on this machine's CPU"]
        return ["no GPU named: memory is for any NVIDIA card, speed and fit are unknown"]
    if gpu.is_laptop:
        notes.append(f"{gpu.name}: a laptop card's speed depends on its power limit, by up to a factor of two")
    if not gpu.has_bf16 and answer.setting:
        notes.append(f"{gpu.name} has no bfloat16; planned in {answer.setting.dtype}")
    if gpu.confidence == "low" and not gpu.is_laptop:
        notes.append(f"{gpu.name}: its data sheet rate is uncertain ({gpu.source})")
    if answer.setting and answer.speed is None:
        notes.append(
            f"{gpu.name}: no arithmetic rate is known, so speed and time are unknown; measure with `gptfit tune`"
        )
    if answer.setting and answer.loss is None:
        begun = is_pretrained(answer.config)
        why = "the loss law knows runs from scratch" if begun else "too small or too little data for the loss law"
        notes.append(f"{why}: train and see")
    return notes
