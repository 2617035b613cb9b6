"""A comparison on the terminal: verdict, table, curves, sentences; plain text when piped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from gptfit.compare.axes import curve
from gptfit.compare.table import TextTable, equal_table, fact_rows, what_if_table
from gptfit.compare.terminal_curve import sketch
from gptfit.verbs.common import is_unbroken

if TYPE_CHECKING:
    from rich.console import Console

    from gptfit.compare.comparison import Comparison
    from gptfit.compare.sentences import Explanation

SKETCH_ROWS = 12


def print_comparison(out: Console, comparison: Comparison, explanation: Explanation) -> None:
    """Everything in one screen, the answer first."""
    out.print(Text(explanation.verdict, style="bold"))
    _print_sentences(out, explanation.first)
    _print_facts(out, comparison)
    _print_table(out, equal_table(comparison))
    _print_sketch(out, comparison)
    _print_sentences(out, explanation.sentences[len(explanation.first) :])
    _print_table(out, what_if_table(explanation.what_if))
    for i, run in enumerate(comparison.runs):
        for note in run.notes:
            out.print(Text(f"note on {comparison.letter(i)}: {note}", style="dim"), soft_wrap=is_unbroken())


def _print_facts(out: Console, comparison: Comparison) -> None:
    """Names that the screen has no room for side by side are told above the table, whose columns have letters."""
    letters = [comparison.letter(i) for i in range(len(comparison.runs))]
    names = [f"{letter}: {run.name}" for letter, run in zip(letters, comparison.runs, strict=True)]
    rows = fact_rows(comparison)
    columns = zip(["", *names], *rows, strict=True)
    if sum(max(len(cell) for cell in column) + 2 for column in columns) > out.width:
        out.print()
        for name in names:
            out.print(Text(name, style="bold"), soft_wrap=is_unbroken())
        names = letters
    _print_table(out, TextTable(["", *names], rows))


def _print_sentences(out: Console, sentences: tuple[str, ...]) -> None:
    if sentences:
        out.print()
    for sentence in sentences:
        out.print(Text(f"- {sentence}"), soft_wrap=is_unbroken())


def _print_table(out: Console, found: TextTable) -> None:
    if not found.rows:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, heading in enumerate(found.head):
        table.add_column(Text(heading), justify="right" if i else "left", overflow="fold")
    for row in found.rows:
        table.add_row(*(Text(cell) for cell in row))
    out.print()
    out.print(table)


def _print_sketch(out: Console, comparison: Comparison) -> None:
    if comparison.not_comparable:
        return
    curves = {comparison.letter(i): curve(run, "step", comparison.bpb) for i, run in enumerate(comparison.runs)}
    lines = sketch(curves, width=min(out.width, 100), height=SKETCH_ROWS, unit=comparison.unit)
    if lines:
        out.print()
        for line in lines:
            out.print(Text(line))
