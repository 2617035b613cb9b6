"""What `tune` may try: sizes that divide the step, a ladder through them, and the settings to vary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gptfit.config.check import NEEDED_DTYPES
from gptfit.config.keys import KEYS, TUNABLE, TrainConfig
from gptfit.errors import ConfigError, UsageError
from gptfit.gpus import find_or_none
from gptfit.plan import memory
from gptfit.plan.calibration import Calibration, process_bytes
from gptfit.plan.resolve import Place, setting_of
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape
from gptfit.tune.trials import Candidate, Machine, Variant, Workload

# The prediction of memory is good to about 10 %; a size it puts this far beyond the device is not worth a trial.
HOPELESS = 1.5


@dataclass(frozen=True)
class VariedSetting:
    """One setting and the values it may take besides the config's own."""

    name: str
    values: tuple[object, ...]


@dataclass(frozen=True)
class Space:
    """The whole experiment: what is equal, what varies, where to begin, and what may be used."""

    workload: Workload
    start: int
    base: Variant
    axes: tuple[VariedSetting, ...] = ()
    sizes: tuple[int, ...] = ()  # allowed micro-batches, ascending: divisors of the step's rows
    asked: tuple[int, ...] = ()  # measured whatever the curve does
    limit_gib: float | None = None  # memory the winner may use, head-room taken off
    notes: tuple[str, ...] = ()


def make_space(
    config: TrainConfig,
    shape: ModelShape,
    machine: Machine,
    also: Sequence[str] = (),
    asked: Sequence[int] = (),
    headroom: float = 0.08,
    memory_gib: float | None = None,
    calibrated: Calibration | None = None,
) -> Space:
    """Sizes from 1 to what could conceivably fit, beginning where plan's memory model puts the largest that fits."""
    rows = config.tokens_per_iter() // config.block_size
    base = base_variant(config, machine)
    all_sizes = divisors(rows)
    usable = usable_bytes(machine, memory_gib)
    predicted = {size: predicted_bytes(config, shape, machine, base, size, calibrated) for size in all_sizes}
    sizes = tuple(size for size in all_sizes if predicted[size] <= HOPELESS * usable) or all_sizes[:1]
    largest = max((size for size in all_sizes if predicted[size] <= (1 - headroom) * usable), default=1)
    wanted, notes = _divide(rows, [config.batch_size, *asked])
    if machine.kind == "cpu":
        # Main memory is rarely what limits a CPU, and its largest batch takes minutes: begin at the config's own.
        largest = min(largest, max(size for size in wanted[0] if size <= config.batch_size))
    axes = make_axes(base, machine, also)
    idle = sorted({*also} - {axis.name for axis in axes})
    notes += tuple(f"{name} has nothing to vary on {machine.device}" for name in idle)
    for size in asked:
        sizes += tuple(extra for extra in nearest_divisors(rows, size) if extra not in sizes)
    return Space(
        workload=Workload(rows, config.block_size),
        start=largest,
        base=base,
        axes=axes,
        sizes=tuple(sorted(sizes)),
        asked=tuple(sorted({size for group in wanted[1:] for size in group})),
        limit_gib=(1 - headroom) * usable / 1024**3,
        notes=(*_plans_largest(config, shape, machine, base, rows), *notes),
    )


