"""Plan a run: config, shape, GPU and data in; memory, speed, time, loss and problems out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from gptfit.config.keys import TrainConfig, find_problems
from gptfit.config.recipe import limits
from gptfit.config.start_model import is_pretrained
from gptfit.estimate import Estimate
from gptfit.gpus import GPU
from gptfit.measured import MeasuredSpeed, Measurements
from gptfit.plan import evaluation, formats, memory, speed
from gptfit.plan.check import check
from gptfit.plan.evaluation import eval_seconds
from gptfit.plan.expected import expected_loss
from gptfit.plan.known_data import KNOWN_DATA
from gptfit.plan.nearby import scaled_speed, timed_on_cpu
from gptfit.plan.resolve import on_card, setting_of
from gptfit.plan.result import DataFacts, Plan
from gptfit.plan.setting import ONE_MACHINE, Setting, Spread, speed_key
from gptfit.plan.speed import Speed
from gptfit.plan.tuned_loss import tuned_loss
from gptfit.schedule import batches_until
from gptfit.shape import ModelShape
from gptfit.units import GIB

if TYPE_CHECKING:
    from gptfit.plan.calibration import Calibration
    from gptfit.plan.ladder import Ladder
    from gptfit.plan.resolve import Place

LARGEST_SIZE = 10**7  # of any dimension; beyond it a config is a typing error


def plan(
    config: TrainConfig,
    shape: ModelShape,
    gpu: GPU | None,
    *,
    data: DataFacts | None = None,
    processes: int = 1,
    spread: Spread = ONE_MACHINE,
    measurements: Measurements | None = None,
    device_name: str | None = None,
    used_bytes: float | None = None,
    host_free_bytes: float | None = None,
    watts: float | None = None,
    texts: tuple[str, ...] = (),
    program: str = "gptfit",
    cpu_rate: Callable[[], float | None] | None = None,
) -> Plan:
    """Everything that can be said, even about a config that cannot start.

    `device_name` is what torch calls this machine's card, under which measurements are looked up; `used_bytes` is
    what the card holds already, `host_free_bytes` what main memory has left; `watts` is the power at the wall; `texts` are the config files, for their comments; `program` is who trains, 'gptfit' or 'nanogpt';
    `cpu_rate` times a product on this machine's CPU, and is asked where nothing else is known of it.
    """
    problems = find_problems(config.as_dict(), processes)
    data = data or KNOWN_DATA.get(config.dataset)
    setting = None
    # A card that is not in this machine has no measurements here; without a card it is the CPU that counts.
    here = measurements if measurements and (device_name is not None or gpu is None) else None
    calibrated = _calibrated(here, device_name) if here else None
    if _is_sane(config, shape):
        place = _place(gpu, used_bytes, calibrated) if calibrated else on_card(gpu, used_bytes)
        setting = setting_of(config, shape, place, processes, spread, program)
    steps = 0 if config.eval_only else max(0, config.max_iters)
    answer = Plan(
        config=config,
        shape=shape,
        gpu=gpu,
        data=data,
        processes=processes,
        setting=setting,
        starts=not problems,
        tokens_per_step=setting.tokens_per_step if setting else 0,
        tokens=round(setting.tokens_per_step * batches_until(config.grow_batch_iters, steps)) if setting else 0,
        host_free_bytes=host_free_bytes,
    )
    if setting is not None:
        measured = find_measurement(config, setting, here, device_name) if here else None
        answer = _with_loss(answer, measurements)
        answer = _with_memory(answer, setting, measured, used_bytes, calibrated, spread.cards)
        predicted = find_speed(setting, gpu, measured, measurements, calibrated, cpu_rate)
        answer = _with_speed(answer, setting, predicted, watts, spread.cards)
    return replace(answer, problems=tuple(check(answer, problems, texts)), notes=tuple(_notes(answer)))


def _calibrated(here: Measurements, device_name: str | None) -> Calibration | None:
    """Imported late, here and below: few machines have been calibrated."""
    if not here.devices:
        return None
    from gptfit.plan.calibration import newest

    return newest(here, device_name)


def _place(gpu: GPU | None, used_bytes: float | None, calibrated: Calibration) -> Place:
    from gptfit.plan.calibration import place_for

    return place_for(gpu, used_bytes, calibrated)


def _calibrated_memory(setting: Setting, calibrated: Calibration) -> memory.Memory:
    from gptfit.plan.calibration import memory_of

    return memory_of(setting, calibrated)


def _cpu_memory(setting: Setting) -> memory.Memory:
    from gptfit.plan.untimed_cpu import process_memory

    return process_memory(setting)


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
        return measurements.speed(speed_key(setting, device_name), left_open)
    here = Measurements(timed_on_cpu(measurements))
    return here.speed(speed_key(setting, ""), left_open | {"device"})


def _with_loss(answer: Plan, measurements: Measurements | None) -> Plan:
    data, config = answer.data, answer.config
    if data and data.is_chat:
        pass  # the law is about the loss over all tokens of a text
    elif not is_pretrained(config) and not config.eval_only:
        expected = expected_loss(
            answer.shape,
            answer.tokens,
            data,
            optimizer=config.optimizer,
            dataset=config.dataset,
            own_runs=measurements.losses if measurements else (),
            weight_decay=config.weight_decay,
        )
        answer = replace(answer, loss=expected)
    elif not config.eval_only:
        answer = replace(answer, loss=tuned_loss(config.init_from, data))
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


def _with_memory(
    answer: Plan,
    setting: Setting,
    measured: MeasuredSpeed | None,
    used_bytes: float | None,
    calibrated: Calibration | None = None,
    cards: tuple[GPU, ...] = (),
) -> Plan:
    predicted = evaluation.predict(setting) if answer.config.eval_only else memory.predict(setting)
    if not answer.config.eval_only and calibrated is not None and calibrated.knows(setting):
        predicted = _calibrated_memory(setting, calibrated)
    elif not answer.config.eval_only and answer.gpu is None:
        predicted = _cpu_memory(setting)
    if not answer.config.eval_only and measured is not None and (measured.allocated_gib or measured.device_gib):
        allocated = (measured.allocated_gib or 0) * GIB or predicted.allocated.value
        device = (measured.device_gib or measured.reserved_gib or 0) * GIB or predicted.device.value
        predicted = replace(
            predicted,
            allocated=Estimate.within(allocated, 0.02, "measured"),
            device=Estimate.within(device, 0.02, "measured"),
        )
    answer = replace(answer, memory=predicted)
    if answer.gpu is None:
        free = answer.host_free_bytes
        return replace(answer, usable_bytes=free, fits=None if free is None else predicted.device.value <= free)
    usable = memory.usable_bytes(answer.gpu, used_bytes)
    fits = predicted.device.value <= usable
    return replace(
        answer,
        usable_bytes=usable,
        fits=fits,
        ladder=None if fits or answer.config.eval_only else _ladder(answer, setting, usable, cards),
        largest_micro_batch=None
        if answer.config.eval_only
        else _largest_micro_batch(answer.config, setting, answer.gpu, used_bytes),
    )


def _largest_micro_batch(config: TrainConfig, setting: Setting, gpu: GPU, used_bytes: float | None) -> int:
    """With what the config leaves open decided at each size as training decides it: chunks where whole logits do not fit."""
    least = replace(setting, sums_late=not setting.is_sharded)
    is_open = config.chunked_loss == "auto" and setting.logits != "returned"  # nanoGPT's are always whole
    ways = [replace(least, chunked_loss=chunked) for chunked in (False, True)] if is_open else [least]
    return max(memory.largest_micro_batch(way, gpu, used_bytes) for way in ways)


def _ladder(answer: Plan, setting: Setting, usable_bytes: float, cards: tuple[GPU, ...]) -> Ladder:
    from gptfit.plan.ladder import climb  # late: most plans fit

    is_open = answer.config.chunked_loss == "auto" and setting.logits != "returned"  # nanoGPT has whole ones
    return climb(setting, answer.gpu, usable_bytes, answer.host_free_bytes, cards, loss_is_open=is_open)


def find_speed(
    setting: Setting,
    gpu: GPU | None,
    measured: MeasuredSpeed | None,
    measurements: Measurements | None,
    calibrated: Calibration | None = None,
    cpu_rate: Callable[[], float | None] | None = None,
) -> Speed | None:
    """What was measured; else by this device's calibration; else a card by its data sheet, a CPU by its nearest run or,
    where there is none, by a product timed now."""
    if gpu is not None:
        return speed.predict(setting, gpu, measured, calibrated=calibrated)
    if measurements and measured is None:
        measured = Measurements(timed_on_cpu(measurements)).speed(speed_key(setting, ""), {"device", "dtype"})
    if measured is not None:
        return speed.from_measurement(setting, measured)
    if calibrated is not None and calibrated.knows(setting):
        return speed.from_calibration(setting, calibrated)
    nearest = scaled_speed(setting, measurements) if measurements else None
    return nearest or _speed_by_product(setting, cpu_rate)


def _speed_by_product(setting: Setting, cpu_rate: Callable[[], float | None] | None) -> Speed | None:
    from gptfit.plan.untimed_cpu import speed_by_product

    rate = cpu_rate() if cpu_rate else None
    return speed_by_product(setting, rate) if rate else None


def _with_speed(
    answer: Plan, setting: Setting, predicted: Speed | None, watts: float | None, cards: tuple[GPU, ...]
) -> Plan:
    if predicted is None:
        return answer
    if answer.gpu is not None and setting.processes > 1:
        from gptfit.plan import several  # late: most plans are for one card

        described = several.describe(setting, answer.gpu, predicted)
        predicted = several.with_uncertain_link(predicted, described.scaling)
        if len(set(cards)) > 1 and (found := several.unlike(setting, cards)):
            predicted, described = found
        answer = replace(answer, several=described)
    config, step_s = answer.config, predicted.ms_per_step.value / 1e3
    training = 0.0 if config.eval_only else step_s * batches_until(config.grow_batch_iters, max(0, config.max_iters))
    evals = config.max_iters // config.eval_interval + 1 if config.eval_interval > 0 else 0
    evals = 1 if config.eval_only else evals
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


CPU_WORDS = {
    "measured": "as measured",
    "calibrated": "from what `doctor --card` timed here",
    "fit": "from the nearest run timed",
    "timed": "from a product timed now, wide range (`gptfit doctor --card` makes it exact),",
}


def _notes(answer: Plan) -> list[str]:
    """What limits the answer, in sentences."""
    notes = _speed_notes(answer)
    if answer.shape.arch == "modern":
        notes.append(f"arch = 'modern': {limits(answer.shape)}")
    if answer.shape.arch == "modern" and answer.config.portable:
        notes.append(
            "the expected loss is the whole recipe's: what portable = True leaves out costs a little (docs/export.md)"
        )
    if answer.setting and not answer.setting.sums_late:
        notes.append("whole gradients do not fit, so they are summed in every micro-step and not in the last one only")
    if answer.setting and answer.loss is None and not answer.config.eval_only:
        notes.append(f"{_why_no_loss(answer)}: train and see the loss")
    return notes


def _why_no_loss(answer: Plan) -> str:
    if answer.data and answer.data.is_chat:
        return "conversations: only the assistant's words count, and nothing is published of their loss"
    if is_pretrained(answer.config):
        return "nothing is published of these weights"
    return "nothing is known of this data's tokens"


def _speed_notes(answer: Plan) -> list[str]:
    gpu, notes = answer.gpu, []
    if gpu is None:
        if answer.speed:
            return [f"speed {CPU_WORDS[answer.speed.tokens_per_s.basis]} on this machine's CPU"]
        return [
            "this machine's CPU, of which nothing was timed yet: `gptfit doctor --card` measures; --gpu NAME plans for a card"
        ]
    if answer.several and answer.several.nodes > 1:
        notes.append("between machines: data sheets of usual networks, nothing measured; --network GBITS says yours")
    if answer.config.matmul != "plain" and (published := formats.PUBLISHED.get(answer.config.matmul)):
        notes.append(f"{published}; `gptfit tune --also matmul` measures yours")
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
    return notes
