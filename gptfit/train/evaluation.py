"""Evaluation during training: the same windows every time, or nanoGPT's random ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from gptfit.config.keys import TrainConfig
from gptfit.data.token_files import TokenFile
from gptfit.plan.evaluation import eval_windows
from gptfit.train.batches import Batch, Feed
from gptfit.train.engine import Engine
from gptfit.train.order import Ints


@dataclass(frozen=True)
class Losses:
    """Mean losses of both splits, and how many val tokens were looked at."""

    train: float
    val: float
    eval_tokens: int


class Evaluator:
    """Looks at the same number of windows of each split, whatever the micro-batch is by now."""

    def __init__(
        self, config: TrainConfig, feeds: dict[str, Feed], files: dict[str, TokenFile], engine: Engine
    ) -> None:
        self._config, self._feeds, self._files, self._engine = config, feeds, files, engine

    def losses(self, micro_batch: int, poll: Callable[[], None] | None = None) -> Losses:
        """`poll` is called before each batch and may raise to stop."""
        with self._engine.tail.in_place():
            (train, _), (val, tokens) = (
                self._engine.loss_and_tokens(self._batches(split, micro_batch, poll), self._count(split, micro_batch))
                for split in ("train", "val")
            )
        return Losses(train, val, tokens)

    def _batches(self, split: str, micro_batch: int, poll: Callable[[], None] | None) -> Iterator[Batch | None]:
        feed, n_given = self._feeds[split], 0
        for starts in self._starts(split, micro_batch):
            if poll:
                poll()
            n_given += 1
            yield feed.to_device(feed.read(starts))
        if self._engine.parallel.is_sharded:
            yield from [None] * (self._count(split, micro_batch) - n_given)

    def _count(self, split: str, micro_batch: int) -> int:
        """Of the batches of the process that has most."""
        if self._config.sampling == "random":
            return self._config.eval_iters * -(-self._config.batch_size // micro_batch)
        windows = -(-len(self._fixed_starts(split)) // self._engine.processes.count)
        return -(-windows // micro_batch)

    def _starts(self, split: str, micro_batch: int) -> Iterator[Ints]:
        if self._config.sampling == "random":
            yield from self._random_starts(split, micro_batch)
            return
        processes = self._engine.processes
        mine = self._fixed_starts(split)[processes.rank :: processes.count]
        for first in range(0, len(mine), micro_batch):
            yield mine[first : first + micro_batch]

    def _fixed_starts(self, split: str) -> Ints:
        """Spread evenly over the whole file without overlap; all of a short file."""
        block_size = self._config.block_size
        available = (self._files[split].n_tokens - 1) // block_size
        wanted = min(eval_windows(self._config, self._engine.processes.count), available)
        # Every process needs a window, or it would have nothing to average.
        wanted = max(wanted, self._engine.processes.count)
        return np.arange(wanted, dtype=np.int64) * available // wanted * block_size

    def _random_starts(self, split: str, micro_batch: int) -> Iterator[Ints]:
        """One draw per batch of the config's size, as nanoGPT's estimate_loss draws from the training stream."""
        choices = self._files[split].n_tokens - self._config.block_size
        for _ in range(self._config.eval_iters):
            drawn = torch.randint(choices, (self._config.batch_size,)).numpy()
            for first in range(0, len(drawn), micro_batch):
                yield drawn[first : first + micro_batch]
