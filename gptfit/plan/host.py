"""Whether main memory holds what the ladder's last rungs keep there, and what to do where it does not."""

from __future__ import annotations

from dataclasses import replace

from gptfit.errors import Problem
from gptfit.plan import memory
from gptfit.plan.setting import Setting
from gptfit.units import gib

# Left to the system, the libraries and the loader: pinned memory cannot be swapped out.
RESERVED_SHARE = 0.1


def host_problem(setting: Setting, free_bytes: float | None) -> Problem | None:
    """`free_bytes`: of main memory; None where it is not known."""
    needed = memory.machine_host_bytes(setting)
    if free_bytes is None or needed <= (1 - RESERVED_SHARE) * free_bytes:
        return None
    key = "optimizer_device" if setting.optimizer_device == "cpu" else "embedding_device"
    message = f"{key} = 'cpu' keeps {host_words(setting)} in main memory, of which {gib(free_bytes)} are free"
    return Problem("error", key, message, _remedy(setting, free_bytes))


def host_words(setting: Setting) -> str:
    """What a machine's processes keep there, each of them the same."""
    n, each = setting.processes_per_machine, gib(memory.host_bytes(setting))
    return each if n == 1 else f"{n} x {each} = {gib(memory.machine_host_bytes(setting))}"


def _remedy(setting: Setting, free_bytes: float) -> str:
    """The change that fits, the least of those that do first."""
    smaller = {
        "use embedding_device = 'auto'": replace(setting, embedding_device="auto"),
        "use optimizer_state = '8bit'": replace(setting, optimizer_state="8bit"),
        "use optimizer_device = 'auto' with optimizer_state = '8bit'": replace(
            setting, optimizer_device="auto", embedding_device="auto", optimizer_state="8bit"
        ),
    }
    for words, changed in smaller.items():
        there = memory.machine_host_bytes(changed)
        if changed != setting and there <= (1 - RESERVED_SHARE) * free_bytes:
            return f"{words}, which keeps {host_words(changed)} there, or end other programs"
    return "end other programs, or train a smaller model"
