"""The law for small runs against runs made here and published ones, and what must hold of it everywhere."""

from __future__ import annotations

import csv
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from gptfit.estimate import Estimate
from gptfit.plan.expected import expected_loss
from gptfit.plan.result import DataFacts
from gptfit.plan.small_loss import WIDTH, effective_bytes, nats_per_byte
from gptfit.shape import ModelShape


@dataclass(frozen=True)
class SmallRun:
    name: str
    block_parameters: int
    bytes_seen: float
    unique_bytes: float
    is_plain: bool
    loss: float

    @property
    def error(self) -> float:
        """Of the law, as a share of what was reached."""
        expected = nats_per_byte(self.block_parameters, self.bytes_seen, self.unique_bytes, self.is_plain)
        return expected / self.loss - 1


def small_runs() -> list[SmallRun]:
    with (Path(__file__).parent.parent / "losses_small.csv").open(encoding="utf-8") as file:
        return [
            SmallRun(
                row["name"],
                12 * int(row["n_layer"]) * int(row["n_embd"]) ** 2,
                float(row["bytes_seen"]),
                float(row["unique_bytes"]),
                row["recipe"] == "plain",
                float(row["nats_per_byte"]),
            )
            for row in csv.DictReader(file)
        ]


def test_nine_of_ten_runs_lie_within_the_range_that_is_shown() -> None:
    errors = [abs(run.error) for run in small_runs()]
    assert sum(error <= WIDTH for error in errors) >= 0.9 * len(errors)
    assert max(errors) < 1.2 * WIDTH


def test_on_one_text_it_is_much_closer() -> None:
    """What it is chosen by is how runs of one text differ."""
    errors = [run.error for run in small_runs() if "Shakespeare" in run.name]
    assert max(map(abs, errors)) < 0.08


@pytest.mark.parametrize("is_plain", [False, True])
def test_more_of_anything_is_never_worse(is_plain: bool) -> None:
    for parameters in (5e4, 5e6, 5e8):
        for seen in (2e5, 2e6, 2e8):
            here = nats_per_byte(parameters, seen, 1e6, is_plain)
            assert nats_per_byte(2 * parameters, seen, 1e6, is_plain) <= here
            assert nats_per_byte(parameters, 2 * seen, 1e6, is_plain) <= here
            assert nats_per_byte(parameters, seen, 2e6, is_plain) <= here
            assert nats_per_byte(parameters, seen, 1e6) <= here, "the modern recipe learns more of a byte"


def test_repeats_are_worth_less_and_less_and_never_more_than_fresh_bytes() -> None:
    worth = [effective_bytes(epochs * 1e6, 1e6) for epochs in (0.5, 1, 2, 4, 8, 100)]
    assert worth[:2] == [0.5e6, 1e6]
    assert worth == sorted(worth)
    gains = [(b - a) for a, b in itertools.pairwise(worth[1:])]
    assert gains[0] < 1e6
    assert gains[-1] < 0.1e6


def test_a_large_vocabulary_over_little_text_costs_what_was_measured() -> None:
    """2 x 96 over 108,000 bytes of Shakespeare for 8 epochs: 2.227 bits per byte by characters, 2.530 with GPT-2's 50,257."""
    bits = []
    for data in (
        DataFacts("characters", Estimate.exact(108_000), 61, "chars", 1.0),
        DataFacts("tokens", Estimate.exact(33_249), 50304, "gpt2", 108_000 / 33_249),
    ):
        shape = ModelShape(2, 3, 96, 256, data.vocab_size or 0, arch="modern", value_embeddings="projections")
        found = expected_loss(shape, 8 * data.tokens.value, data, optimizer="muon", weight_decay=0.4)
        assert found is not None
        assert found.bits_per_byte is not None
        bits.append(found.bits_per_byte.value)
    assert bits[1] - bits[0] == pytest.approx(2.530 - 2.227, abs=0.1)


def test_what_is_learned_by_heart_is_no_worse_than_guessing() -> None:
    """nanoGPT's defaults over Shakespeare's characters, 293,780 epochs, were thousands of nats and a traceback."""
    data = DataFacts("shakespeare_char", Estimate.exact(1_003_854), 65, "chars", 1.0)
    found = expected_loss(ModelShape(12, 12, 768, 1024, 65), 294.9e9, data)
    assert found is not None
    assert found.loss.value == pytest.approx(math.log(65))
    assert found.loss.low < found.loss.value < found.loss.high < 6
