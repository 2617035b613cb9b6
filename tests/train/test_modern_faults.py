"""The fault tests of training once more with the modern recipe, less two slow ones that never look at the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gptfit.config.keys import TrainConfig

# pytest collects them here, where `small_config` is the fixture below.
from tests.train.test_faults import (  # noqa: F401
    test_a_checkpoint_is_written_for_times_sake_between_rare_evals,
    test_a_loss_that_is_not_finite_never_reaches_the_weights,
    test_a_loss_that_never_becomes_finite_ends_the_run_with_advice,
    test_a_signal_in_the_middle_of_a_step_loses_nothing,
    test_five_bad_steps_in_a_row_return_to_the_last_checkpoint_and_go_on_in_the_data,
    test_killed_at_random_moments_a_run_ends_with_the_same_weights,
    test_max_hours_stops_saves_and_can_be_resumed,
    test_out_of_memory_at_a_micro_batch_of_one_gives_advice,
    test_out_of_memory_shrinks_the_micro_batch_and_keeps_the_step,
)
from tests.train.test_modern_run import RECIPE
from tests.train.test_resume import test_2n_steps_equal_n_plus_resume_plus_n  # noqa: F401


@pytest.fixture
def small_config(small_config: Callable[..., TrainConfig]) -> Callable[..., TrainConfig]:
    def make(**changes: Any) -> TrainConfig:
        return small_config(**{**RECIPE, **changes})

    return make
