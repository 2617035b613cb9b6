"""`gptfit propose`: the config with the lowest expected loss for a GPU, a data set and some hours."""

from __future__ import annotations

import argparse
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from gptfit import measured
from gptfit.config.recipe import MODERN_LIMITS, RECIPES
from gptfit.dataset import data_folder
from gptfit.device import cpu_rate
from gptfit.errors import UsageError
from gptfit.measured import Measurements
from gptfit.plan.calibration import newest
from gptfit.plan.candidates import Wish
from gptfit.plan.propose import WEIGHTS, Proposal, Proposals, cpu_not_timed, propose
from gptfit.plan.vocabulary import SIZES
from gptfit.units import GIB, duration, si
from gptfit.verbs.common import card_arguments, check_new_config, print_json, write_config
from gptfit.verbs.gpu_and_data import find_card, find_data, positive, processes_of, vocab_size
from gptfit.verbs.next_commands import after_propose, before_writing
from gptfit.verbs.progress_line import ProgressLine
from gptfit.verbs.ticker import waiting

HELP = "Find the shape, micro-batch and horizon with the lowest expected loss within your hours, memory and data."
EXAMPLES = ("gptfit propose --gpu 4070 --data data/fineweb --hours 12 --write mine.py",)
USUAL_BLOCK, SHORT_BLOCK = 1024, 256  # GPT-2's; nanoGPT's for characters, of which a CPU manages no more either
FEW_BYTES = 2.0  # per token: characters and bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    card_arguments(parser)
    parser.add_argument("--hours", type=float, metavar="H", help="how long it may train: a limit, also of the run")
    parser.add_argument(
        "--block_size", type=int, metavar="T", help="context length (default 1024; 256 for characters or on a CPU)"
    )
    parser.add_argument(
        "--only",
        choices=("nanogpt", *RECIPES, WEIGHTS),
        help="nanogpt: what stock nanoGPT trains; gpt2 or modern: that recipe; weights: GPT-2's own, tuned (default: lowest loss)",
    )
    parser.add_argument("--write", metavar="FILE.py", help="write the choice as a config file")


def run(args: argparse.Namespace) -> int:
    answer, wish = make_proposals(args)
    if args.json:
        print_json({"proposals": [_as_json(row) for row in (answer.choice, *answer.alternatives)]})
    else:
        from gptfit.verbs.propose_view import show

        show(answer, wish, Path(args.write) if args.write else None, before_writing(args))
    return 0


def make_proposals(args: argparse.Namespace) -> tuple[Proposals, Wish]:
    """The proposals and what was asked for; the choice is written to the file that `--write` names."""
    target = Path(args.write) if args.write else None
    _check(args, target)
    measurements = measured.read()
    wish = _wish(args, measurements)
    with waiting("weighing models"):
        answer = propose(wish, measurements)
    if target is not None:
        chosen = answer.choice.plan
        write_config(target, chosen.config, *_heading(answer.choice, wish), vocab_size=chosen.shape.vocab_size)
    return answer, wish


def _check(args: argparse.Namespace, target: Path | None) -> None:
    if args.hours is None:
        raise UsageError("say how long it may train: --hours 12")
    positive("--hours", args.hours)
    if args.block_size is not None:
        positive("--block_size", args.block_size)
    if args.data is None:
        raise UsageError("name the data: --data FILE.parquet or a prepared folder")
    if target is not None:
        check_new_config(target)


def _wish(args: argparse.Namespace, measurements: Measurements) -> Wish:
    card = find_card(args)
    calibrated = newest(measurements, card.device_name) if card.device_name or card.gpu is None else None
    if card.gpu is None and calibrated is None and not measurements.speeds and not cpu_rate.product_rate():
        raise cpu_not_timed()  # before a large file is read for nothing
    data = find_data(args.data, column=args.text_column)
    assert data is not None
    is_short = card.gpu is None or (data.bytes_per_token or FEW_BYTES) < FEW_BYTES
    wish = Wish(
        gpu=card.gpu,
        hours=args.hours,
        data=data,
        vocab_size=vocab_size(data),
        processes=processes_of(args, card),
        block_size=args.block_size or (SHORT_BLOCK if is_short else USUAL_BLOCK),
        used_bytes=card.used_bytes,
        calibrated=calibrated,
        cpu_rate=cpu_rate.product_rate,
        host_free_bytes=card.host_free_bytes,
        dataset=_dataset(args.data, data.name),
        source=args.data if Path(args.data).is_file() else "",
        column=args.text_column,
        shares=_vocabularies(args.data, args.text_column),
    )
    if args.only is None:
        return wish
    plain = args.only == "nanogpt"
    return replace(wish, recipes=("gpt2",) if plain else (args.only,), only_nanogpt_keys=plain)


def _vocabularies(path: str, column: str) -> dict[int, float]:
    """What vocabularies of the file's own are like; nothing where it is prepared, or where none can be learned here."""
    if not Path(path).is_file() or find_spec("tokenizers") is None:
        return {}
    from gptfit.data.train_bpe import measure_vocabularies

    with ProgressLine("trying vocabularies on a sample") as progress:
        return measure_vocabularies([path], SIZES, column, on_progress=progress)


def _as_json(row: Proposal) -> dict[str, object]:
    config = row.plan.config.as_dict()
    return {"title": row.title, "config": config, "own_vocabulary": row.vocabulary, **row.plan.as_json()}


def _dataset(path: str, name: str) -> str:
    """A prepared folder that is not data/NAME, where `train` looks, is named by its whole path."""
    folder = Path(path).resolve()
    return str(folder) if folder.is_dir() and data_folder(name).resolve() != folder else ""


def _heading(choice: Proposal, wish: Wish) -> tuple[str, list[str]]:
    """The title and the expectations, so that the file says later what was promised."""
    plan = choice.plan
    assert plan.speed is not None
    assert plan.memory is not None
    assert plan.seconds is not None
    card = f"{wish.processes} x {wish.gpu.name}" if wish.gpu else "a CPU"
    expected = (
        f"expected: {si(plan.speed.tokens_per_s.value)} tokens/s, {plan.memory.device.value / GIB:.1f} GiB, "
        f"{duration(plan.seconds.value)}"
    )
    notes = [expected]
    if plan.loss:
        loss, bits = plan.loss.loss, plan.loss.bits_per_byte
        per_byte = f"{bits.value:.3f} bits per byte, " if plan.is_in_bits and bits else ""
        notes.append(f"expected validation loss {per_byte}{loss.value:.2f} ({loss.low:.2f} to {loss.high:.2f})")
    if plan.shape.arch == "modern":
        notes.append(MODERN_LIMITS)
    elif plan.config.chunked_loss is not True and not plan.config.checkpoint_activations:
        notes.append("runs with `gptfit train` and with stock nanoGPT's train.py")
    commands = after_propose(choice, wish, Path("THIS_FILE"))
    notes += [f"then: {command}" for command in commands if "THIS_FILE" not in command]
    return (f"{wish.data.name} on {card} in {duration(3600 * wish.hours)}, by gptfit propose", notes)
