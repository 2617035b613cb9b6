"""The fault tests of training once more with the whole modern recipe, of which those that look at the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gptfit.config.keys import TrainConfig
from gptfit.config.recipe import SECOND_EDITION

# pytest collects them here, where `small_config` is the fixture below.
from tests.train.test_faults import (  # noqa: F401
    test_a_loss_that_is_not_finite_never_reaches_the_weights,
    test_a_signal_in_the_middle_of_a_step_loses_nothing,
    test_five_bad_steps_in_a_row_return_to_the_last_checkpoint_and_go_on_in_the_data,
    test_killed_at_random_moments_a_run_ends_with_the_same_weights,
    test_out_of_memory_shrinks_the_micro_batch_and_keeps_the_step,
)
from tests.train.test_modern_run import RECIPE

# With what is looked up and what is averaged: all state that a fault could spoil.
WHOLE = {
    **RECIPE,
    **SECOND_EDITION,
    "value_embeddings": "tables",
    "bigram": True,
    "lookahead": 0.6,
    "average_tail": 0.6,
}


@pytest.fixture
def small_config(small_config: Callable[..., TrainConfig]) -> Callable[..., TrainConfig]:
    def make(**changes: Any) -> TrainConfig:
        return small_config(**{**WHOLE, **changes})

    return make
