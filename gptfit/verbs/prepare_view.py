"""What `gptfit prepare` shows: the forecast, a progress bar that knows the total, the summary."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from gptfit.data.options import Forecast, PrepareOptions, PrepareProgress
from gptfit.dataset import DatasetInfo, Split
from gptfit.shell import command
from gptfit.units import count, duration, gib, percent, plural, si, times
from gptfit.verbs.common import wrapped
from gptfit.verbs.next_commands import after_prepare

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

# Chinchilla's rule of thumb (Hoffmann et al. 2022, table 3): about 20 training tokens per parameter.
TOKENS_PER_PARAMETER = 20
USUAL_SIZES = (("10M", 10e6), ("30M", 30e6), ("124M", 124e6), ("350M", 354e6))  # the last two are GPT-2's


class PrepareScreen:
    """The report prepare talks to: prints the forecast and notes, and keeps the bar moving."""

    def __init__(self, out: Console, options: PrepareOptions | None = None) -> None:
        self._out = out
        self._options = options
        self._bar: Bar | None = None

    def __enter__(self) -> PrepareScreen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def forecast(self, forecast: Forecast) -> None:
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        assert self._options is not None
        lines = forecast_lines(forecast, self._options)
        self._out.print("\n".join(wrapped(line, 10) for line in lines), markup=False, soft_wrap=True)
        columns = ("[progress.percentage]{task.percentage:>3.0f} %", "{task.fields[tokens]}", "{task.fields[rate]}")
        self._bar = Bar(
            BarColumn(),
            *(TextColumn(column) for column in columns),
            TimeRemainingColumn(),
            console=self._out,
            disable=not self._out.is_terminal,
        )
        self._task = self._bar.add_task("prepare", total=forecast.source_bytes, tokens="", rate="")
        self._bar.start()

    def progress(self, progress: PrepareProgress) -> None:
        if self._bar is None:
            return
        rate = f"{si(progress.tokens / progress.seconds)} tokens/s" if progress.seconds > 0 else ""
        tokens = f"{si(progress.tokens)} tokens"
        self._bar.update(self._task, completed=progress.source_bytes, tokens=tokens, rate=rate)

    def note(self, line: str) -> None:
        self._out.print(line, markup=False)


def forecast_lines(forecast: Forecast, options: PrepareOptions) -> list[str]:
    """Before work: what is there and what it will take."""
    rows = "documents not counted yet" if forecast.rows is None else plural(forecast.rows, "row")
    files = plural(forecast.files, "file")
    tokens = forecast.tokens
    split = forecast.split
    held_out = (
        f"the last {percent(split.fraction)} of the text is validation"
        if split.kind == "tail"
        else f"{percent(split.fraction, 2)} of the documents are validation, by hash with seed {split.seed}"
    )
    return [
        f"sources   {files}, {rows}, about {gib(forecast.text_bytes)} of text",
        f"tokens    about {si(tokens.value)} ({si(tokens.low)} to {si(tokens.high)}, from a sample), tokenizer {forecast.tokenizer}",
        f"disk      {gib(forecast.disk_needed)} needed in {options.out}, {gib(forecast.disk_free)} free",
        f"time      about {duration(max(forecast.seconds, 0.1))} with {plural(forecast.workers, 'worker')}",
        f"split     {held_out}",
    ]


def forecast_json(forecast: Forecast, options: PrepareOptions) -> dict[str, Any]:
    return {
        "out": str(options.out),
        "files": forecast.files,
        "rows": forecast.rows,
        "text_bytes": forecast.text_bytes,
        "tokens": forecast.tokens.as_json(),
        "tokenizer": forecast.tokenizer,
        "seconds": forecast.seconds,
        "disk_needed": forecast.disk_needed,
        "disk_free": forecast.disk_free,
        "split": {"kind": forecast.split.kind, "fraction": forecast.split.fraction, "seed": forecast.split.seed},
    }


def summary_lines(info: DatasetInfo) -> list[str]:
    """After work: what the folder holds, how far it goes, and the next command."""
    lines = [f"{info.folder}: {info.tokenizer} tokens, vocabulary {count(info.vocab_size or 0)}, {info.dtype}"]
    lines += [_split_line(name, split) for name, split in (("train", info.train), ("val", info.val)) if split]
    if info.bytes_per_token:
        lines.append(f"  {info.bytes_per_token:.2f} bytes of text per token")
    if info.val is None:
        lines.append("  no validation tokens: `train` needs them; prepare again with a larger --val-fraction")
    if info.chat:
        lines.append(f"  conversations in the template {info.chat}: only what the assistant says counts (docs/chat.md)")
        fine_tune = command(["gptfit", "train", "--init_from=RUN", f"--dataset={info.folder}"])
        lines.append(f"  to teach a run of yours: {fine_tune}")
    elif info.train and info.train.tokens:
        epochs = ", ".join(f"{name} {_epochs(size, info.train.tokens)}" for name, size in USUAL_SIZES)
        lines.append(f"  epochs to {TOKENS_PER_PARAMETER} tokens per parameter: {epochs}")
    return [*lines, *after_prepare(info)]


def _epochs(parameters: float, tokens: int) -> str:
    return times(TOKENS_PER_PARAMETER * parameters / tokens)


def _split_line(name: str, split: Split) -> str:
    documents = "" if split.documents is None else f" in {plural(split.documents, 'document')}"
    files = split.files[0].name if len(split.files) == 1 else plural(len(split.files), "file")
    counted = "" if split.counted is None else f", {count(split.counted)} of them count"
    return f"  {name:<5} {count(split.tokens):>15} tokens{documents}{counted}, {files}"
