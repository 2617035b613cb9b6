"""Run: everything one training run is made of, built from its config."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gptfit.config import TrainConfig
from gptfit.configcheck import find_problems
from gptfit.dataset import DatasetInfo, data_folder, read_dataset
from gptfit.errors import ConfigError
from gptfit.run.batches import EpochSampler, Feed, RandomSampler, Sampler
from gptfit.run.checkpoint import Checkpoint
from gptfit.run.device import Device
from gptfit.run.engine import Engine, build_engine
from gptfit.run.order import EpochOrder
from gptfit.run.processes import Processes
from gptfit.run.progress import Progress, StepStart
from gptfit.run.report import Report
from gptfit.run.restore import saved_progress
from gptfit.run.store import CheckpointStore
from gptfit.run.tokens import TokenFile, open_split
from gptfit.run.validation import Evaluator
from gptfit.shape import ModelShape


@dataclass
class Run:
    """The parts of a run; the loop moves them."""

    config: TrainConfig
    shape: ModelShape
    info: DatasetInfo
    device: Device
    processes: Processes
    engine: Engine
    feeds: dict[str, Feed]
    sampler: Sampler
    evaluator: Evaluator
    store: CheckpointStore
    report: Report
    peak_tflops: float
    peak_basis: str
    origin: str = "scratch"  # what the run began from, however often it was resumed since

    @property
    def tokens_per_step(self) -> int:
        return self.config.tokens_per_iter(self.processes.count)

    @property
    def windows_per_process(self) -> int:
        """Windows per update that this process reads; micro-batches divide it."""
        return self.config.batch_size * self.config.accumulation(self.processes.count)

    def epoch(self, progress: Progress) -> float | None:
        return self.sampler.order.epoch(progress.window) if isinstance(self.sampler, EpochSampler) else None

    def checkpoint(self, progress: Progress, start: StepStart) -> Checkpoint:
        """The run as it stands; with several processes all of them must call this."""
        shape = self.shape
        return Checkpoint(
            model=self.engine.model.state_dict(),
            optimizer=self.engine.optimizer.state_dict(),
            model_args={
                "n_layer": shape.n_layer,
                "n_head": shape.n_head,
                "n_embd": shape.n_embd,
                "block_size": shape.block_size,
                "bias": shape.bias,
                "vocab_size": shape.vocab_size,
                "dropout": self.config.dropout,
            },
            iter_num=progress.step,
            best_val_loss=progress.best_val_loss,
            config={**self.config.as_dict(), "init_from": self.origin},
            arch=shape.arch,
            progress=saved_progress(progress, start, self.engine, self.sampler),
        )

    def close(self) -> None:
        for feed in self.feeds.values():
            feed.close()


@dataclass(frozen=True)
class Data:
    """The token files of a run, opened and checked before anything expensive is built."""

    info: DatasetInfo
    shape: ModelShape
    files: dict[str, TokenFile]


def open_data(config: TrainConfig) -> Data:
    info = read_dataset(data_folder(config.dataset, config.data_root))
    shape = config.shape(info.model_vocab_size)
    files = {name: open_split(info, name, config.block_size, shape.vocab_size) for name in ("train", "val")}
    return Data(info, shape, files)


def check_processes(config: TrainConfig, processes: Processes) -> None:
    problems = find_problems(config.as_dict(), processes.count)
    if problems:
        raise ConfigError(problems[0].line, key=problems[0].key)


def build_run(
    config: TrainConfig, data: Data, device: Device, processes: Processes, store: CheckpointStore, report: Report
) -> Run:
    """Seeds torch as nanoGPT does, builds the model, and puts the samplers in place."""
    torch.manual_seed(config.seed + processes.rank)
    engine = build_engine(config, data.shape, device, processes)
    feeds = {name: Feed(file, config.block_size, device) for name, file in data.files.items()}
    peak_tflops, peak_basis = device.peak_rate()
    return Run(
        config=config,
        shape=data.shape,
        info=data.info,
        device=device,
        processes=processes,
        engine=engine,
        feeds=feeds,
        sampler=_sampler(config, data.files["train"].n_tokens, processes),
        evaluator=Evaluator(config, feeds, data.files, engine),
        store=store,
        report=report,
        peak_tflops=peak_tflops,
        peak_basis=peak_basis,
        origin=config.init_from,
    )


def _sampler(config: TrainConfig, n_tokens: int, processes: Processes) -> Sampler:
    if config.sampling == "random":
        return RandomSampler(n_tokens, config.block_size, config.batch_size)
    share = config.batch_size * config.accumulation(processes.count)
    order = EpochOrder(n_tokens, config.block_size, config.seed)
    return EpochSampler(order, per_step=share * processes.count, share=share, rank=processes.rank)
