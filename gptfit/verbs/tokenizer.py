"""`gptfit tokenizer train`: a BPE vocabulary of one's own, for models where 50k entries cost more than the layers."""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gptfit.dataset import default_name
from gptfit.errors import DataError
from gptfit.shell import command
from gptfit.units import count, gib, percent, si
from gptfit.verbs.common import console, wrapped
from gptfit.verbs.progress_line import ProgressLine
from gptfit.verbs.ticker import Ticker

if TYPE_CHECKING:
    from gptfit.data.train_bpe import TrainedTokenizer

HELP = "Train a BPE vocabulary of your own, for models where GPT-2's 50,257 entries cost more than the layers."
EXAMPLES = ("gptfit tokenizer train fineweb.parquet --vocab-size 8192 --out mybpe.json",)
# Of the time that reading takes, and besides: 40 MiB of web pages were read in 30 s, then 2,048 entries took 2.6 s, 8,192
# 3.7 s and 50,000 6.1 s; of 4 MiB, 3.1 s, then 0.7 to 1.1 s.
MERGING_SHARE, MERGING_S = 0.12, 0.5
EXAMPLE_WIDTH = 384  # n_embd of the small model the summary speaks about


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("train",), help="the only one so far")
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="as for `gptfit prepare`")
    parser.add_argument("--vocab-size", type=int, default=8192, help="entries, with end-of-text (default 8192)")
    parser.add_argument("--out", type=Path, help="the tokenizer.json to write (default: data/NAME-SIZE.json)")
    parser.add_argument("--text-column", default="text", help="the column or key that holds the text (default: text)")
    parser.add_argument("--sample-mib", type=int, default=256, help="text to learn from, in MiB (default 256)")


def run(args: argparse.Namespace) -> int:
    out = args.out or Path("data") / f"{default_name(args.sources[0])}-{args.vocab_size}.json"
    if out.exists():
        raise DataError(f"{out}: already there, and data may have been made with it", fix="use another --out")
    found = _train(args, out)
    saved = (50257 - args.vocab_size) * EXAMPLE_WIDTH
    lines = [f"{out}: {count(found.tokenizer.vocab_size)} entries, learned from {gib(found.trained_on_bytes)} of text"]
    if math.isfinite(found.bytes_per_token):
        ratio = found.gpt2_bytes_per_token / found.bytes_per_token - 1
        lines.append(
            f"  {found.bytes_per_token:.2f} bytes per token on held-out text; GPT-2's 50,257 entries give "
            f"{found.gpt2_bytes_per_token:.2f} ({percent(ratio)} {'more' if ratio >= 0 else 'fewer'} tokens with yours)"
        )
    lines.append(f"  a model with n_embd {EXAMPLE_WIDTH} has {si(saved)} fewer parameters than with GPT-2's vocabulary")
    # The folder that a proposal with this vocabulary looks for, and no other tokens of the same text.
    words = ["gptfit", "prepare", *args.sources, *_column(args), "--tokenizer", out, "--out", Path("data") / out.stem]
    lines.append("next: " + command(words))
    console().print("\n".join(wrapped(line, 4) for line in lines), markup=False, soft_wrap=True)
    return 0


def _column(args: argparse.Namespace) -> list[str]:
    return [] if args.text_column == "text" else ["--text-column", args.text_column]


def _train(args: argparse.Namespace, out: Path) -> TrainedTokenizer:
    """With a bar while text is read, whose time tells about how long the merges take."""
    from gptfit.data.train_bpe import LEAST_VOCABULARY, train_tokenizer

    began = time.monotonic()
    with Ticker(sys.stderr) as ticker, ProgressLine("reading") as reading:

        def on_progress(done: int, total: int) -> None:
            reading(done, total)
            if done == total and sys.stderr.isatty():
                expected_s = MERGING_S + MERGING_SHARE * (time.monotonic() - began)
                ticker.now(f"computing {count(args.vocab_size - LEAST_VOCABULARY)} merges", expected_s)

        return train_tokenizer(
            args.sources, out, args.vocab_size, args.text_column, args.sample_mib * 2**20, on_progress
        )
