"""Kernels a card would run, compiled here for it: Inductor's of a whole step, and the chunked loss's. Slow; needs Triton."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None or shutil.which("g++") is None, reason="needs Triton and g++"),
]
ARCHITECTURES = [(8, 9), (12, 0)]  # RTX 40 and RTX 50


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    sys.path.insert(0, str(BENCH))
    try:
        yield SimpleNamespace(kernels=importlib.import_module("_kernels"), replay=importlib.import_module("replay"))
    finally:
        sys.path.remove(str(BENCH))


def compiled(bench: SimpleNamespace, capability: tuple[int, int], **request: object) -> list[Any]:
    made = bench.replay.card_code(capability=capability, **request)
    number = 10 * capability[0] + capability[1]
    return [kernel for source in made["code"] for kernel in bench.kernels.compile_kernels(source, number)]


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_every_kernel_of_a_step_fits_the_card_and_few_spill(
    bench: SimpleNamespace, capability: tuple[int, int], arch: str
) -> None:
    kernels = compiled(bench, capability, what="step", n_layer=2, arch=arch, micro_batch=8)
    assert len({kernel.name for kernel in kernels}) >= 15
    assert max(kernel.shared_bytes for kernel in kernels) <= bench.kernels.SHARED_LIMIT
    assert max(kernel.threads for kernel in kernels) <= bench.kernels.THREADS_LIMIT
    # Inductor tries several block sizes and drops those that spill: of every kernel one must be left.
    for name in {kernel.name for kernel in kernels}:
        assert min(kernel.spilled_bytes for kernel in kernels if kernel.name == name) == 0, name


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("cap", [0.0, 15.0])
def test_a_chunk_of_the_loss_is_read_twice_and_written_once(
    bench: SimpleNamespace, capability: tuple[int, int], cap: float
) -> None:
    request = {"what": "chunk", "rows": 2048, "vocab_size": 50304, "cap": cap}
    (source,) = bench.replay.card_code(capability=capability, **request)["code"]
    loads = source.count("tl.load(in_ptr0 + (r0_1 + 50304*x0)") + source.count("tl.load(in_ptr0 + (x2)")
    assert loads == 2, "one pass for maximum and sum together, one for the gradient"
    kernels = compiled(bench, capability, **request)
    assert len({kernel.name for kernel in kernels}) == 2
    assert max(kernel.spilled_bytes for kernel in kernels) == 0
    assert max(kernel.shared_bytes for kernel in kernels) <= bench.kernels.SHARED_LIMIT
