"""`gptfit prepare`: Parquet (or JSON lines, CSV, text) into train.bin and val.bin."""

from __future__ import annotations

import argparse
import os
import re
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from gptfit.dataset import default_name
from gptfit.device.allocator import keep_freed_memory
from gptfit.errors import UsageError, exit_code
from gptfit.verbs.common import console, dataset_json, print_json, wrapped

if TYPE_CHECKING:
    from rich.console import Console

    from gptfit.data.options import PrepareOptions

HELP = "Turn documents into nanoGPT's train.bin and val.bin, with a manifest of what is in them."
EXAMPLES = (
    "gptfit prepare fineweb.parquet --out data/fineweb",
    "gptfit prepare notes.jsonl --tokenizer bytes --limit 20k",
)
KEPT_BYTES = 256 * 2**20  # of freed memory; all batches that are worked on at once need less
SCALES = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="Parquet, .jsonl(.gz|.zst), .csv or .txt: files, folders, globs, http(s) links, hf://datasets/OWNER/NAME/PATH",
    )
    parser.add_argument("--out", type=Path, help="the data folder to make (default: data/NAME of the first source)")
    parser.add_argument("--chat", action="store_true", help="rows are conversations: only the assistant's words count")
    parser.add_argument("--text-column", default="text", help="the column or key that holds the text (default: text)")
    parser.add_argument(
        "--tokenizer",
        default="gpt2",
        metavar="NAME",
        help="gpt2 (default), bytes, chars, or a path to a tokenizer.json",
    )
    parser.add_argument("--limit", metavar="N", help="stop after so many documents (20k) or tokens (50Mtokens)")
    parser.add_argument(
        "--val-fraction", type=float, help="documents for validation (default 0.0005, more for small data)"
    )
    parser.add_argument(
        "--split",
        choices=("auto", "hash", "tail"),
        default="auto",
        help="hash: whole documents; tail: the end of one .txt",
    )
    parser.add_argument("--seed", type=int, default=2357, help="of the split and the shuffle (default 2357)")
    parser.add_argument("--shuffle", action="store_true", help="documents in a seeded order")
    parser.add_argument("--skip-bad", action="store_true", help="go on without files and rows that cannot be read")
    parser.add_argument("--restart", action="store_true", help="throw away what the folder holds and start over")
    parser.add_argument("--workers", type=int, default=0, help="threads, or Ray tasks (default: one per core)")
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="ray: the same on a Ray cluster")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done and stop")
    parser.add_argument("--json", action="store_true", help="print only what the folder holds, as JSON")


def run(args: argparse.Namespace) -> int:
    os.environ.setdefault(
        "OPENBLAS_NUM_THREADS", "1"
    )  # numpy's idle threads would use the processor, and nothing here needs matrix products
    keep_freed_memory(KEPT_BYTES)
    from gptfit.data.prepare import forecast, prepare
    from gptfit.verbs.prepare_view import PrepareScreen, forecast_json, forecast_lines, summary_lines

    options = options_of(args)
    out = console()
    out.quiet = args.json  # what is said on the way is for people
    if args.dry_run:
        with PrepareScreen(out) as screen:
            found = forecast(options, screen)
        _answer(args, out, forecast_json(found, options), forecast_lines(found, options))
        return 0
    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        with PrepareScreen(out, options) as screen:
            info = prepare(options, screen)
    except KeyboardInterrupt as stopped:
        out.print(
            f"stopped; what was written is kept: run the same command again to go on ({options.out})", markup=False
        )
        return exit_code(stopped)
    _answer(args, out, dataset_json(info), summary_lines(info))
    return 0


def _answer(args: argparse.Namespace, out: Console, as_json: dict[str, Any], lines: list[str]) -> None:
    if args.json:
        print_json(as_json)
    else:
        out.print("\n".join(wrapped(line, 4) for line in lines), markup=False, soft_wrap=True)


def _as_interrupt(number: int, _frame: FrameType | None) -> None:
    """SIGTERM is treated as Ctrl-C: the journal is written, then the program ends."""
    raise KeyboardInterrupt(number)


def options_of(args: argparse.Namespace) -> PrepareOptions:
    from gptfit.data.options import PrepareOptions

    documents, tokens = parse_limit(args.limit)
    return PrepareOptions(
        sources=tuple(args.sources),
        out=args.out or Path("data") / default_name(args.sources[0]),
        text_column=args.text_column,
        tokenizer=args.tokenizer,
        val_fraction=args.val_fraction,
        split=args.split,
        seed=args.seed,
        shuffle=args.shuffle,
        limit_documents=documents,
        limit_tokens=tokens,
        skip_bad=args.skip_bad,
        restart=args.restart,
        workers=args.workers,
        engine=args.engine,
        chat=args.chat,
    )


def parse_limit(text: str | None) -> tuple[int | None, int | None]:
    """'20k' -> 20,000 documents; '1.5Mtokens' -> 1,500,000 tokens.

    >>> parse_limit("20k"), parse_limit("1.5M tokens")
    ((20000, None), (None, 1500000))
    """
    if text is None:
        return None, None
    found = re.fullmatch(r"([\d_]+(?:\.\d+)?)\s*([kMB]?)\s*(documents|tokens)?", text.strip())
    if found is None:
        raise UsageError(f"--limit {text}: is not a number of documents or tokens", fix="for example 20k or 50Mtokens")
    number = round(float(found[1].replace("_", "")) * SCALES[found[2]])
    return (None, number) if found[3] == "tokens" else (number, None)
