"""Matrix tiles (AMX) that a CPU announces and cannot use, as in virtual machines that hide their description.

torch believes the announcement, and the first 16-bit product then ends the process with an illegal instruction.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import torch

LIMIT_VARIABLE = "ONEDNN_MAX_CPU_ISA"  # read by torch's oneDNN at its first product
WITHOUT_TILES = "AVX512_CORE_FP16"  # all that comes before tiles; AVX512's own bfloat16 products are among it
PATIENCE_S = 30


def avoid_broken_tiles() -> None:
    """Let this process and its children do without tiles where a product by them dies. A user's own limit stays."""
    if LIMIT_VARIABLE in os.environ or not torch.cpu._is_amx_tile_supported():
        return
    os.environ[LIMIT_VARIABLE] = WITHOUT_TILES if dies(_tile_product) else "DEFAULT"  # DEFAULT: tried, and no limit


def tiles_are_broken() -> bool:
    """Announced and avoided."""
    return os.environ.get(LIMIT_VARIABLE) == WITHOUT_TILES and torch.cpu._is_amx_tile_supported()


def dies(work: Callable[[], object]) -> bool:
    """Whether an illegal instruction ends a fork of this process that does this; not known where there are no forks."""
    if sys.platform == "win32":
        return False
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGILL, signal.SIG_DFL)
        signal.alarm(PATIENCE_S)
        torch.set_num_threads(1)  # no threads were forked along
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGILL


def _tile_product() -> None:
    a = torch.ones(64, 64, dtype=torch.bfloat16)
    torch.mm(a, a)
