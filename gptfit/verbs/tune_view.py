"""How a tuning session looks: a live table while it runs, then the answer, the curve and the table."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gptfit.config.keys import TrainConfig
from gptfit.shape import ModelShape
from gptfit.tune.measuring import Session
from gptfit.tune.rank import Score
from gptfit.tune.session import TuneResult
from gptfit.tune.space import Space
from gptfit.tune.trials import Candidate, Machine, Trial, Variant
from gptfit.units import GIB, count, duration, gib, percent, si
from gptfit.verbs.common import console, wrapped
from gptfit.verbs.ticker import Ticker

BAR = 26  # columns
INDENT = 6  # columns, of a sentence's second line
TEXTS = ("settings", "")  # columns of words
LEAST = ("allocated", "reserved", "trials", "MFU", "x steps", "+-")  # left out in this order where there is no room
OUTCOMES = {"oom": "out of memory", "timeout": "time limit", "crash": "crashed"}


def open_screen(
    ticker: Ticker, minutes: float, config: TrainConfig, shape: ModelShape, machine: Machine, space: Space
) -> TuneScreen:
    """Takes the place of what was said while the machine was looked at."""
    ticker.clear()
    return TuneScreen(config, shape, machine, space, minutes=minutes)


class TuneScreen:
    """The table as it grows on a terminal; one line per trial elsewhere."""

    def __init__(
        self, config: TrainConfig, shape: ModelShape, machine: Machine, space: Space, *, minutes: float
    ) -> None:
        self._began, self._limit_s = time.monotonic(), 60 * minutes
        self._console = console()
        self._session = Session(space)
        self._space = space
        self._now = self._stage = ""
        self._head = head_lines(config, shape, machine, space)
        self._live: Live | None = None

    def __enter__(self) -> TuneScreen:
        for line in self._head:
            self._console.print(wrapped(line, INDENT), markup=False, soft_wrap=True)
        if sys.stdout.isatty():
            self._live = Live(console=self._console, refresh_per_second=4, transient=True, get_renderable=self._screen)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def started(self, candidate: Candidate, round_number: int) -> None:
        again = f", round {round_number}" if round_number > 1 else ""
        self._now = (
            f"measuring micro-batch {candidate.micro_batch}{variant_words(candidate.variant, self._space.base)}{again}"
        )
        self._stage = ""

    def stage(self, name: str) -> None:
        self._stage = name

    def finished(self, trial: Trial, session: Session) -> None:
        self._session = session
        self._stage = ""
        if self._live is None:
            self._console.print(wrapped(trial_line(trial, session), INDENT), markup=False, soft_wrap=True)
            self._console.file.flush()

    def _screen(self) -> Group:
        """Drawn four times a second: the table so far, what is being measured, and how much of the time is over."""
        doing = Text(f"{self._now}{': ' + self._stage if self._stage else ''}", style="dim")
        return Group(
            score_table(self._session),
            doing,
            Text(time_line(time.monotonic() - self._began, self._limit_s), style="dim"),
        )


def time_line(seconds: float, limit_s: float) -> str:
    share = min(1.0, seconds / limit_s)
    left = f"{duration(limit_s - seconds)} left at most" if share < 1 else "ends after this trial"
    return f"{'━' * round(BAR * share):<{BAR}} {left}"


def head_lines(config: TrainConfig, shape: ModelShape, machine: Machine, space: Space) -> list[str]:
    sizes = f"{shape.n_layer} x {shape.n_embd}, T {shape.block_size}, vocabulary {count(shape.vocab_size)}"
    settings = [machine.dtype, "compiled" if space.base["compile"] else "eager", config.optimizer]
    work = space.workload
    step = f"{count(work.tokens_per_step)} tokens per step = {work.rows} rows of {work.block_size}"
    varied = " and ".join(["the micro-batch", *(axis.name for axis in space.axes)])
    return [
        f"tune: {si(shape.parameters)} parameters ({sizes}), {', '.join(settings)}, on {machine.device}",
        f"every trial: {step}; only {varied} may change",
        "",
    ]


def trial_line(trial: Trial, session: Session) -> str:
    """Where the candidate stands with this trial: the same figures as in the table."""
    candidate = trial.candidate
    label = f"micro-batch {candidate.micro_batch:>4}{variant_words(candidate.variant, session.space.base)}"
    if trial.timing is None:
        return f"{label}: {OUTCOMES[trial.outcome]}: {trial.message} ({duration(trial.duration_s)})"
    score = next(score for score in session.scores() if score.candidate == candidate)
    memory = f", {gib(score.memory_gib * GIB)}" if score.memory_gib is not None else ""
    return (
        f"{label}: {score.ms_per_micro_step:.1f} ms +-{percent(score.spread, 1)} per micro-step, "
        f"{si(score.tokens_per_s)} tokens/s{memory} (trial took {duration(trial.duration_s)})"
    )


def score_table(session: Session, result: TuneResult | None = None) -> Table:
    """Ascending in the micro-batch, the config's own settings first; what failed is a row too."""
    head, rows = _fitting(table_head(session), table_rows(session, result), console().width)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, width in _least_widths(head, rows).items():
        is_text = heading in TEXTS
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=not is_text, min_width=width)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row), style="bold" if row[-1].startswith("best") else None)
    return table


