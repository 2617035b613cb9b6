"""`gptfit tokenizer train`: a BPE vocabulary of one's own, for models where 50k entries cost more than the layers."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from gptfit.errors import DataError
from gptfit.shell import command
from gptfit.units import count, gib, percent, si
from gptfit.verbs.common import console
from gptfit.verbs.prepare import default_name

HELP = "Train a BPE vocabulary of your own: `gptfit tokenizer train SOURCE --vocab-size 8192`."
EXAMPLE_WIDTH = 384  # n_embd of the small model the summary speaks about


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("train",))
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="as for `gptfit prepare`")
    parser.add_argument("--vocab-size", type=int, default=8192, help="entries, with end-of-text (default 8192)")
    parser.add_argument("--out", type=Path, help="the tokenizer.json to write (default: data/NAME-SIZE.json)")
    parser.add_argument("--text-column", default="text", help="the column or key that holds the text (default: text)")
    parser.add_argument("--sample-mib", type=int, default=256, help="text to learn from, in MiB (default 256)")


def run(args: argparse.Namespace) -> int:
    from gptfit.data.train_bpe import train_tokenizer

    out = args.out or Path("data") / f"{default_name(args.sources[0])}-{args.vocab_size}.json"
    if out.exists():
        raise DataError(f"{out}: already there, and data may have been made with it", fix="use another --out")
    found = train_tokenizer(args.sources, out, args.vocab_size, args.text_column, args.sample_mib * 2**20)
    saved = (50257 - args.vocab_size) * EXAMPLE_WIDTH
    lines = [f"{out}: {count(found.tokenizer.vocab_size)} entries, learned from {gib(found.trained_on_bytes)} of text"]
    if math.isfinite(found.bytes_per_token):
        ratio = found.gpt2_bytes_per_token / found.bytes_per_token - 1
        lines.append(
            f"  {found.bytes_per_token:.2f} bytes per token on held-out text; GPT-2's 50,257 entries give "
            f"{found.gpt2_bytes_per_token:.2f} ({percent(ratio)} {'more' if ratio >= 0 else 'fewer'} tokens with yours)"
        )
    lines.append(f"  a model with n_embd {EXAMPLE_WIDTH} has {si(saved)} fewer parameters than with GPT-2's vocabulary")
    lines.append("next: " + command(["gptfit", "prepare", *args.sources, "--tokenizer", out]))
    console().print("\n".join(lines), markup=False, soft_wrap=True)
    return 0
