"""From seconds of whole models back to what a unit of each kind of work costs."""

from __future__ import annotations

from random import Random

import pytest
import torch
from scipy.optimize import nnls

from gptfit.doctor.fit_costs import Observed, fit_costs, nonnegative
from gptfit.doctor.whole_models import Drawn, drawn
from gptfit.plan.step_work import Work, joined, kinds_of_work, micro_work, update_work
from gptfit.plan.untimed_cpu import UNTIMED

# A device made up: as fast as a processor of today, with costs that differ from kind to kind.
TRUTH = {kind: 1.0 + i / 10 for i, kind in enumerate(sorted(kinds_of_work()[0]))}
SCALES = {"token x weight": 2e-11, "token x entry": 1e-9, "token x channel": 1e-8, "layer": 4e-4, "micro-step": 1e-3}


def cost(kind: str) -> float:
    """Products, passes over memory, and what every layer takes, each in its own order of size."""
    if "position" in kind:
        return 5e-11 * TRUTH[kind]
    return TRUTH[kind] * next((scale for name, scale in SCALES.items() if name in kind), 1e-9)


def seconds(work: Work) -> float:
    return sum(amount * cost(kind) for kind, amount in work.items())


def models(seed: int, count: int) -> list[Drawn]:
    """As calibration draws them, one in five with a loss in chunks."""
    source = drawn(Random(seed))
    return [next(m for m in source if m.is_chunked == (i % 5 == 4)) for i in range(count)]


def samples(seed: int, count: int) -> list[Observed]:
    works = [joined(micro_work(model.setting("float32"))) for model in models(seed, count)]
    return [Observed(work, seconds(work)) for work in works]


def worst(costs: dict[str, float], seed: int = 77) -> float:
    """Relative error for models that were not timed."""
    works = [joined(micro_work(model.setting("float32"))) for model in models(seed, 60)]
    return max(abs(sum(amount * costs[kind] for kind, amount in work.items()) / seconds(work) - 1) for work in works)


def test_models_that_were_not_timed_take_what_the_timed_ones_say() -> None:
    assert worst(fit_costs(samples(1, 40))) < 0.01


def test_noise_of_a_few_percent_is_averaged_and_not_passed_on() -> None:
    random = Random(5)
    noisy = [Observed(s.work, s.seconds * random.gauss(1, 0.04)) for s in samples(1, 60)]
    works = [joined(micro_work(model.setting("float32"))) for model in models(77, 60)]
    costs = fit_costs(noisy)
    errors = sorted(abs(sum(a * costs[kind] for kind, a in work.items()) / seconds(work) - 1) for work in works)
    assert errors[30] < 0.03


def test_a_model_timed_beside_a_busy_neighbour_changes_little() -> None:
    """Timed three times too slow: one of forty."""
    good = samples(1, 40)
    disturbed = [*good[:20], Observed(good[20].work, 3 * good[20].seconds), *good[21:]]
    assert worst(fit_costs(disturbed)) < 0.05


def test_few_models_still_give_a_cost_that_is_of_the_right_size() -> None:
    """A format without units of its own may be so slow that ten are all there is time for."""
    costs = fit_costs(samples(1, 10))
    assert set(costs) == kinds_of_work()[0]
    assert min(costs.values()) >= 0
    works = [joined(micro_work(model.setting("float32"))) for model in models(77, 60)]
    ratios = sorted(sum(a * costs[kind] for kind, a in work.items()) / seconds(work) for work in works)
    assert 0.7 < ratios[30] < 1.4


@pytest.mark.parametrize("seed", range(20))
def test_nonnegative_least_squares_are_those_of_scipy(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    columns = int(torch.randint(1, 16, (1,), generator=generator))
    a = torch.randn(30, columns, generator=generator).double()
    b = torch.randn(30, generator=generator).double()
    if seed % 3 == 0:
        a[:, -1] = a[:, 0]  # two kinds of work that no model tells apart
    x = nonnegative(a, b)
    expected, left = nnls(a.numpy(), b.numpy())
    assert float((a @ x - b).norm()) == pytest.approx(left, rel=1e-9)
    assert float(x.min()) >= 0
    if seed % 3:
        assert x.tolist() == pytest.approx(expected.tolist(), abs=1e-9)


def test_every_weight_is_updated_once() -> None:
    """Muon takes the matrices of the blocks, AdamW all others."""
    for model in models(3, 30):
        work, shape = update_work(model.setting("float32")), model.shape
        assert work["adamw: weight"] + work["muon: weight"] == shape.n_weights
        assert (work["muon: weight"] > 0) == (model.optimizer == "muon")


def test_a_cpu_that_was_not_timed_has_no_costs_and_so_no_speed_of_its_own() -> None:
    assert not UNTIMED.knows(models(3, 1)[0].setting("float32"))
