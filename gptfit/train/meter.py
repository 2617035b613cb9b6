"""Meter: the numbers of a step event, from what the step saw and how long it took."""

from __future__ import annotations

from dataclasses import dataclass

from gptfit.device.nvml import card_readings
from gptfit.logs.events import Step
from gptfit.schedule import learning_rate
from gptfit.train.engine import Update
from gptfit.train.progress import Progress
from gptfit.train.setup import Run
from gptfit.units import GIB

MFU_MEMORY = 0.9  # nanoGPT's running average keeps this much of the past


@dataclass
class Meter:
    """Running figures of this process's part of the run."""

    run: Run
    mfu: float | None = None
    tokens_per_s: float | None = None
    peak_bytes: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def mean_tokens_per_s(self) -> float | None:
        """Over all steps of this process."""
        return self.tokens / self.seconds if self.seconds else None

    def count(self, tokens: int, seconds: float) -> None:
        run = self.run
        self.tokens += tokens
        self.seconds += seconds
        self.tokens_per_s = tokens / seconds
        mfu = run.shape.flops_per_token * self.tokens_per_s / (run.peak_tflops * 1e12 * run.processes.count)
        self.mfu = mfu if self.mfu is None else MFU_MEMORY * self.mfu + (1 - MFU_MEMORY) * mfu
        self.peak_bytes = max(self.peak_bytes, run.device.peak_memory_bytes())

    def step_event(self, update: Update, progress: Progress, seconds: float) -> Step:
        return Step(
            step=progress.step,
            loss=update.loss,
            lr=learning_rate(self.run.config, progress.step),
            ms=seconds * 1000,
            tokens=progress.tokens,
            tokens_per_s=self.tokens_per_s,
            mfu=self.mfu,
            grad_norm=update.grad_norm,
            memory_gib=self.peak_bytes / GIB,
            epoch=self.run.epoch(progress),
            seconds=progress.seconds,
            **card_readings(self.run.device),
        )
