"""Run: everything one training run is made of, built from its config."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gptfit.checkpoint import divided
from gptfit.checkpoint.format import Checkpoint
from gptfit.checkpoint.store import CheckpointStore
from gptfit.config.keys import TrainConfig, find_problems
from gptfit.data.token_files import Opener, TokenFile, open_split
from gptfit.dataset import DatasetInfo, data_folder, read_dataset
from gptfit.device.device import Device
from gptfit.device.processes import Processes, this_start
from gptfit.errors import ConfigError, RunError
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape
from gptfit.shares import share_out
from gptfit.train.batches import EpochSampler, Feed, RandomSampler, Sampler
from gptfit.train.documents import ShuffledDocuments
from gptfit.train.engine import Engine, build_engine
from gptfit.train.evaluation import Evaluator
from gptfit.train.order import EpochOrder
from gptfit.train.parts import tied_names
from gptfit.train.place import setting_at
from gptfit.train.progress import Progress, StepStart
from gptfit.train.restore import saved_progress
from gptfit.train.sinks import Report


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
    paces: list[float]  # seconds per micro-step of each process, or anything in proportion
    origin: str = "scratch"  # what the run began from, however often it was resumed since
    wants_paces: bool = False  # unlike devices, not yet timed

    def tokens_of(self, step: int) -> int:
        """Windows that update number `step` reads, all processes together."""
        return self.micro_steps_of(step) * self.config.batch_size * self.config.block_size

    def micro_steps_of(self, step: int) -> int:
        """Of update number `step`, all processes together, as long as the micro-batch is batch_size."""
        return self.config.micro_steps(step, self.processes.count) * self.processes.count

    def shares_of(self, step: int) -> list[int]:
        """Each process's part of them, by its pace."""
        return share_out(self.paces, self.micro_steps_of(step))

    def windows_of(self, step: int) -> int:
        """Windows that this process reads for update number `step`; micro-batches divide their number."""
        return self.config.batch_size * self.shares_of(step)[self.processes.rank]

    def windows_before(self, step: int) -> int:
        """Windows of update number `step` that the processes before this one read."""
        return self.config.batch_size * sum(self.shares_of(step)[: self.processes.rank])

    @property
    def common_windows(self) -> int:
        """What a micro-batch must divide, so that every share is a whole number of them; the first batch is the smallest."""
        is_even = len(set(self.paces)) == 1
        return self.windows_of(0) if is_even else self.config.batch_size

    def even_micro_steps(self, step: int, micro_batch: int) -> float:
        """Micro-steps of each process if all had the same share; the weight of one in the mean over all."""
        return self.micro_steps_of(step) * self.config.batch_size / (micro_batch * self.processes.count)

    def take_paces(self, paces: list[float]) -> None:
        self.paces, self.wants_paces = paces, False

    def setting(self, micro_batch: int) -> Setting:
        """What memory and speed depend on, as it is now."""
        compiled = self.engine.compiled
        n = self.processes.count
        return setting_at(self.config, self.shape, self.device, micro_batch, compiled, self.is_chunked, n)

    @property
    def is_chunked(self) -> bool:
        """Whether the loss is computed in chunks, as decided or as memory forced it."""
        return bool(self.engine.model.loss_chunk_tokens)

    def epoch(self, progress: Progress) -> float | None:
        return self.sampler.order.epoch(progress.window) if isinstance(self.sampler, EpochSampler) else None

    def checkpoint(self, progress: Progress, start: StepStart) -> Checkpoint:
        """The run as it stands; with several processes all of them must call this."""
        shape, is_whole = self.shape, not self.engine.is_too_large_to_gather(divided.WHOLE_UP_TO)
        parts = None if is_whole else self._write_parts(progress.step)
        return Checkpoint(
            model=self.engine.saved_weights() if is_whole else {},
            optimizer=self.engine.saved_optimizer() if is_whole else self.engine.plain_state(),
            parts=parts,
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
            average=self.engine.saved_average() if is_whole else {},
            averaged=self.engine.tail.count,
            progress={
                **saved_progress(progress, start, self.engine, self.sampler),
                "paces": self.paces,
                "start": this_start(),
            },
        )

    def _write_parts(self, step: int) -> dict[str, Any]:
        """What ckpt.pt needs to say about the folder its tensors are in."""
        name = self.processes.gather(divided.free_name(self.store.folder, step))[0]
        tensors = self.engine.divided_tensors()
        files: dict[str, list[int]] = {}
        problem: RunError | None = None
        try:
            files = divided.write_parts(self.store.folder / name, tensors, self.processes.rank)
        except RunError as error:
            problem = error
        everyone = self.processes.gather((files, problem))
        for _, one in everyone:
            if one is not None:
                raise one  # in all of them
        together = {file: entry for one, _ in everyone for file, entry in one.items()}
        return {"folder": name, "files": together, "tied": tied_names(self.engine.model)}

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
    openers: dict[str, Opener] = {"train": _train_opener(config, info), "val": TokenFile}
    sizes = config.block_size, shape.vocab_size
    return Data(info, shape, {name: open_split(info, name, *sizes, opener) for name, opener in openers.items()})


