"""The optimizers by name: what is known of each without torch. The code of each is in train/optimizers.py."""

from __future__ import annotations

from dataclasses import dataclass

from gptfit.shape import Kind


@dataclass(frozen=True)
class OptimizerFacts:
    """What an optimizer keeps between updates."""

    matrix_numbers: int = 2  # per weight of the blocks' matrices
    other_numbers: int = 2  # per weight of everything else

    def numbers(self, kind: Kind) -> int:
        return self.matrix_numbers if kind == "matrix" else self.other_numbers


OPTIMIZERS = {
    "adamw": OptimizerFacts(),  # two moments
    "muon": OptimizerFacts(matrix_numbers=1),  # one momentum for matrices, AdamW's two for the rest
}


def facts_of(optimizer: str) -> OptimizerFacts:
    """An unknown one is refused by the config check; `plan` still says what can be said about the rest."""
    return OPTIMIZERS.get(optimizer, OptimizerFacts())
