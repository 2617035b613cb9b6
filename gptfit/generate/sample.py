"""Sampling text: a prompt in, pieces of text per row out as they are made, until a stop or the last token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gptfit.checkpoint.loaded_model import LoadedModel
from gptfit.data.tokenizer import END_OF_TEXT, TextStream, Tokenizer
from gptfit.errors import DataError, UsageError
from gptfit.generate.decode import generate, window_start
from gptfit.generate.pick import Picking


@dataclass(frozen=True)
class SampledText:
    """Text that row `row` now has; `ends` when nothing follows."""

    row: int
    text: str
    ends: bool = False


def encode_prompt(tokenizer: Tokenizer, text: str | None) -> list[int]:
    """None starts a new document. The spelling of end-of-text means the token, as in nanoGPT's sample.py."""
    end = tokenizer.end_of_text
    if text is None:
        return tokenizer.encode("\n") if end is None else [end]
    parts = text.split(END_OF_TEXT) if end is not None else [text]
    ids = tokenizer.encode(parts[0])
    for part in parts[1:]:
        assert end is not None
        ids += [end, *tokenizer.encode(part)]
    if not ids:
        raise UsageError("--prompt is empty", fix="leave it out to start a new document")
    return ids


def check_prompt(opened: LoadedModel, prompt: Sequence[int], tokens: int) -> list[str]:
    """What the reader should know before the text comes; a token the model has no row for is an error."""
    block_size = opened.shape.block_size
    if max(prompt) >= opened.shape.vocab_size:
        raise DataError(
            f"the prompt has token {max(prompt)}, the model knows {opened.shape.vocab_size:,}",
            fix="name its data with --data DIR",
        )
    start = window_start(len(prompt), block_size)
    if start:
        return [f"the prompt has {len(prompt):,} tokens; the model reads the last {len(prompt) - start:,} of them"]
    if len(prompt) + tokens > block_size:
        return [f"the text grows beyond the window of {block_size:,} tokens; its beginning is forgotten as it goes on"]
    return []


def sample(
    opened: LoadedModel, prompt: Sequence[int], rows: int, tokens: int, picking: Picking, stops: Sequence[str] = ()
) -> Iterator[SampledText]:
    """Each row ends at end-of-text, before one of `stops`, or after `tokens` tokens."""
    texts = [_Row(opened.tokenizer, stops) for _ in range(rows)]
    made = generate(opened.model, prompt, rows, tokens, picking, opened.sampled_vocab_size)
    for step, ids in enumerate(made, start=1):
        for row, (text, token) in enumerate(zip(texts, ids, strict=True)):
            if not text.ended:
                yield SampledText(row, text.push(token, is_last=step == tokens), text.ended)
        if all(text.ended for text in texts):
            return


class _Row:
    """The text of one row: shows whole characters only, and holds back what may be the beginning of a stop text."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._stream: TextStream = tokenizer.stream()
        self._end_of_text = tokenizer.end_of_text
        self._stops = stops
        self._held = ""
        self.ended = False

    def push(self, token: int, is_last: bool) -> str:
        self.ended = is_last or token == self._end_of_text
        self._held += "" if token == self._end_of_text else self._stream.push(token)
        if self.ended:
            self._held += self._stream.finish()
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.ended = True
            self._held = self._held[: min(found)]
        keep = 0 if self.ended else max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
