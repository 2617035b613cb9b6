"""`gptfit sample`: text from a run, a nanoGPT checkpoint or a GPT-2 folder, streamed as it is made."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gptfit.errors import DataError, UsageError
from gptfit.logs.events import Sample
from gptfit.logs.runlog import RUN_LOG, RunLogWriter
from gptfit.shell import command
from gptfit.verbs.model_view import describe, note, opened_model

if TYPE_CHECKING:
    from gptfit.checkpoint.loaded_model import LoadedModel
    from gptfit.generate.pick import Picking

HELP = "Text from a checkpoint: several samples at once, or a conversation with --interactive."
EXAMPLES = ('gptfit sample out --prompt "Once upon a time" --tokens 200', "gptfit sample out --interactive")
SEPARATOR = "---------------"  # nanoGPT's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="RUN|ckpt.pt", help="run folder, checkpoint, GPT-2 folder, or gpt2")
    for name in ("--out_dir", "--init_from"):
        parser.add_argument(name, help="the same, as nanoGPT's sample.py has it")
    parser.add_argument("--prompt", "--start", help="what to continue; - reads it from stdin, FILE:name from a file")
    parser.add_argument("--interactive", action="store_true", help="ask for prompts until end of input")
    parser.add_argument("--n", "--num_samples", type=int, default=3, help="samples, made together (default 3)")
    parser.add_argument(
        "--tokens", "--max_new_tokens", type=int, default=200, help="tokens per sample at most (default 200)"
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument(
        "--top-k", "--top_k", type=int, default=200, help="draw from the k likeliest; 0 for all (default 200)"
    )
    parser.add_argument("--top-p", type=float, help="draw from the likeliest that reach this probability together")
    parser.add_argument("--seed", type=int, default=1337, help="of the draws (default 1337)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    parser.add_argument("--data", metavar="DIR", help="data folder, when the checkpoint does not find it")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1 or mps")


def run(args: argparse.Namespace) -> int:
    named = [args.model, args.out_dir, None if args.init_from == "resume" else args.init_from]
    models = [name for name in named if name]
    if len(models) != 1:
        raise UsageError("name one run folder or checkpoint: gptfit sample RUN")
    for option in ("n", "tokens"):
        if getattr(args, option) < 1:
            raise UsageError(f"--{option} {getattr(args, option)} must be 1 or more")
    if args.interactive and args.prompt is not None:
        raise UsageError("--interactive asks for prompts itself", fix="leave --prompt out")
    if "" in args.stop:
        raise UsageError("--stop needs some text")
    from gptfit.generate.pick import Picking

    picking = Picking(args.temperature, args.top_k or None, args.top_p, args.seed)
    opened = opened_model(models[0], args.data, args.device)
    for line in (describe(opened), *opened.notes):
        note(line)
    if args.interactive:
        return _loop(opened, picking, args)
    _show(opened, _read_prompt(args.prompt), picking, args)
    if opened.data is not None and sys.stderr.isatty():
        note("next: " + command(["gptfit", "eval", models[0]]))
    return 0


def _read_prompt(wish: str | None) -> str | None:
    if wish == "-":
        return sys.stdin.read()
    if wish is not None and wish.startswith("FILE:"):
        path = Path(wish.removeprefix("FILE:"))
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--prompt {wish}: cannot be read ({error})", fix="give a UTF-8 text file") from None
    return wish


def _loop(opened: LoadedModel, picking: Picking, args: argparse.Namespace) -> int:
    """Ctrl-C ends the text being made, end of input ends the loop."""
    while True:
        try:
            prompt = input("prompt> " if sys.stdin.isatty() else "")
        except EOFError:
            return 0
        if not prompt:
            continue
        try:
            _show(opened, prompt, picking, args)
        except DataError as error:
            note(f"gptfit: {error}")
        except KeyboardInterrupt:
            print()


def _show(opened: LoadedModel, text: str | None, picking: Picking, args: argparse.Namespace) -> None:
    """The first row is shown as it grows; the others, made at the same time, follow when it ends."""
    from gptfit.generate.sample import check_prompt, encode_prompt, sample

    prompt = encode_prompt(opened.tokenizer, text)
    for line in check_prompt(opened, prompt, args.tokens):
        note(line)
    begun = time.perf_counter()
    rows = [text or ""] * args.n
    ended = [False] * args.n
    shown, n_tokens, first_s = 0, 0, 0.0
    write: Callable[[str], int] = sys.stdout.write
    write(rows[0])
    for piece in sample(opened, prompt, args.n, args.tokens, picking, args.stop):
        first_s = first_s or time.perf_counter() - begun
        n_tokens += 1
        rows[piece.row] += piece.text
        ended[piece.row] = piece.ends
        if piece.row == shown:
            write(piece.text)
        while shown < args.n and ended[shown]:
            shown += 1
            write(f"\n{SEPARATOR}\n" + (rows[shown] if shown < args.n else ""))
        sys.stdout.flush()
    seconds = time.perf_counter() - begun
    note(f"{n_tokens:,} tokens in {seconds:.1f} s, {n_tokens / seconds:,.0f} tokens/s, the first after {first_s:.2f} s")
    _keep_in_log(opened, rows)


def _keep_in_log(opened: LoadedModel, texts: list[str]) -> None:
    """In the run's own log, where the report and `gptfit watch` find them; a folder that is no run has none."""
    log = opened.path.parent / RUN_LOG
    if not log.is_file() or not os.access(log, os.W_OK):
        return
    with RunLogWriter(log) as writer:
        for text in texts:
            writer.append(Sample(opened.checkpoint.iter_num, text=text, time=time.time()))
