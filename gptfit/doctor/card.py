"""`gptfit doctor --card` from outside: every check in a process of its own with a time limit, and what they came to."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from gptfit import __version__
from gptfit.config.keys import TrainConfig
from gptfit.doctor.calibration import MODULE, calibrate
from gptfit.doctor.card_checks import ALL, Check
from gptfit.doctor.verdict import COMPILE_PROBLEM, Verdict
from gptfit.errors import DeviceError
from gptfit.plan.calibration import Calibration, memory_of
from gptfit.plan.setting import Setting
from gptfit.plan.speed import from_calibration
from gptfit.shape import ModelShape
from gptfit.threads import ASLEEP
from gptfit.tune.measuring import find_machine, make_measure
from gptfit.tune.nursery import nursery
from gptfit.tune.space import base_variant
from gptfit.tune.trial_process import Ended, run_process
from gptfit.tune.trials import Candidate, Machine, timing_from_json
from gptfit.units import GIB, gib

CALIBRATION = "calibration"
PLAN = "plan against two runs"
# The model of the two short runs, none that calibration times.
CHECKED = ModelShape(n_layer=3, n_head=5, n_embd=320, block_size=192, vocab_size=4096)
CHECKED_BATCHES = (2, 8)
REPEAT = "close other programs and repeat; if it stays, please report card.json"
RUN_LIMIT_S, RUN_S = 90.0, 1.5
CARD_S, RUNS_S = 165.0, 15.0  # all of it, with room for a slower moment; its two runs
N_LINES = len(ALL) + 2  # with calibration and the plan against two runs


@dataclass(frozen=True)
class CardLine:
    """A check and its verdict, in the order they were asked for."""

    check: str
    verdict: Verdict
    seconds: float


@dataclass(frozen=True)
class CardReport:
    machine: Machine
    lines: tuple[CardLine, ...]
    calibration: Calibration | None
    seconds: float

    @property
    def has_error(self) -> bool:
        return any(line.verdict.level == "error" for line in self.lines)

    def as_json(self) -> dict[str, Any]:
        return {
            "gptfit": __version__,
            "python": platform.python_version(),
            "system": platform.platform(),
            "machine": asdict(self.machine),
            "seconds": self.seconds,
            "checks": [{"check": line.check, "seconds": line.seconds, **asdict(line.verdict)} for line in self.lines],
            "calibration": self.calibration.as_json() if self.calibration else None,
        }


Tell = Callable[[CardLine], None]


def examine_card(
    config: TrainConfig, tell: Tell = lambda line: None, on_stage: Callable[[str], None] = lambda stage: None
) -> CardReport:
    """Timed checks one after another; the others two at a time on a CPU, with a core each."""
    began = time.monotonic()
    with nursery(MODULE, {}) as alone:  # torch is imported there while this process asks for the machine
        machine = find_machine(config.replace(compile=False))  # whether it can compile is a check's to say
        lines = list(_told(_timed_checks(config, machine, alone, on_stage), tell))
        n_beside = 2 if machine.kind == "cpu" else 1
        with nursery(MODULE, ASLEEP) as beside, ThreadPoolExecutor(n_beside) as pool:
            lines += _told(_other_checks(config, machine, pool, beside, on_stage), tell)
        problems = (line.verdict.values.get(COMPILE_PROBLEM) for line in lines)
        machine = replace(machine, compile_problem=next(filter(None, problems), None))
        on_stage(CALIBRATION)
        left_s = began + CARD_S - RUNS_S - time.monotonic()
        line, found = _calibrate(config, machine, alone, on_stage, left_s)
        lines += _told(iter([line]), tell)
        if found:
            lines += _told(iter([_plan_against_runs(config, machine, found, on_stage)]), tell)
    return CardReport(machine, tuple(lines), found, time.monotonic() - began)


def _told(lines: Iterator[CardLine], tell: Tell) -> Iterator[CardLine]:
    for line in lines:
        tell(line)
        yield line


def _timed_checks(
    config: TrainConfig, machine: Machine, command: Sequence[str], on_stage: Callable[[str], None]
) -> Iterator[CardLine]:
    for check in ALL:
        if check.is_timed:
            on_stage(check.name)
            yield _check(check, config, machine, command)


def _other_checks(
    config: TrainConfig,
    machine: Machine,
    pool: ThreadPoolExecutor,
    command: Sequence[str],
    on_stage: Callable[[str], None],
) -> Iterator[CardLine]:
    """Told in their order, begun with those that take longest, so that none of them is left alone at the end."""
    others = [check for check in ALL if not check.is_timed]
    by_length = sorted(others, key=lambda check: -check.limit_s)
    waiting = {check.name: pool.submit(_check, check, config, machine, command) for check in by_length}
    for check in others:
        on_stage(check.name)
        yield waiting[check.name].result()


def _check(check: Check, config: TrainConfig, machine: Machine, command: Sequence[str]) -> CardLine:
    if machine.kind not in check.kinds:
        return CardLine(check.name, Verdict("skipped", check.why_not), 0.0)
    # Two at a time with two threads each would wait for each other's; compiled code is made for their number.
    is_beside = machine.kind == "cpu" and not check.is_timed
    threads = 1 if is_beside and check.one_thread else 0
    request = {"check": check.name, "config": config.as_dict(), "threads": threads}
    ended = run_process(request, check.limit_s, command=command)
    return CardLine(check.name, _verdict(ended), ended.duration_s)


def _verdict(ended: Ended) -> Verdict:
    if ended.outcome != "ok":
        return Verdict("error", f"the check did not finish: {ended.message}", REPEAT)
    values = ended.values
    return Verdict(values["level"], values["text"], values["remedy"], values["values"])


def _calibrate(
    config: TrainConfig, machine: Machine, command: Sequence[str], on_stage: Callable[[str], None], most_s: float
) -> tuple[CardLine, Calibration | None]:
    began = time.monotonic()
    try:
        found = calibrate(config, on_stage, machine, command, most_s)
    except DeviceError as error:
        return CardLine(CALIBRATION, Verdict("error", str(error), REPEAT), time.monotonic() - began), None
    text = f"what a step costs in {' and '.join(found.costs)}; `gptfit plan --gpu here` uses it"
    return CardLine(CALIBRATION, Verdict("ok", text), time.monotonic() - began), found


def _plan_against_runs(
    config: TrainConfig, machine: Machine, found: Calibration, on_stage: Callable[[str], None]
) -> CardLine:
    """Two micro-batches of a model that calibration did not see, as `tune` runs them."""
    began = time.monotonic()
    rows = []
    for micro_batch in CHECKED_BATCHES:
        on_stage(f"{PLAN}: micro-batch {micro_batch}")
        row = _short_run(config, machine, found, micro_batch)
        if isinstance(row, Verdict):
            return CardLine(PLAN, row, time.monotonic() - began)
        rows.append(row)
    worst = max(abs(row["speed_error"]) for row in rows)
    worst_memory = max(abs(row["memory_error"]) for row in rows)
    text = f"tokens/s within {worst:.0%}, memory within {worst_memory:.0%} of the plan at micro-batches 2 and 8"
    is_good = all(row["is_in_range"] for row in rows)
    verdict = Verdict("ok" if is_good else "warning", text, "" if is_good else REPEAT, {"runs": rows})
    return CardLine(PLAN, verdict, time.monotonic() - began)


def _short_run(config: TrainConfig, machine: Machine, found: Calibration, micro_batch: int) -> dict[str, Any] | Verdict:
    small = config.replace(
        n_layer=CHECKED.n_layer,
        n_head=CHECKED.n_head,
        n_embd=CHECKED.n_embd,
        block_size=CHECKED.block_size,
        vocab_size=CHECKED.vocab_size,
        batch_size=micro_batch,
        gradient_accumulation_steps=4,
        tokens_per_step=0,
        arch="gpt2",
        optimizer="adamw",
        dropout=0.0,
        compile=False,
        chunked_loss=False,
        checkpoint_activations=False,
    )
    measure = make_measure(small, CHECKED, machine, timed_s=RUN_S)
    ended = measure(Candidate(micro_batch, base_variant(small, machine)), False, RUN_LIMIT_S, lambda stage: None)
    if ended.outcome != "ok":
        return Verdict("error", f"a short run did not finish: {ended.message}", "see `gptfit doctor`")
    timing = timing_from_json(ended.values)
    setting = Setting(CHECKED, micro_batch, accumulation=4, dtype=machine.dtype, compile=False)
    seconds = (4 * timing.ms_per_micro_step + timing.ms_per_update) / 1e3
    return {"micro_batch": micro_batch, **_against_plan(setting, found, seconds, (timing.device_gib or 0.0) * GIB)}


def _against_plan(setting: Setting, found: Calibration, seconds: float, peak: float) -> dict[str, Any]:
    """What a step took beside what the calibrated plan says of it, and whether both are in the ranges it gives."""
    tokens_per_s = setting.tokens_per_step / seconds
    speed, memory = from_calibration(setting, found).tokens_per_s, memory_of(setting, found).device
    return {
        "tokens_per_s": tokens_per_s,
        "predicted_tokens_per_s": speed.value,
        "speed_error": speed.value / tokens_per_s - 1,
        "peak": gib(peak),
        "predicted_peak": gib(memory.value),
        "memory_error": memory.value / peak - 1 if peak else 0.0,
        "is_in_range": speed.low <= tokens_per_s <= speed.high and (not peak or memory.low <= peak <= memory.high),
    }
