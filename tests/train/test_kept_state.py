"""Optimizer state in 8 bits or in host memory: the same training, and a checkpoint that any way of keeping can go on from."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from gptfit.config.keys import TrainConfig
from gptfit.device.device import Device, find_device
from gptfit.schedule import knobs
from gptfit.train import kept_state
from gptfit.train.engine import Engine, build_engine
from gptfit.train.kept_state import KeptStateOptimizer
from gptfit.train.optimizers import make_optimizer
from gptfit.train.packed import BLOCK, pack, unpack
from gptfit.train.parts import entries

RECIPES: dict[str, dict[str, Any]] = {
    "adamw": {"arch": "gpt2", "learning_rate": 1e-2},
    "muon": {"arch": "modern", "learning_rate": 2e-2},
}


def make_engine(optimizer: str, is_8bit: bool = False, is_on_host: bool = False, **changes: Any) -> Engine:
    torch.manual_seed(0)
    values = {
        "n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 32, "batch_size": 4, "vocab_size": 128,
        "device": "cpu", "dtype": "float32", "compile": False,
        "warmup_iters": 0, "max_iters": 100, "lr_decay_iters": 100, "min_lr": 1e-4,
        "optimizer_state": "8bit" if is_8bit else "float32", "optimizer_device": "cpu" if is_on_host else "auto",
    }  # fmt: skip
    config = TrainConfig(**{**values, "optimizer": optimizer, **RECIPES[optimizer], **changes})
    return build_engine(config, config.shape(), find_device(config))


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 128, (4, 33), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def losses(engine: Engine, first: int, last: int) -> list[float]:
    found = []
    for step in range(first, last):
        loss = engine.forward_micro_step(batch(step % 3), True)
        engine.backward_micro_step(loss, 1)
        found.append(engine.update(loss.detach(), 1, knobs(engine.config, step)).loss)
    return found


@pytest.fixture(autouse=True)
def several_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few weights at once that these small models need several groups."""
    monkeypatch.setattr(kept_state, "WEIGHTS_AT_ONCE", 20_000)


@pytest.mark.parametrize("optimizer", RECIPES)
def test_state_in_host_memory_changes_no_number(optimizer: str) -> None:
    assert losses(make_engine(optimizer, is_on_host=True), 0, 10) == losses(make_engine(optimizer), 0, 10)


@pytest.mark.parametrize("optimizer", RECIPES)
def test_state_in_8_bits_learns_as_float32_does(optimizer: str) -> None:
    plain, packed = losses(make_engine(optimizer), 0, 40), losses(make_engine(optimizer, is_8bit=True), 0, 40)
    assert packed == pytest.approx(plain, abs=0.05)  # of losses from 4.9 down to near 0
    assert packed != plain


