"""Triton kernels out of Inductor's code, compiled for a card that is not there: shared memory, registers, spills."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str", re.DOTALL)
# Most a block of threads may take on compute capability 8.9 and 12.0: 99 KiB (CUDA C++ programming guide, table 24).
SHARED_LIMIT = 99 * 1024
THREADS_LIMIT = 1024
WARP = 32


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel with one of the block sizes Inductor would try."""

    name: str
    block_sizes: str
    shared_bytes: int
    threads: int
    registers: int
    spilled_bytes: int


def compile_kernels(source: str, capability: int) -> list[CompiledKernel]:
    """Every kernel of one module of Inductor's, in every configuration."""
    from torch._inductor.runtime import triton_helpers

    triton_helpers.set_driver_to_gpu = lambda: None  # there is none
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, text in KERNEL.findall(source):
            kernel = _load(Path(folder) / f"{name}.py", name, text)
            found += [_compile(kernel, name, config, capability, Path(folder)) for config in kernel.configs]
    return found


def _load(path: Path, name: str, text: str) -> Any:
    """From a file: Triton reads the source of what it compiles."""
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def _compile(kernel: Any, name: str, config: Any, capability: int, folder: Path) -> CompiledKernel:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    meta = kernel._create_compile_meta(config)
    source = ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
    options = kernel._create_compile_options(config, meta)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, WARP), options=options)
    registers, spilled = _assembled(binary.asm["ptx"], capability, folder)
    return CompiledKernel(
        name=name,
        block_sizes=", ".join(f"{key} {value}" for key, value in config.kwargs.items()),
        shared_bytes=binary.metadata.shared,
        threads=WARP * binary.metadata.num_warps,
        registers=registers,
        spilled_bytes=spilled,
    )


def _assembled(ptx: str, capability: int, folder: Path) -> tuple[int, int]:
    """(registers per thread, bytes spilled) as NVIDIA's assembler tells, which Triton brings."""
    from triton.backends.nvidia.compiler import get_ptxas

    path = folder / "kernel.ptx"
    path.write_text(ptx, encoding="utf-8")
    architecture = re.search(r"\.target (\w+)", ptx)
    assert architecture is not None
    command = [get_ptxas(capability).path, "-v", f"--gpu-name={architecture[1]}", str(path), "-o", str(folder / "out")]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", told)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", told)
    assert registers is not None, told
    return int(registers[1]), sum(int(stores) + int(loads) for stores, loads in spills)