def _train_opener(config: TrainConfig, info: DatasetInfo) -> Opener:
    if not config.shuffle_documents:
        return TokenFile
    if info.end_of_text is None:
        raise ConfigError(
            f"shuffle_documents = True, but {info.folder} does not say which token ends a document",
            fix="prepare it with gptfit, or use False",
            key="shuffle_documents",
        )
    return partial(ShuffledDocuments, end_of_text=info.end_of_text, seed=config.seed)


def check_processes(config: TrainConfig, processes: Processes) -> None:
    problems = find_problems(config.as_dict(), processes.count)
    if problems:
        raise ConfigError(problems[0].message, fix=problems[0].fix, key=problems[0].where)


def build_run(
    config: TrainConfig, data: Data, device: Device, processes: Processes, store: CheckpointStore, report: Report
) -> Run:
    """Seeds torch as nanoGPT does, builds the model, and puts the samplers in place."""
    # DDP hands out the first process's weights; of a model that is divided everyone draws the whole of the same.
    torch.manual_seed(config.seed + (processes.rank if config.parallel == "ddp" else 0))
    engine = build_engine(config, data.shape, device, processes)
    if engine.parallel.is_sharded:
        torch.manual_seed(config.seed + processes.rank)
    engine.model.loss_is_masked = data.files["train"].is_masked
    feeds = {name: Feed(file, config.block_size, device) for name, file in data.files.items()}
    peak_tflops, peak_basis = device.peak_rate()
    paces, are_open = first_paces(config, device, processes)
    run = Run(
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
        paces=paces,
        origin=config.init_from,
        wants_paces=are_open,
    )
    if isinstance(run.sampler, EpochSampler):
        run.sampler.offset = run.windows_before
    return run


def first_paces(config: TrainConfig, device: Device, processes: Processes) -> tuple[list[float], bool]:
    """Each process's pace, and whether it is to be timed: only unlike devices are, so that like ones repeat exactly."""
    even = [1.0] * processes.count
    if processes.is_alone:
        return even, False
    if config.shares not in ("auto", "equal"):
        return [1 / float(word) for word in config.shares.split(":")], False
    are_unlike = len(set(processes.gather(device.name))) > 1
    return even, config.shares == "auto" and are_unlike and config.parallel == "ddp"


def _sampler(config: TrainConfig, n_tokens: int, processes: Processes) -> Sampler:
    if config.sampling == "random":
        return RandomSampler(n_tokens, config.block_size, config.batch_size)
    order = EpochOrder(n_tokens, config.block_size, config.seed, config.shuffle_documents)
    until = partial(config.windows_until, processes=processes.count)
    return EpochSampler(order, until)
