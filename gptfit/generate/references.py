"""Known results to read a result against, each with its source."""

from __future__ import annotations

from dataclasses import dataclass

from gptfit.plan.loss import dataset_kind


@dataclass(frozen=True)
class Reference:
    """`metric` is 'loss' on a data set, or a task's metric."""

    what: str  # data set or task
    metric: str
    model: str
    value: float
    source: str


REFERENCES = (
    Reference("openwebtext", "loss", "GPT-2 124M as released", 3.12, "nanoGPT README, zero-shot val loss"),
    Reference("openwebtext", "loss", "GPT-2 124M fine-tuned on it", 2.85, "nanoGPT README"),
    Reference("openwebtext", "loss", "GPT-2 350M as released", 2.84, "nanoGPT README"),
    Reference("openwebtext", "loss", "GPT-2 774M as released", 2.67, "nanoGPT README"),
    Reference("openwebtext", "loss", "GPT-2 1558M as released", 2.54, "nanoGPT README"),
    Reference("fineweb", "loss", "nanoGPT speedrun target, 124M", 3.28, "modded-nanogpt README"),
    Reference("shakespeare_char", "loss", "nanoGPT 10.65M, 5000 iterations", 1.4697, "nanoGPT README"),
    Reference("hellaswag", "acc", "GPT-2 124M as released", 0.2859, "build-nanogpt hellaswag.py, completion style"),
    Reference(
        "hellaswag", "acc_norm", "GPT-2 124M as released", 0.2955, "build-nanogpt hellaswag.py, completion style"
    ),
)


def references(what: str, metric: str) -> tuple[Reference, ...]:
    """Those for a data set or task by a part of its name: 'openwebtext_10k' finds openwebtext, FineWeb-Edu not FineWeb."""
    kind = dataset_kind(what)
    return tuple(
        row for row in REFERENCES if row.metric == metric and (row.what == kind if kind else row.what in what.lower())
    )
