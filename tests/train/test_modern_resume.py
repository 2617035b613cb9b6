"""Two parts as one run with the modern recipe, of which only what does not depend on the horizon: the parts have two.

Momentum, the decay's share and lookahead follow `max_iters`; a stop in the middle of one horizon is in
test_second_edition.py and test_modern_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gptfit.config.keys import TrainConfig
from tests.train.test_modern_run import RECIPE
from tests.train.test_resume import test_2n_steps_equal_n_plus_resume_plus_n  # noqa: F401

pytestmark = pytest.mark.slow  # a stop in the middle, in the two files above, is in `make test`


@pytest.fixture
def small_config(small_config: Callable[..., TrainConfig]) -> Callable[..., TrainConfig]:
    def make(**changes: Any) -> TrainConfig:
        return small_config(**{**RECIPE, **changes})

    return make
