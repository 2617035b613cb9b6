"""A step's seed: torch's own streams from it, on the CPU and on the card in use."""

from __future__ import annotations

import pytest
import torch

from gptfit.config.keys import TrainConfig
from gptfit.device.device import find_device
from tests.cuda_stand_in import Card, install


def test_the_cpus_stream_is_that_of_torchs_own_seed() -> None:
    find_device(TrainConfig(device="cpu")).seed(77)
    ours = torch.rand(5)
    torch.manual_seed(77)
    assert torch.equal(ours, torch.rand(5))


def test_a_card_and_the_cpu_are_both_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    card = install(monkeypatch, Card())
    device = find_device(TrainConfig(device="cuda", dtype="float32"))
    device.seed(78)
    assert card.seeds == [78]
    assert torch.initial_seed() == 78
