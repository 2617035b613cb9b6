"""`gptfit chat RUN`: a conversation with a model on the terminal, or one question with --prompt or through a pipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from gptfit.conversation import Turn
from gptfit.errors import UsageError
from gptfit.verbs.model_view import describe, note, opened_model

if TYPE_CHECKING:
    from gptfit.checkpoint.loaded_model import LoadedModel
    from gptfit.generate.pick import Picking

HELP = "Talk with a run: answers as they are made. Ctrl-C ends an answer, Ctrl-D the conversation, /new begins another."
EXAMPLES = ("gptfit chat out-chat", 'gptfit chat out-chat --prompt "Who are you?" --temperature 0')
AGAIN = "/new"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN|ckpt.pt", help="run folder, checkpoint, GPT-2 folder, or gpt2")
    parser.add_argument("--prompt", help="ask this, print the answer, and end; - reads it from stdin")
    parser.add_argument("--system", default="", help="what the model is told before the conversation")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per answer at most (default 256)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=int, default=200, help="draw from the k likeliest; 0 for all (default 200)")
    parser.add_argument("--top-p", type=float, help="draw from the likeliest that reach this probability together")
    parser.add_argument("--seed", type=int, default=1337, help="of the draws (default 1337)")
    parser.add_argument("--data", metavar="DIR", help="data folder, when the checkpoint does not find it")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1 or mps")
    # For `gptfit watch`: questions and answers as lines of JSON.
    parser.add_argument("--lines", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    if args.tokens < 1:
        raise UsageError(f"--tokens {args.tokens} must be 1 or more")
    question = sys.stdin.read() if args.prompt == "-" else args.prompt
    if question is not None and not question.strip():
        raise UsageError("--prompt is empty", fix="ask something, or leave it out")
    from gptfit.generate.chat import check_chat
    from gptfit.generate.pick import Picking

    picking = Picking(args.temperature, args.top_k or None, args.top_p, args.seed)
    opened = opened_model(args.model, args.data, args.device)
    notes = check_chat(opened)
    if args.lines:
        from gptfit.verbs.chat_lines import serve_lines

        serve_lines(opened, args.tokens, picking, [describe(opened), *notes])
    for line in (describe(opened), *opened.notes, *notes):
        note(line)
    turns = [Turn("system", args.system.strip())] if args.system.strip() else []
    if question is not None:
        _answer(opened, [*turns, Turn("user", question.strip())], args.tokens, picking)
        return 0
    return _talk(opened, turns, args.tokens, picking)


def _talk(opened: LoadedModel, beginning: list[Turn], tokens: int, picking: Picking) -> int:
    """Until the end of input. A question that is piped in is a line; its answer is one paragraph of the output."""
    turns = list(beginning)
    for said in _questions():
        if said == AGAIN:
            turns = list(beginning)
            note("a new conversation")
            continue
        turns.append(Turn("user", said))
        text = _answer(opened, turns, tokens, picking).strip()
        if text:
            turns.append(Turn("assistant", text))
        else:
            turns.pop()  # a conversation goes on from what was said
    return 0


def _questions() -> Iterator[str]:
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401 - the arrow keys then move through the line and what was said before
    while True:
        try:
            said = input("you> " if is_terminal else "").strip()
        except EOFError:
            if is_terminal:
                print()
            return
        if said:
            yield said


def _answer(opened: LoadedModel, turns: list[Turn], tokens: int, picking: Picking) -> str:
    """Shown as it grows; Ctrl-C ends it, and what was said until then stays."""
    text = ""
    try:
        from gptfit.generate.chat import answer  # takes a moment, in which Ctrl-C means the answer too

        for piece in answer(opened, turns, tokens, picking):
            text += piece
            sys.stdout.write(_shown(piece))
            sys.stdout.flush()
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    sys.stdout.write("\n")
    sys.stdout.flush()
    return text


def _shown(text: str) -> str:
    """Without what a terminal would take for a command; a file or pipe gets the text as it is."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
