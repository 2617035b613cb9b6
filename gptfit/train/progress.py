"""Progress: how far a run is, as it lives in memory and in the checkpoint."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from gptfit.train import overfitting
from gptfit.train.randomness import RngState

NANOGPT_NO_LOSS = 1e9  # nanoGPT's best_val_loss before the first eval


@dataclass
class Progress:
    """Counted at the beginning of `step`. What a checkpoint needs beyond nanoGPT's keys."""

    step: int = 0
    best_val_loss: float = NANOGPT_NO_LOSS
    best_step: int = 0
    seconds: float = 0.0  # of training steps
    wall_seconds: float = 0.0  # with everything
    tokens: int = 0
    window: int = 0  # position in the data, in windows
    evaluated_step: int = -1
    evals_without_gain: int = 0
    rises: int = 0  # evals in a row where val rose while train fell
    last_train_loss: float | None = None
    last_val_loss: float | None = None

    def record_eval(self, train_loss: float, val_loss: float) -> bool:
        """Whether this is the best model so far."""
        before = (self.last_train_loss, self.last_val_loss)
        self.rises = self.rises + 1 if overfitting.moved_apart(before, (train_loss, val_loss)) else 0
        self.last_train_loss, self.last_val_loss = train_loss, val_loss
        self.evaluated_step = self.step
        is_best = val_loss < self.best_val_loss
        if is_best:
            self.best_val_loss, self.best_step = val_loss, self.step
        self.evals_without_gain = 0 if is_best else self.evals_without_gain + 1
        return is_best

    @property
    def starts_overfitting(self) -> bool:
        return overfitting.is_noticed(self.rises)

    def as_saved(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_saved(cls, saved: dict[str, Any]) -> Progress:
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in saved.items() if key in known})


@dataclass
class StepStart:
    """What a step draws from, kept so that it can be done again or saved after it was given up half-way."""

    rng: RngState = field(default_factory=dict)
    drawn: list[int] = field(default_factory=list)