def _fitting(head: list[str], rows: list[list[str]], width: int) -> tuple[list[str], list[list[str]]]:
    """Without the columns that matter least, as many as it takes; texts may be broken between words."""
    widths = _least_widths(head, rows)
    for name in LEAST:
        if sum(widths.values()) + 2 * (len(widths) - 1) > width:
            widths.pop(name, None)
    kept = [i for i, name in enumerate(head) if name in widths]
    return [head[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _least_widths(head: list[str], rows: list[list[str]]) -> dict[str, int]:
    """Columns of the screen that each heading needs for its longest figure or word."""
    return {
        name: max(len(part) for cell in cells for part in (cell.split() or [""] if name in TEXTS else [cell]))
        for name, *cells in zip(head, head, *rows, strict=True)
    }


def table_head(session: Session) -> list[str]:
    varied = ["settings"] if session.space.axes else []
    memory = ["allocated", "reserved", "device"] if session.space.base.threads == 0 else ["memory"]
    return ["micro-batch", "x steps", *varied, "tokens/s", "+-", "ms", "MFU", *memory, "trials", ""]


def table_rows(session: Session, result: TuneResult | None = None) -> list[list[str]]:
    scores = {score.candidate: score for score in session.scores()}
    failures = {t.candidate: t for t in session.trials if t.timing is None and t.candidate not in scores}
    best = session.best()
    base = session.space.base
    rows = []
    for candidate in sorted({*scores, *failures}, key=lambda c: (c.variant != base, str(c.variant), c.micro_batch)):
        varied = [variant_words(candidate.variant, base).strip() or "as configured"] if session.space.axes else []
        start = [str(candidate.micro_batch), str(session.space.workload.accumulation(candidate.micro_batch)), *varied]
        if candidate in scores:
            rows.append([*start, *_score_cells(scores[candidate], session, best, result)])
        else:
            blank = len(table_head(session)) - len(start) - 1
            rows.append([*start, *[""] * blank, OUTCOMES[failures[candidate].outcome]])
    return rows


def _score_cells(score: Score, session: Session, best: Score | None, result: TuneResult | None) -> list[str]:
    timing = score.timing
    mfu = result.mfu(score) if result else None
    sizes = [timing.allocated_gib, timing.reserved_gib, timing.device_gib]
    memory = sizes if session.space.base.threads == 0 else [score.memory_gib]
    remark = ""
    if best is not None and score.candidate == best.candidate:
        remark = "best"
    elif not score.fits(session.space.limit_gib):
        remark = "no head-room"
    elif best is not None:
        remark = f"{100 * (score.tokens_per_s / best.tokens_per_s - 1):+.0f} %"
    return [
        si(score.tokens_per_s),
        percent(score.spread, 1),
        f"{score.ms_per_micro_step:.1f}",
        percent(mfu) if mfu is not None else "",
        *(gib(value * GIB) if value is not None else "" for value in memory),
        str(score.trials),
        remark,
    ]


def print_result(result: TuneResult, answer: Sequence[str]) -> None:
    """The table, the curve, and the answer in words."""
    out = console()
    out.print()
    out.print(score_table(result.session, result))
    out.print()
    for line in curve_lines(result.scores, result.session):
        out.print(line, markup=False)
    out.print()
    for line in answer:
        out.print(wrapped(line, INDENT), markup=False, soft_wrap=True)


def curve_lines(scores: Sequence[Score], session: Session) -> list[str]:
    """Bars of tokens/s and memory against the micro-batch."""
    variant = session.main_variant()
    curve = sorted((s for s in scores if s.candidate.variant == variant), key=lambda s: s.candidate.micro_batch)
    if not curve:
        return []
    fastest = max(score.tokens_per_s for score in curve)
    largest = max((score.memory_gib or 0.0) for score in curve)
    lines = [f"micro-batch  {'tokens/s':<{BAR + 8}}  memory"]
    for score in curve:
        memory = score.memory_gib
        speed_bar = _bar(score.tokens_per_s / fastest)
        memory_bar = f"{_bar(memory / largest, BAR // 2)} {gib(memory * GIB)}" if memory and largest else "unknown"
        lines.append(f"{score.candidate.micro_batch:>11}  {speed_bar:<{BAR}} {si(score.tokens_per_s):<7}  {memory_bar}")
    return lines


def _bar(share: float, columns: int = BAR) -> str:
    """Eighths of a character, so that 3 % can be seen."""
    eighths = round(share * columns * 8)
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


def variant_words(variant: Variant, base: Variant) -> str:
    """What differs from the config's own settings: ' threads=1'."""
    own = base.as_dict()
    return "".join(f" {name}={value}" for name, value in variant.as_dict().items() if value != own[name])
