"""A proposal on one screen: the choice, why, and the alternatives side by side."""

from __future__ import annotations

from pathlib import Path

from gptfit.plan.propose import MOST_EPOCHS, Proposal, Proposals, Wish
from gptfit.units import GIB, duration, si
from gptfit.verbs.common import console
from gptfit.verbs.plan_view import show as show_plan


def show(proposals: Proposals, wish: Wish, written: Path | None) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    out = console()
    shapes = "shape" if proposals.searched == 1 else "shapes"
    out.print(
        f"Lowest expected loss of {proposals.searched} {shapes} for {wish.data.name} in {duration(3600 * wish.hours)}:",
        markup=False,
    )
    out.print()
    show_plan(proposals.choice.plan)
    out.print()
    for line in reasons(proposals, wish):
        out.print(f" why: {line}", markup=False)
    out.print()
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for heading in ("shape", "params", "B x acc", "GiB", "tok/s", "time", "tokens", "loss"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in (proposals.choice, *proposals.alternatives):
        table.add_row(*(Text(cell) for cell in _cells(row)))
    out.print(Padding(table, (0, 0, 0, 1)))
    if written:
        out.print(f"\nWrote {written}. Next: gptfit train {written}", markup=False)
    else:
        out.print("\nAdd --write configs/mine.py to keep the choice as a config file.", markup=False)


def reasons(proposals: Proposals, wish: Wish) -> list[str]:
    """What decided: time or data, and which of our keys it took."""
    plan = proposals.choice.plan
    ratio = plan.tokens / plan.shape.tied_parameters
    if plan.epochs and plan.epochs.value >= 0.99 * MOST_EPOCHS:
        lines = [
            f"the data ends first: {MOST_EPOCHS:g} epochs of {si(wish.data.tokens.value)} tokens, no more is planned"
        ]
    else:
        fresh = "all fresh" if plan.epochs and plan.epochs.value <= 1 else "repeats counted by the law"
        lines = [
            f"{ratio:.0f} tokens per parameter in the time, {fresh}",
            "a larger model would see too few tokens, a smaller one cannot use more",
        ]
    if plan.config.chunked_loss is True:
        lines.append("the loss in chunks, so that the logits do not fill the card")
    if plan.config.checkpoint_activations:
        lines.append("activations recomputed: a third slower, but only so it fits")
    return lines


def _cells(row: Proposal) -> list[str]:
    plan = row.plan
    shape, config = plan.shape, plan.config
    assert plan.speed is not None
    assert plan.memory is not None
    assert plan.seconds is not None
    accumulation = plan.setting.accumulation if plan.setting else 0
    loss = f"{plan.loss.loss.value:.2f}" if plan.loss else "unknown"
    return [
        row.title,
        f"{shape.n_layer}x{shape.n_embd}",
        si(shape.parameters),
        f"{config.batch_size}x{accumulation}",
        f"{plan.memory.device.value / GIB:.1f}",
        si(plan.speed.tokens_per_s.value),
        duration(plan.seconds.value),
        si(plan.tokens),
        loss,
    ]
