"""What plan and propose are asked about: which GPU, which data, how many, from options, config and this machine."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

from gptfit.config.keys import NANOGPT_VOCAB_SIZE, TrainConfig
from gptfit.dataset import data_folder, default_name, read_dataset
from gptfit.device.local_gpu import local_gpu
from gptfit.errors import DataError, DeviceError, UsageError
from gptfit.estimate import Estimate
from gptfit.gpus import GPU, find
from gptfit.plan.known_data import KNOWN_DATA
from gptfit.plan.loss import dataset_kind
from gptfit.plan.result import DataFacts
from gptfit.plan.setting import Spread
from gptfit.shell import command
from gptfit.units import GIB


@dataclass(frozen=True)
class Card:
    """The card to plan for. `device_name` and `used_bytes` are known when it is in this machine."""

    gpu: GPU | None
    device_name: str | None = None
    used_bytes: float | None = None
    all_cards: tuple[GPU, ...] = ()  # where unlike ones were named
    host_free_bytes: float | None = None  # of main memory beside it, where that is known


def find_card(args: argparse.Namespace, config: TrainConfig | None = None) -> Card:
    """`--gpu`, else the config's, else this machine's card or, without one, its CPU; 'here' is the same in a word."""
    positive("--gpus", args.gpus)
    positive("--nodes", args.nodes)
    if args.network is not None:
        positive("--network", args.network)
    if args.vram is not None:
        positive("--vram", args.vram)
    if args.watts is not None:
        positive("--watts", args.watts)
    on_cpu = config is not None and config.device == "cpu"
    named = args.gpu or (config.gpu if config else "") or ("cpu" if on_cpu else "")
    if named.lower() in ("cpu", "none"):
        return _cpu()
    if "+" in named:
        return _unlike_cards(named, args)
    local = local_gpu()
    if named.lower() not in ("", "here"):
        gpu = find(named, args.vram)
        mine = local if local and local.gpu == gpu else None
    elif local:
        if local.gpu is None:
            raise DeviceError(
                f"this machine's {local.name} is not in the table", fix="name a similar card with --gpu NAME"
            )
        gpu, mine = local.gpu, local
    else:
        return _cpu()
    if args.vram is not None:
        gpu = replace(gpu, vram_gib=args.vram)
    if mine is None:
        return Card(gpu)
    # NVML counts what the driver itself holds, which the data sheet's size includes.
    hidden = max(0.0, gpu.vram_gib * GIB - mine.total_bytes)
    from gptfit.device.host_memory import free_host_bytes  # late: most plans are for a card that is elsewhere

    return Card(gpu, mine.name, mine.used_bytes + hidden, host_free_bytes=free_host_bytes())


def _cpu() -> Card:
    from gptfit.device.host_memory import free_host_bytes

    return Card(None, host_free_bytes=free_host_bytes())


def _unlike_cards(named: str, args: argparse.Namespace) -> Card:
    """The first of them with the least memory stands for all: every card gets the same micro-batch."""
    if args.gpus != 1 or args.vram is not None:
        raise UsageError(f"--gpu {named} names every card", fix="leave --gpus and --vram out")
    cards = tuple(find(name.strip()) for name in named.split("+"))
    return Card(min(cards, key=lambda card: card.vram_gib), all_cards=cards)


def processes_of(args: argparse.Namespace, card: Card) -> int:
    return (len(card.all_cards) or int(args.gpus)) * int(args.nodes)


def spread_of(args: argparse.Namespace, card: Card) -> Spread:
    network_gbs = args.network / 8 if args.network is not None else None
    return Spread(args.nodes, network_gbs, card.all_cards * int(args.nodes))


def find_data(path: str | None, config: TrainConfig | None = None, column: str = "text") -> DataFacts | None:
    """From `--data`, else from the folder the config would train on, else what is public about its name."""
    if path is None:
        if config is None:
            return None
        folder = data_folder(config.dataset, config.data_root)
        return _from_folder(folder) if folder.is_dir() and _has_tokens(folder) else KNOWN_DATA.get(config.dataset)
    if os.path.isdir(path):
        return _from_folder(Path(path))
    if path in KNOWN_DATA and not os.path.exists(path):
        return KNOWN_DATA[path]
    if not os.path.exists(path):
        raise DataError(f"{path}: no such file or folder", fix="give a prepared folder or a Parquet file")
    from gptfit.data.sources import find_sources

    (source,) = find_sources([path])  # it is a file and may be read
    if source.kind != "parquet":
        out = f"data/{default_name(path)}"
        prepare = command(["gptfit", "prepare", path, "--out", out])
        raise DataError(f"{path}: prepare it first: `{prepare}`, then --data {out}")
    from gptfit.data.measure import measure_parquet

    facts = measure_parquet(path, column)
    if facts.tokens.value <= 0:
        raise DataError(f"{path}: holds no text", fix="give a file with documents")
    return DataFacts(
        name=_spoken_name(Path(path)),
        tokens=facts.tokens,
        tokenizer="gpt2",
        bytes_per_token=facts.bytes_per_token,
        rows=facts.rows,
        text_bytes=facts.text_bytes,
    )


def vocab_size(data: DataFacts | None) -> int:
    """nanoGPT's rule: the data's own vocabulary, and 50,304 for GPT-2's or where nothing is known."""
    return data.vocab_size if data and data.vocab_size else NANOGPT_VOCAB_SIZE


def positive(option: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"{option} {value:g} makes no sense", fix="give a number above 0")


def _spoken_name(path: Path) -> str:
    """The file's name, or the known data set its folders name: fineweb/sample/10BT/000_00000.parquet."""
    return path.stem if dataset_kind(path.stem) else dataset_kind(str(path.resolve())) or path.stem


def _has_tokens(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("manifest.json", "train.bin", "val.bin"))


def _from_folder(folder: Path) -> DataFacts:
    info = read_dataset(folder)
    if info.train is None or not info.train.tokens:
        raise DataError(
            f"{folder}: has no training tokens", fix=f"make them with `gptfit prepare SOURCE --out {folder}`"
        )
    return DataFacts(
        name=folder.name,
        tokens=Estimate.exact(float(info.train.tokens)),
        vocab_size=info.model_vocab_size,
        tokenizer=info.tokenizer,
        bytes_per_token=info.bytes_per_token or (1.0 if info.tokenizer == "chars" else None),
        rows=info.train.documents,
        text_bytes=info.train.text_bytes,
        is_chat=info.chat is not None,
    )