@pytest.mark.parametrize("optimizer", RECIPES)
@pytest.mark.parametrize("saved_in", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("resumed_in", [(False, False), (True, True)])
def test_a_checkpoint_resumes_with_any_way_of_keeping(
    optimizer: str, saved_in: tuple[bool, bool], resumed_in: tuple[bool, bool]
) -> None:
    first = make_engine(optimizer, *saved_in)
    losses(first, 0, 4)
    second = make_engine(optimizer, *resumed_in)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    expected = losses(first, 4, 8)
    went_on = losses(second, 4, 8)
    if saved_in[0] == resumed_in[0]:  # the same digits, wherever they are kept
        assert went_on == expected
    else:
        assert went_on == pytest.approx(expected, abs=0.02)


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors on `meta`, which stands in for a card, took at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.device.type == "meta" and not func.is_view:
            self._add(made.nbytes)
            weakref.finalize(made, self._add, -made.nbytes)
        return made

    def _add(self, n_bytes: int) -> None:
        self.now += n_bytes
        self.most = max(self.most, self.now)


def on_a_card(optimizer: str, is_8bit: bool, is_on_host: bool) -> tuple[KeptStateOptimizer, dict[str, Any]]:
    """An optimizer whose weights are on `meta`, and state as a checkpoint has it for them."""
    plain = make_engine(optimizer, n_layer=24)
    losses(plain, 0, 1)
    card = Device(torch.device("meta"), "a card", "float32")
    parameters = {name: torch.nn.Parameter(p.detach().to("meta")) for name, p in plain.model.named_parameters()}
    ways = {"optimizer_state": "8bit" if is_8bit else "float32", "optimizer_device": "cpu" if is_on_host else "auto"}
    made = make_optimizer(plain.model, plain.config.replace(**ways), card, parameters=parameters)
    assert isinstance(made, KeptStateOptimizer)
    return made, plain.optimizer.state_dict()


def large(saved: dict[str, Any]) -> dict[tuple[int, str], torch.Tensor]:
    return {(number, name): value for number, name, value in entries(saved) if value.dim() > 0}


@pytest.mark.parametrize("optimizer", RECIPES)
@pytest.mark.parametrize("is_8bit", [False, True])
def test_state_in_host_memory_never_comes_back_to_the_card_to_be_saved_or_resumed(
    optimizer: str, is_8bit: bool
) -> None:
    made, saved = on_a_card(optimizer, is_8bit, is_on_host=True)
    with LiveBytes() as card:
        made.load_state_dict(saved)
        again = made.state_dict()
    assert card.most < 1_000  # counts of steps
    assert large(again).keys() == large(saved).keys()
    for key, value in large(again).items():
        torch.testing.assert_close(value, large(saved)[key], rtol=0, atol=0.01 * float(large(saved)[key].abs().max()))
    if not is_8bit:
        first = next(iter(large(again)))
        kept = large(made.state_dict())[first]
        assert kept.data_ptr() == large(again)[first].data_ptr()  # no copy of what is in host memory already


@pytest.mark.parametrize("optimizer", RECIPES)
def test_8_bit_state_on_the_card_is_resumed_weight_by_weight_and_saved_on_the_host(optimizer: str) -> None:
    made, saved = on_a_card(optimizer, is_8bit=True, is_on_host=False)
    sizes = [value.nbytes for value in large(saved).values()]
    with LiveBytes() as card:
        made.load_state_dict(saved)
    # One weight's numbers and what packing them takes, not those of all.
    assert card.most < made.kept_bytes() + 10 * max(sizes) < 0.6 * sum(sizes)
    with LiveBytes() as card, pytest.raises(NotImplementedError, match="meta"):  # there is nothing to be read on it
        made.state_dict()
    assert card.most == 0


@pytest.mark.parametrize("optimizer", RECIPES)
def test_state_in_8_bits_is_a_quarter_as_large(optimizer: str) -> None:
    plain, packed = make_engine(optimizer, is_on_host=True), make_engine(optimizer, is_8bit=True)
    for engine in (plain, packed):
        losses(engine, 0, 1)
    small = sum(p.numel() for p in packed.model.parameters() if p.numel() < kept_state.SMALLEST_PACKED)
    kept = packed.optimizer.kept_bytes()  # type: ignore[attr-defined]
    assert kept - 8 * small < 0.27 * plain.optimizer.kept_bytes()  # type: ignore[attr-defined]


@pytest.mark.parametrize("optimizer", RECIPES)
def test_16_bit_gradients_learn_as_float32_ones_do_and_stay_16_bit(optimizer: str) -> None:
    plain, narrow = make_engine(optimizer), make_engine(optimizer, gradient_dtype="bfloat16")
    assert losses(narrow, 0, 30) == pytest.approx(losses(plain, 0, 30), abs=0.05)
    loss = narrow.forward_micro_step(batch(0), True)
    narrow.backward_micro_step(loss, 1)
    kinds = {weight.name: weight.kind for weight in narrow.model.shape.weights()}
    for name, parameter in narrow.model.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad.dtype == torch.bfloat16) == (kinds[name] == "matrix"), name


def test_64_gradients_added_in_16_bits_err_by_little() -> None:
    plain, narrow = make_engine("adamw"), make_engine("adamw", gradient_dtype="bfloat16")
    for engine in (plain, narrow):
        for step in range(64):
            engine.backward_micro_step(engine.forward_micro_step(batch(step), False), 64)
    errors = [
        (q.grad.float() - p.grad).norm() / p.grad.norm()
        for p, q in zip(plain.model.parameters(), narrow.model.parameters(), strict=True)
        if p.grad is not None and q.grad is not None
    ]
    assert max(errors) < 0.03


@given(
    values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=2 * BLOCK + 3),
    is_square=st.booleans(),
)
def test_packing_again_gives_the_same_codes_and_errs_by_little(values: list[float], is_square: bool) -> None:
    tensor = torch.tensor(values).square() if is_square else torch.tensor(values)
    packed = pack(tensor, is_square)
    once = unpack(packed)
    again = pack(once, is_square)
    assert torch.equal(again.codes, packed.codes)
    assert torch.equal(unpack(again), once)
    largest = tensor.abs().amax()
    # Half a code at the largest number: (1 - 1 / (2 * 127))^2 or (1 - 1 / (2 * 255))^4 of it.
    assert (once - tensor).abs().amax() <= 0.0081 * largest + 1e-30


def test_a_mean_square_never_becomes_zero() -> None:
    tensor = torch.full((BLOCK,), 1e-20)
    tensor[0] = 1.0
    assert unpack(pack(tensor, is_square=True)).min() > 0
