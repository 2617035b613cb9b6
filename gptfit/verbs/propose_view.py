"""A proposal on one screen: the choice, why, and the alternatives side by side."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from gptfit.config.recipe import MODERN_LIMITS
from gptfit.plan.candidates import Wish
from gptfit.plan.loss import Loss
from gptfit.plan.propose import Proposal, Proposals
from gptfit.plan.result import DataFacts
from gptfit.units import GIB, duration, si
from gptfit.verbs.common import console
from gptfit.verbs.next_commands import after_propose
from gptfit.verbs.plan_view import show as show_plan

if TYPE_CHECKING:
    from rich.table import Table


def show(proposals: Proposals, wish: Wish, written: Path | None, again: str) -> None:
    """`again`: the line that keeps the choice, where it was not written yet."""
    from rich.padding import Padding

    out = console()
    shapes = "candidate" if proposals.searched == 1 else "candidates"
    time = duration(3600 * wish.hours)
    out.print(f"Lowest expected loss of {proposals.searched} {shapes} for {wish.data.name} in {time}:", markup=False)
    out.print()
    show_plan(proposals.choice.plan)
    out.print()
    out.print(Padding(_lines("why", reasons(proposals, wish)), (0, 0, 0, 1)))
    out.print()
    out.print(Padding(_table(proposals), (0, 0, 0, 1)))
    remarks = _remarks(proposals)
    if remarks:
        out.print()
        out.print(Padding(_lines("note", remarks), (0, 0, 0, 1)))
    _print_next(proposals, wish, written, again)


def _lines(label: str, texts: list[str]) -> Table:
    """A label once, its sentences below each other."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(ratio=1)
    for number, text in enumerate(texts):
        table.add_row("" if number else label, Text(text))
    return table


def _table(proposals: Proposals) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    bits = not proposals.one_vocabulary
    for heading in (
        "shape",
        "recipe",
        "params",
        "GiB",
        "time",
        "epochs",
        *(["b/byte"] if bits else []),
        "loss",
        "range",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in (proposals.choice, *proposals.alternatives):
        table.add_row(*(Text(cell) for cell in _cells(row, bits)))
    return table


def _print_next(proposals: Proposals, wish: Wish, written: Path | None, again: str) -> None:
    out = console()
    if written is None:
        out.print(f"\n{again}", markup=False, soft_wrap=True)
        return
    out.print(f"\nWrote {written}.", markup=False, soft_wrap=True)
    out.print("Next:", markup=False)
    for line in after_propose(proposals.choice, wish, written):
        out.print(f"  {line}", markup=False, soft_wrap=True)


def reasons(proposals: Proposals, wish: Wish) -> list[str]:
    """What decided: time or data, and which of our keys it took."""
    plan = proposals.choice.plan
    ratio = plan.tokens / plan.shape.tied_parameters
    epochs = plan.epochs.value if plan.epochs else 0.0
    if plan.config.init_from != "scratch":
        lines = [f"GPT-2's weights, which have read 40 GB, read this text {epochs:.1f} times, at a small rate"]
    elif plan.seconds and plan.seconds.high < 0.9 * 3600 * wish.hours:
        data = f"{epochs:.0f} epochs of {si(wish.data.tokens.value)} tokens"
        lines = [f"the data decides: {data}; neither more epochs nor a larger model would help"]
    else:
        fresh = "all fresh" if epochs <= 1 else f"{epochs:.1f} epochs, repeats counted by the law"
        lines = [
            f"{ratio:.{0 if ratio > 1 else 2}f} tokens per parameter in the time, {fresh}",
            "a larger model would see too few tokens, a smaller one cannot use more",
        ]
    if plan.config.dropout:
        lines.append(
            f"dropout {plan.config.dropout:g}, weight decay {plan.config.weight_decay:g} and a stop when nothing is "
            "gained, since the data repeats"
        )
    tuned = next((row.plan.loss for row in proposals.alternatives if row.plan.config.init_from != "scratch"), None)
    if tuned and plan.loss and _is_lower(tuned, plan.loss):
        lines.append("from scratch; GPT-2's weights, which have read 40 GB, would probably end lower: --only weights")
    if plan.shape.arch == "modern":
        lines.append("the modern recipe has the lower loss; --only nanogpt proposes what stock nanoGPT trains")
    if proposals.choice.vocabulary and plan.data:
        lines.append(_vocabulary_line(proposals.choice.vocabulary, plan.data, bool(wish.shares)))
    if wish.source and find_spec("tokenizers") is None:
        lines.append("no vocabulary was learned from the file to compare: pip install 'gptfit[hf]' for that")
    if plan.config.chunked_loss is True:
        lines.append("the loss in chunks, so that the logits do not fill the card")
    if plan.config.checkpoint_activations:
        lines.append("activations recomputed: a third slower, but only so it fits")
    if plan.seconds and plan.seconds.high > plan.seconds.value:
        lines.append(f"at the slow end it takes {duration(plan.seconds.high)}; max_hours stops it at {wish.hours:g} h")
    return lines


def _vocabulary_line(size: int, data: DataFacts, is_measured: bool) -> str:
    assert data.bytes_per_token is not None
    assert data.gpt2_bytes_per_token is not None
    more = data.gpt2_bytes_per_token / data.bytes_per_token
    how = "measured on a sample" if is_measured else "usual for such text"
    tokens = f"{more:.2f} times GPT-2's tokens for the same text, {how}"
    return f"a vocabulary of its own, {size:,} entries: a smaller head for {tokens}"


def _is_lower(one: Loss, other: Loss) -> bool:
    """Across vocabularies."""
    return bool(one.bits_per_byte and other.bits_per_byte and one.bits_per_byte.value < other.bits_per_byte.value)


def _remarks(proposals: Proposals) -> list[str]:
    """What a row of the table does not show."""
    rows = (proposals.choice, *proposals.alternatives)
    lines = [f"{row.title}: {row.remark}" for row in rows if row.remark]
    is_said = proposals.choice.plan.shape.arch == "modern"  # by the plan
    if not is_said and any(row.plan.shape.arch == "modern" for row in rows):
        lines.append(f"modern: {MODERN_LIMITS}")
    return lines


def _cells(row: Proposal, bits: bool) -> list[str]:
    plan, shape = row.plan, row.plan.shape
    assert plan.memory is not None
    loss = plan.loss.loss if plan.loss else None
    per_byte = plan.loss.bits_per_byte if plan.loss else None
    return [
        row.title,
        f"{shape.n_layer}x{shape.n_embd}",
        shape.arch,
        si(shape.parameters),
        f"{plan.memory.device.value / GIB:.1f}",
        _short(plan.seconds.value) if plan.seconds else "unknown",
        f"{plan.epochs.value:.1f}" if plan.epochs else "",
        *([f"{per_byte.value:.2f}" if per_byte else ""] if bits else []),
        f"{loss.value:.2f}" if loss else "?",
        f"{loss.low:.1f}-{loss.high:.1f}" if loss else "",
    ]


def _short(seconds: float) -> str:
    """One unit, for a narrow column: '49 min', '2.6 h'."""
    for unit, scale in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.1f} {unit}" if seconds < 10 * scale else f"{seconds / scale:.0f} {unit}"
    return f"{seconds:.0f} s"