def divisors(rows: int) -> tuple[int, ...]:
    """Every micro-batch that keeps tokens per step equal, ascending."""
    small = [size for size in range(1, int(rows**0.5) + 1) if rows % size == 0]
    return tuple(sorted({*small, *(rows // size for size in small)}))


def nearest_divisors(rows: int, size: int) -> tuple[int, ...]:
    """The size itself when it divides the step, else the nearest below and above that do."""
    every = divisors(rows)
    if size in every:
        return (size,)
    below = [other for other in every if other < size][-1:]
    above = [other for other in every if other > size][:1]
    return (*below, *above)


def ladder(sizes: Sequence[int], start: int) -> tuple[int, ...]:
    """From `start` outward in steps of about two through the allowed sizes, ascending, ends included."""
    rungs = {start}
    for direction in (1, -1):
        here = start
        while beyond := [size for size in sizes if (size - here) * direction > 0]:
            target = here * 2.0**direction
            here = min(beyond, key=lambda size: max(size / target, target / size))
            rungs.add(here)
    return tuple(sorted(rungs))


def base_variant(config: TrainConfig, machine: Machine) -> Variant:
    here = {"dtype": machine.dtype, "compile": config.compile and machine.compile_problem is None}
    return Variant.of(machine.threads if machine.kind == "cpu" else 0, {**config.as_dict(), **here})


def make_axes(base: Variant, machine: Machine, also: Iterable[str] = ()) -> tuple[VariedSetting, ...]:
    """Threads on a CPU always; the rest when asked for. The values the config has already are not repeated."""
    axes = [VariedSetting("threads", thread_counts(machine))] if machine.kind == "cpu" else []
    for name in also:
        if name not in TUNABLE:
            raise UsageError(f"--also {name}: can vary {', '.join(TUNABLE)}")
        values = (value for value in values_of(name, base, machine) if value != base[name])
        axes.append(VariedSetting(name, tuple(values)))
    return tuple(axis for axis in axes if axis.values)


def values_of(name: str, base: Variant, machine: Machine) -> tuple[object, ...]:
    """What a key may be on this machine; a value it turns out not to take there is a trial that failed, and a row."""
    if name == "compile" and machine.compile_problem:
        return ()
    if name == "dtype":
        if machine.kind == "cpu" and not machine.has_bf16:
            return "float32", "bfloat16"  # float16 does nothing for a CPU
        return "bfloat16" if machine.has_bf16 else "float16", "float32"
    if name == "fused_loss" and not (machine.kind == "cuda" and base["compile"]):
        return ()  # there is nothing to fuse
    choices = KEYS[name].choices or (True, False)
    # 'auto' is one of the others; scores of all pairs of tokens are never faster on a card.
    left_out = {"auto", "math" if machine.kind == "cuda" else "cudnn"}
    return tuple(choice for choice in choices if choice not in left_out)


def thread_counts(machine: Machine) -> tuple[object, ...]:
    """Besides torch's own choice: every core the system shows (hyper-threads), half as many as torch's, and one."""
    counts = {machine.cores, machine.threads // 2, 1} - {machine.threads, 0}
    return tuple(sorted(counts, reverse=True))


def usable_bytes(machine: Machine, memory_gib: float | None = None) -> float:
    """What a training process can have here: what is free now, or the limit the user set."""
    free = float(machine.free_bytes)
    gpu = find_or_none(machine.gpu) if machine.gpu else None
    if gpu is not None:
        free = min(free, memory.usable_bytes(gpu, float(machine.total_bytes - machine.free_bytes)))
    return min(free, memory_gib * 1024**3) if memory_gib else free


def predicted_bytes(
    config: TrainConfig,
    shape: ModelShape,
    machine: Machine,
    variant: Variant,
    micro_batch: int,
    calibrated: Calibration | None = None,
) -> float:
    """This device's own figures at this size; else plan's memory model, without a CUDA context on other devices."""
    setting = candidate_setting(config, shape, machine, Candidate(micro_batch, variant))
    if calibrated is not None and calibrated.knows(setting):
        return process_bytes(setting, calibrated)
    predicted = memory.predict(setting)
    return predicted.device.value if machine.kind == "cuda" else predicted.allocated.value


def candidate_setting(config: TrainConfig, shape: ModelShape, machine: Machine, candidate: Candidate) -> Setting:
    """What the candidate is expected to run as; a finished trial knows better."""
    free = usable_bytes(machine) - (memory.FITTED.context_bytes if machine.kind == "cuda" else 0)
    place = Place(machine.kind, machine.dtype, free, can_compile=machine.compile_problem is None)
    return setting_of(candidate_config(config, candidate), shape, place)


def candidate_config(config: TrainConfig, candidate: Candidate) -> TrainConfig:
    """The config with the candidate's keys; tokens per step stay as they are."""
    rows, keys = config.tokens_per_iter() // config.block_size, dict(candidate.variant.keys)
    keys["dtype"] = NEEDED_DTYPES.get(str(keys["matmul"]), keys["dtype"])  # what else its products are in
    return config.replace(
        batch_size=candidate.micro_batch,
        gradient_accumulation_steps=rows // candidate.micro_batch,
        **keys,
    )


def _plans_largest(
    config: TrainConfig, shape: ModelShape, machine: Machine, variant: Variant, rows: int
) -> tuple[str, ...]:
    """A word about plan's answer where no trial can have that size."""
    gpu = find_or_none(machine.gpu) if machine.gpu else None
    if gpu is None:
        return ()
    used = float(machine.total_bytes - machine.free_bytes)
    largest = memory.largest_micro_batch(candidate_setting(config, shape, machine, Candidate(1, variant)), gpu, used)
    if largest == 0 or largest >= rows:
        return ()
    return tuple(f"plan's largest that fits: {note}" for note in _divide(rows, [largest])[1])


def _divide(rows: int, sizes: Sequence[int]) -> tuple[list[tuple[int, ...]], tuple[str, ...]]:
    """For each wanted size what will be tried instead, and a note where that is not the size itself."""
    notes = []
    groups = []
    for size in sizes:
        if size < 1:
            raise ConfigError(f"micro-batch {size} is not a size", fix="use 1 or more", key="batch_size")
        near = nearest_divisors(rows, size)
        if near != (size,):
            spoken = " and ".join(str(other) for other in near)
            notes.append(f"{size} does not divide the {rows} rows of a step; nearest that do: {spoken}")
        groups.append(near)
    return groups, tuple(notes)
