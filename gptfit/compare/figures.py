"""The four figures a run's page opens with: validation, progress, speed, and where it ends."""

from __future__ import annotations

from typing import NamedTuple

from gptfit.compare.facts import RunFacts
from gptfit.compare.planned_loss import planned_loss
from gptfit.compare.projection import project_loss
from gptfit.estimate import Estimate
from gptfit.units import count, duration, percent, perplexity, si


class Figure(NamedTuple):
    """A large figure, what it is, and a few words beside it."""

    name: str
    value: str
    words: str = ""


def four_figures(facts: RunFacts) -> list[Figure]:
    """What is not known is left out."""
    found = [_validation(facts), _progress(facts), _speed(facts), _ending(facts)]
    return [figure for figure in found if figure]


def _validation(facts: RunFacts) -> Figure | None:
    in_bits = facts.is_in_bits
    known = [(loss, point) for point in facts.evals if (loss := facts.validation(point, in_bits)) is not None]
    if not known:
        return None
    last, at = known[-1]
    best, step = min((loss, point.step) for loss, point in known)
    beside = f"best {best:.4f} at step {count(step)}" if best < last else "the best so far"
    if at.val_loss is not None:
        beside += f"; {at.val_loss:.4f} nats per token" if in_bits else f"; perplexity {si(perplexity(last))}"
    return Figure("validation, bits per byte" if in_bits else "validation loss", f"{last:.4f}", beside)


def _progress(facts: RunFacts) -> Figure | None:
    wanted, step = facts.max_iters, facts.last_step
    if not wanted:
        return Figure("steps", count(step), f"{duration(facts.seconds)} of training" if facts.seconds else "")
    if step >= wanted - 1 or facts.ended == "max_iters":
        return Figure("progress", "100 %", f"{count(wanted)} steps in {duration(facts.seconds or 0)}")
    left = (wanted - step) * facts.ms_per_step / 1000 if facts.ms_per_step else None
    return Figure(
        "progress",
        percent(step / wanted),
        f"step {count(step)} of {count(wanted)}" + (f", {duration(left)} left" if left else ""),
    )


def _speed(facts: RunFacts) -> Figure | None:
    if not facts.tokens_per_s:
        return None
    mfu = f"MFU {percent(facts.mfu)}, " if facts.mfu else ""
    card = facts.gpu.name if facts.gpu else facts.device_name or "unknown device"
    return Figure("tokens per second", si(facts.tokens_per_s), f"{mfu}{card}")


def _ending(facts: RunFacts) -> Figure | None:
    """Where the curve goes, beside what plan says; of a finished run what plan said, and how far off it was."""
    if facts.is_bpb:
        return None
    plan, wanted = planned_loss(facts), facts.max_iters
    heading = project_loss(facts, wanted) if wanted and not facts.is_over else None
    if facts.is_in_bits:  # as the validation beside it
        scale = facts.bits_per_byte_per_nat or 1.0
        plan, heading = (loss.map(scale) if loss else None for loss in (plan, heading))
    if heading:
        return Figure("heading for", f"{heading.value:.2f}", f"{_range(heading)}{_plan_words(plan)}")
    if plan:
        return Figure("plan said" if facts.is_over else "plan says", f"{plan.value:.2f}", f"{_range(plan)} at the end")
    return Figure("peak memory", f"{facts.memory_gib:.1f} GiB") if facts.memory_gib else None


def _range(loss: Estimate) -> str:
    return f"{loss.low:.2f} to {loss.high:.2f}"


def _plan_words(plan: Estimate | None) -> str:
    return f"; plan said {plan.value:.2f} ({_range(plan)})" if plan else ""
