"""gptfit: fit a GPT to your GPU. The functions here do what the commands do; docs/python.md shows each at work.

Importing gptfit loads nothing but this file: a function, and torch with it where it needs torch, comes with its first use.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gptfit.api import ComparedRuns, compare, evaluate, export, load, plan, prepare, propose, sample, train, tune
    from gptfit.config.keys import TrainConfig
    from gptfit.errors import GptfitError

__version__ = "0.1.0"

# Every public name and the module it comes from.
_HOMES = {
    **dict.fromkeys(("prepare", "plan", "propose", "tune", "train", "compare"), "gptfit.api"),
    **dict.fromkeys(("load", "sample", "evaluate", "export", "ComparedRuns"), "gptfit.api"),
    "TrainConfig": "gptfit.config.keys",
    "GptfitError": "gptfit.errors",
}
__all__ = [
    "ComparedRuns",
    "GptfitError",
    "TrainConfig",
    "__version__",
    "compare",
    "evaluate",
    "export",
    "load",
    "plan",
    "prepare",
    "propose",
    "sample",
    "train",
    "tune",
]


class _LazyModule(ModuleType):
    """Five functions share their name with a package (plan, tune, train, compare, export); the function must win.

    Python sets `gptfit.plan` to the package as soon as anything imports `gptfit.plan.speed`. That assignment is ignored
    here: `from gptfit.plan.speed import ...` does not need it, and `gptfit.plan(...)` stays what its reader expects.
    Only `import gptfit.plan.speed as x` is lost by it; write `from gptfit.plan import speed as x`.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'gptfit' has no attribute {name!r}")
        from importlib import import_module

        found = getattr(import_module(_HOMES[name]), name)
        setattr(self, name, found)
        return found

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _LazyModule
