"""`gptfit export`: a run for other programs, as files here or on the Hugging Face hub, verified before it is there."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from gptfit.errors import UsageError
from gptfit.verbs.common import wrapped
from gptfit.verbs.model_view import describe, note, opened_model
from gptfit.verbs.ticker import waiting

if TYPE_CHECKING:
    from gptfit.checkpoint.loaded_model import LoadedModel

HELP = "A run as a Hugging Face folder, a GGUF file or a nanoGPT checkpoint, verified before it is there."
EXAMPLES = ("gptfit export out --to hf", "gptfit export out --push me/my-first-gpt")

STARTING_S = 10.0  # of transformers, once for the check and once for its tokenizer, on a slow core
PASSES, BYTES_PER_S = 3, 200e6  # gathered, written, read back; a disk that is neither new nor old


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN|ckpt.pt", help="run folder, checkpoint, or GPT-2 folder")
    parser.add_argument("--to", choices=("hf", "gguf", "nanogpt"), help="for which program")
    parser.add_argument("--out", metavar="PATH", help="folder (a file for gguf); default: inside the run folder")
    parser.add_argument(
        "--dtype", choices=("float32", "float16"), default="float32", help="of a gguf file's matrices (default float32)"
    )
    parser.add_argument("--data", metavar="DIR", help="data folder, when the checkpoint does not find it")
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload as --to hf to the Hugging Face hub, private")
    parser.add_argument("--public", action="store_true", help="everybody may see what --push uploads")
    parser.add_argument("--replace", action="store_true", help="--push over files that are in the repository")


def run(args: argparse.Namespace) -> int:
    _check(args)
    if args.push:
        return _push(args)
    from gptfit.export.export import export

    opened = _open(args)
    expected_s = expected_seconds(args.to, opened.shape.n_weights)
    with waiting(f"writing {args.to} and reading it back", expected_s):
        done = export(opened, args.to, args.out, args.dtype)
    print(done.path)
    _say(done.checks, done.notes)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.push and args.to not in (None, "hf"):
        raise UsageError(f"--push uploads the folder that --to hf makes, not {args.to}", fix="leave --to out")
    if not args.push and (args.public or args.replace):
        raise UsageError("--public and --replace are for --push", fix="add --push OWNER/NAME, or leave them out")
    if not args.push and args.to is None:
        raise UsageError("say for which program: --to hf, --to gguf or --to nanogpt", fix="or --push OWNER/NAME")
    if args.dtype != "float32" and args.to != "gguf":
        raise UsageError(f"--dtype {args.dtype} is for --to gguf", fix="leave it out: other formats are float32")


def _push(args: argparse.Namespace) -> int:
    """Whether it can be pushed is asked before the work of exporting; the folder is kept where --out names one."""
    from gptfit.export.export import exported_for_now
    from gptfit.export.push import find_repository, name_the_repository, push

    there = find_repository(args.push)
    with exported_for_now(_open(args), "hf", args.out) as done:  # the upload has a bar of its own
        name_the_repository(done.path, args.push)
        found = push(done.path, there, args.public, args.replace)
    print(there.address)
    _say((*done.checks, found[0]), (*done.notes, *found[1:]))
    return 0


def _open(args: argparse.Namespace) -> LoadedModel:
    opened = opened_model(args.model, args.data, "cpu")
    for line in (describe(opened), *opened.notes):
        note(line)
    return opened


def expected_seconds(to: str, n_weights: int) -> float:
    """About: every pass over the weights is a disk's work, and transformers takes its time to start."""
    return (STARTING_S if to == "hf" else 0.0) + PASSES * 4 * n_weights / BYTES_PER_S


def _say(checks: tuple[str, ...], notes: tuple[str, ...]) -> None:
    said = [*(f"  checked: {line}" for line in checks), *(f"  note: {line}" for line in notes)]
    for line in said:
        print(wrapped(line, 4))
