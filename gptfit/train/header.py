"""The header of run.jsonl: everything needed to know later what this run was."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from gptfit import __version__
from gptfit.config.keys import TrainConfig
from gptfit.dataset import DatasetInfo
from gptfit.device.device import Device
from gptfit.logs.events import DataSaid, DeviceSaid, Header
from gptfit.shape import ModelShape


def run_header(
    config: TrainConfig,
    shape: ModelShape,
    info: DatasetInfo,
    device: Device,
    processes: int,
    peak: tuple[float, str],
    is_chunked: bool,
) -> Header:
    return Header(
        name=Path(config.out_dir).name,
        config=config.as_dict(),
        shape=shape,
        parameters=shape.parameters,
        flops_per_token=shape.flops_per_token,
        tokens_per_step=config.tokens_per_iter(processes),
        processes=processes,
        device=DeviceSaid(
            name=device.name,
            kind=device.kind,
            dtype=device.dtype,
            chunked_loss=is_chunked,
            gpu=device.gpu.name if device.gpu else None,
            peak_tflops=peak[0],
            peak_basis=peak[1],
        ),
        dataset=DataSaid(
            folder=str(info.folder),
            tokenizer=info.tokenizer,
            tokenizer_sha256=info.tokenizer_sha256,
            vocab_size=info.vocab_size,
            train_tokens=info.train.tokens if info.train else None,
            val_tokens=info.val.tokens if info.val else None,
            bytes_per_token=info.bytes_per_token,
            chat=info.chat,
        ),
        versions={"gptfit": __version__, "torch": torch.__version__, "python": platform.python_version()},
        git=git_state(),
    )


def git_state() -> dict[str, Any]:
    """The commit of the folder the run was started in, or nothing outside a repository."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "changed": bool(_git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=5, check=True)
    return done.stdout.strip()
