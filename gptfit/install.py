"""What is not installed, in one line with the command that installs it on this kind of system."""

from __future__ import annotations

import sys

from gptfit.errors import DeviceError

# Only what trains, tunes, samples or exports needs these; the rest of gptfit installs in seconds without them.
TRAIN_EXTRA = ("torch", "safetensors")


def missing_library(error: ModuleNotFoundError) -> DeviceError | None:
    """The error in words, where the module belongs to the `train` extra; None where its absence is our mistake."""
    library = (error.name or "").partition(".")[0]
    if library not in TRAIN_EXTRA:
        return None
    return DeviceError(f"{library} is not installed, and this command needs it", fix=install_line(sys.platform))


def install_line(platform: str) -> str:
    """
    >>> install_line("linux")
    'pip install "gptfit[train]"'
    """
    line = 'pip install "gptfit[train]"'
    if platform == "win32":
        # What the Python registry has for Windows knows no CUDA.
        return f"with an NVIDIA card take the line of pytorch.org/get-started/locally first; then {line}"
    return line
