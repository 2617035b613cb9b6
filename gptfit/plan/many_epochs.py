"""What keeps a model from memorising data it sees many times: dropout, weight decay, and when to stop."""

from __future__ import annotations

from typing import Any

from gptfit.config import recipe
from gptfit.plan import usual_values

STOP_SHARE = 0.5  # of the evaluations without a gain: later than the whole constant part of a wsd schedule


def keys_for_epochs(epochs: float, arch: str, evals: int, has_documents: bool) -> dict[str, Any]:
    """The keys of a run that sees its data so often; `evals` is how often it is evaluated."""
    keys: dict[str, Any] = {"weight_decay": usual_values.WEIGHT_DECAY, "dropout": usual_values.dropout(epochs)}
    if arch == "modern":
        keys = {"weight_decay": recipe.WEIGHT_DECAY, "dropout": 0.0} | recipe.many_epochs_keys(epochs, has_documents)
    if keys["dropout"]:
        keys["early_stop_evals"] = max(2, round(STOP_SHARE * evals))
    return keys
