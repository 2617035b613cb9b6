"""`gptfit export`: a run as a Hugging Face folder, a GGUF file or a nanoGPT checkpoint, verified before it is there."""

from __future__ import annotations

import argparse

from gptfit.verbs.model_view import describe, note

HELP = "to Hugging Face, GGUF or nanoGPT"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN|ckpt.pt", help="run folder, checkpoint, or GPT-2 folder")
    parser.add_argument("--to", required=True, choices=("hf", "gguf", "nanogpt"))
    parser.add_argument("--out", metavar="PATH", help="folder (a file for gguf); default: inside the run folder")
    parser.add_argument("--data", metavar="DIR", help="data folder, when the checkpoint does not find it")


def run(args: argparse.Namespace) -> int:
    from gptfit.checkpoint.loaded_model import open_model
    from gptfit.export.export import export

    opened = open_model(args.model, args.data, device="cpu")
    for line in (describe(opened), *opened.notes):
        note(line)
    done = export(opened, args.to, args.out)
    print(done.path)
    for check in done.checks:
        print(f"  checked: {check}")
    for line in done.notes:
        print(f"  note: {line}")
    return 0
