"""The allocator's rules, and the plan's count of tensors against them; slow: against code Inductor generates now."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from gptfit.plan import memory
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape
from gptfit.units import MIB

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    sys.path.insert(0, str(BENCH))
    try:
        names = ("_allocator", "_lifetimes", "replay")
        yield SimpleNamespace(**{name.strip("_"): importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(BENCH))


def test_sizes_are_rounded_to_512_bytes_and_segments_as_torch_documents(bench: SimpleNamespace) -> None:
    """https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management and CUDACachingAllocator.cpp's constants."""
    for size, taken, reserved in (
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 11 * MIB, 12 * MIB),
    ):
        allocator = bench.allocator.CachingAllocator()
        allocator.take(size)
        assert (allocator.allocated if size != 11 * MIB else taken) == taken
        assert allocator.reserved == reserved


def test_a_freed_piece_is_used_again_and_free_neighbours_become_one(bench: SimpleNamespace) -> None:
    allocator = bench.allocator.CachingAllocator()
    pieces = [allocator.take(5 * MIB) for _ in range(4)]  # one segment of 20 MiB
    assert allocator.reserved == 20 * MIB
    allocator.give_back(pieces[1], pieces[2])
    allocator.take(9 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.take(5 * MIB)
    assert allocator.reserved == 40 * MIB


def test_the_smallest_piece_that_fits_is_taken(bench: SimpleNamespace) -> None:
    allocator = bench.allocator.CachingAllocator()
    large, small = allocator.take(100 * MIB), allocator.take(50 * MIB)
    allocator.give_back(large, small)
    allocator.take(40 * MIB)
    allocator.take(100 * MIB)  # whole still
    assert allocator.reserved == 150 * MIB


def test_a_segment_that_grows_needs_only_what_is_missing(bench: SimpleNamespace) -> None:
    reserved = {}
    for is_expandable in (False, True):
        allocator = bench.allocator.CachingAllocator(is_expandable)
        first = allocator.take(100 * MIB)
        allocator.give_back(first)
        allocator.take(140 * MIB)
        reserved[is_expandable] = allocator.reserved
    assert reserved == {False: 240 * MIB, True: 140 * MIB}


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
@pytest.mark.parametrize("shape", [(12, 768, 50304), (6, 384, 16384), (24, 1024, 50304)])
@pytest.mark.parametrize("micro_batch", [4, 8, 14, 32])
def test_the_plan_counts_what_a_replay_of_the_allocator_finds(
    bench: SimpleNamespace, arch: str, shape: tuple[int, int, int], micro_batch: int
) -> None:
    layers, width, vocab = shape
    setting = Setting(
        ModelShape(layers, width // 64, width, 1024, vocab, arch=arch), micro_batch, accumulation=8, logits="replaced"
    )
    held = bench.lifetimes.replay(setting, is_expandable=True, is_settled=True)
    predicted = memory.predict(setting)
    assert predicted.allocated.value == pytest.approx(held.allocated, rel=0.04)
    assert predicted.device.value - memory.FITTED.context_bytes == pytest.approx(held.reserved, rel=0.08)


@pytest.mark.parametrize("micro_batch", [14, 32, 64])
def test_gradients_made_first_leave_less_unused(bench: SimpleNamespace, micro_batch: int) -> None:
    setting = Setting(ModelShape(12, 12, 768, 1024, 50304), micro_batch, accumulation=8, logits="replaced")
    late, first = (bench.lifetimes.replay(setting, is_settled=settled) for settled in (False, True))
    assert first.allocated == pytest.approx(late.allocated, rel=0.01)
    assert first.reserved < 0.95 * late.reserved


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None or shutil.which("g++") is None, reason="needs Triton and g++")
@pytest.mark.parametrize(("arch", "logits"), [("gpt2", "returned"), ("gpt2", "replaced"), ("modern", "replaced")])
def test_the_list_of_tensors_is_that_of_inductors_code(bench: SimpleNamespace, arch: str, logits: str) -> None:
    listed, generated = bench.replay.compare_with_code(arch, logits, n_layer=4)
    assert listed.allocated == pytest.approx(generated.allocated, rel=0.02)
    assert listed.reserved == pytest.approx(generated.reserved, rel=0.03)
