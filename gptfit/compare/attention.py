"""What a person should look at in one run, in a few words: stalled, diverging, overfitting, slower than planned, disk filling."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator, Sequence

from gptfit.compare.facts import RunFacts
from gptfit.compare.noise import eval_error
from gptfit.logs.events import Step
from gptfit.plan.resolve import on_card, setting_of
from gptfit.plan.speed import predict
from gptfit.units import gib

RECENT_STEPS = 10
DIVERGED_NATS = 0.5  # above its own best stretch; a healthy curve does not come back up by that much
FULL_DISK_CHECKPOINTS = 3  # room for so many more is the least a run should have
STALLED = {"silent": "stalled: the process lives and writes nothing", "crashed": "crashed: its process is gone"}


def needs_attention(facts: RunFacts, steps: Sequence[Step], status: str) -> list[str]:
    """Most urgent first; empty where all is well. A finished run has nothing left to slow down or to fill."""
    words = [STALLED[status]] if status in STALLED else []
    words += _diverging(steps)
    words += _overfitting(facts)
    if status == "running":
        words += [*_slow(facts), *_full_disk(facts)]
    return words


def _diverging(steps: Sequence[Step]) -> Iterator[str]:
    losses = [step.loss for step in steps if step.loss is not None]
    if len(losses) < 3 * RECENT_STEPS:
        return
    stretches = [
        statistics.median(losses[i : i + RECENT_STEPS]) for i in range(0, len(losses) - RECENT_STEPS + 1, RECENT_STEPS)
    ]
    now = statistics.median(losses[-RECENT_STEPS:])
    if now - min(stretches) > DIVERGED_NATS:
        yield f"diverging: loss {now:.2f} after {min(stretches):.2f}"


def _overfitting(facts: RunFacts) -> Iterator[str]:
    """Validation is above its best by more than chance while the training loss went on falling."""
    points = [
        (point.val_loss, point.train_loss, point.step)
        for point in facts.evals
        if point.val_loss is not None and point.train_loss is not None
    ]
    if len(points) < 3:
        return
    (best, train_then, step), (now, train_now, _) = min(points), points[-1]
    if now - best > 2 * eval_error(facts).nats and train_now < train_then:
        yield f"overfitting: validation was {best:.3f} at step {step:,}, is {now:.3f}"


def _slow(facts: RunFacts) -> Iterator[str]:
    """Below the lower end of what plan says for this card."""
    config, speed = facts.as_config(), facts.tokens_per_s
    if facts.gpu is None or facts.shape is None or config is None or speed is None:
        return
    planned = predict(setting_of(config, facts.shape, on_card(facts.gpu), facts.processes), facts.gpu)
    if planned and speed < planned.tokens_per_s.low:
        yield f"slower than planned: {100 * speed / planned.tokens_per_s.value:.0f} % of the tokens/s"


def _full_disk(facts: RunFacts) -> Iterator[str]:
    checkpoint = facts.path.parent / "ckpt.pt"
    try:
        free, size = shutil.disk_usage(facts.path.parent).free, checkpoint.stat().st_size
    except OSError:
        return
    if free < FULL_DISK_CHECKPOINTS * size:
        yield f"disk filling: {gib(free)} left, a checkpoint takes {gib(size)}"
