"""`gptfit propose`: the config with the lowest expected loss for a GPU, a data set and some hours."""

from __future__ import annotations

import argparse
from pathlib import Path

from gptfit import measured
from gptfit.configwrite import render
from gptfit.dataset import data_folder
from gptfit.errors import ConfigError, DeviceError, UsageError
from gptfit.plan.propose import Proposal, Wish, propose
from gptfit.units import GIB, duration, si
from gptfit.verbs.common import print_json, recipe_argument
from gptfit.verbs.planinput import card_arguments, find_card, find_data, positive, vocab_size
from gptfit.wholefile import write_whole

HELP = "Find the shape, micro-batch and horizon with the lowest expected loss within your hours, memory and data."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    card_arguments(parser)
    parser.add_argument("--hours", type=float, metavar="H", help="how long it may train")
    parser.add_argument("--block_size", type=int, default=1024, metavar="T", help="context length (default 1024)")
    recipe_argument(parser)
    parser.add_argument("--plain", action="store_true", help="only keys that stock nanoGPT understands")
    parser.add_argument("--write", metavar="FILE.py", help="write the choice as a config file")


def run(args: argparse.Namespace) -> int:
    if args.hours is None:
        raise UsageError("say how long it may train: --hours 12")
    positive("--hours", args.hours)
    positive("--block_size", args.block_size)
    if args.data is None:
        raise UsageError("name the data: --data FILE.parquet or a prepared folder")
    if args.plain and args.recipe == "modern":
        raise UsageError("--plain and --recipe modern exclude each other: nanoGPT has no modern recipe")
    target = Path(args.write) if args.write else None
    if target is not None:
        _check_target(target)
    card = find_card(args)
    if card.gpu is None:
        raise DeviceError("a proposal needs a card; name it with --gpu, e.g. --gpu 4070")
    data = find_data(args.data, column=args.text_column)
    assert data is not None
    wish = Wish(
        gpu=card.gpu,
        hours=args.hours,
        data=data,
        vocab_size=vocab_size(data),
        processes=args.gpus,
        block_size=args.block_size,
        recipe=args.recipe,
        only_nanogpt_keys=args.plain,
        used_bytes=card.used_bytes,
        dataset=_dataset(args.data, data.name),
    )
    answer = propose(wish, measured.read())
    if target is not None:
        _write(target, answer.choice, wish)
    if args.json:
        rows = [answer.choice, *answer.alternatives]
        print_json(
            {
                "proposals": [
                    {"title": row.title, "config": row.plan.config.as_dict(), **row.plan.as_json()} for row in rows
                ]
            }
        )
    else:
        from gptfit.verbs.propose_view import show

        show(answer, wish, target)
    return 0


def _dataset(path: str, name: str) -> str:
    """A prepared folder that is not data/NAME, where `train` looks, is named by its whole path."""
    folder = Path(path).resolve()
    return str(folder) if folder.is_dir() and data_folder(name).resolve() != folder else ""


def _check_target(path: Path) -> None:
    if path.suffix != ".py":
        raise UsageError(f"--write {path}: a config file ends in .py")
    if path.exists():
        raise ConfigError(f"{path}: exists already; name a new file or remove it")


def _write(path: Path, choice: Proposal, wish: Wish) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, render(choice.plan.config, *_heading(choice, wish)).encode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); choose another place") from None


def _heading(choice: Proposal, wish: Wish) -> tuple[str, list[str]]:
    """The title and the expectations, so that the file says later what was promised."""
    plan = choice.plan
    assert plan.speed is not None
    assert plan.memory is not None
    assert plan.seconds is not None
    expected = (
        f"expected: {si(plan.speed.tokens_per_s.value)} tokens/s, {plan.memory.device.value / GIB:.1f} GiB on nvidia-smi, "
        f"{duration(plan.seconds.value)}"
    )
    notes = [expected]
    if plan.loss:
        notes.append(
            f"expected validation loss {plan.loss.loss.value:.2f} ({plan.loss.loss.low:.2f} to {plan.loss.loss.high:.2f})"
        )
    if wish.recipe == "gpt2" and plan.config.chunked_loss is not True and not plan.config.checkpoint_activations:
        notes.append("runs with `gptfit train` and with stock nanoGPT's train.py")
    return (
        f"{wish.data.name} on {wish.processes} x {wish.gpu.name} in {duration(3600 * wish.hours)}, by gptfit propose",
        notes,
    )
