"""Samples during training: what the model writes after a few prompts, kept by step; a failure never ends the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from gptfit.data.token_files import TokenFile
from gptfit.data.tokenizer import Tokenizer, load_tokenizer
from gptfit.dataset import DatasetInfo
from gptfit.errors import DataError
from gptfit.files import reason_of
from gptfit.generate.decode import generate
from gptfit.generate.pick import Picking
from gptfit.logs.events import Sample
from gptfit.train.engine import Engine
from gptfit.train.faults import Stopped
from gptfit.train.randomness import rng_state, set_rng_state

SAMPLE_TOKENS = 64  # new ones per prompt
OPENING_TOKENS = 16  # of a validation document
OPENINGS = 2
QUESTION_TOKENS = 4096  # of validation that are looked at for them
BETWEEN = "|"


@dataclass(frozen=True)
class Prompt:
    """What is continued, as a person reads it and as the model does."""

    text: str
    ids: tuple[int, ...]


class Sampling:
    """Writes after the same prompts every time, drawing from streams of its own: training goes on as if it had not."""

    def __init__(self, info: DatasetInfo, wish: str, val: TokenFile, engine: Engine) -> None:
        self._info, self._wish, self._val, self._engine = info, wish, val, engine
        self._tokenizer: Tokenizer | None = None
        self._prompts: list[Prompt] = []
        self.problem: str | None = None  # why there are no more

    def samples(self, step: int, poll: Callable[[], None] | None) -> list[Sample]:
        """One per prompt; none, and `problem` says why, where it cannot be done. `poll` may raise to stop."""
        engine = self._engine
        kept, was_training = rng_state(engine.device), engine.model.training
        stream = engine.model.stream_dtype
        try:
            with engine.tail.in_place(), engine.eagerly(), engine.products.plainly():
                engine.model.eval()
                engine.model.stream_dtype = None  # in float32, as `gptfit sample` reads the checkpoint
                return [self._continued(prompt, step, poll) for prompt in self._known_prompts()]
        except Stopped:
            raise
        # Tokenizer files, memory: nothing of it is worth a run.
        except Exception as error:  # noqa: BLE001
            self.problem = reason_of(error)
            return []
        finally:
            engine.model.train(was_training)
            engine.model.stream_dtype = stream
            set_rng_state(kept, engine.device)
            if self.problem:
                engine.device.release_memory()

    def _known_prompts(self) -> list[Prompt]:
        if not self._prompts:
            self._tokenizer = load_tokenizer(self._info)
            known, rows = self._tokenizer.vocab_size, self._engine.model.shape.vocab_size
            if known > rows:
                raise DataError(f"the tokenizer ({self._tokenizer.name}) has {known:,} tokens, the model {rows:,}")
            self._prompts = find_prompts(self._tokenizer, self._wish, self._val)
        return self._prompts

    def _continued(self, prompt: Prompt, step: int, poll: Callable[[], None] | None) -> Sample:
        assert self._tokenizer is not None
        model, tokenizer = self._engine.model, self._tokenizer
        ids = []
        for (token,) in generate(model, prompt.ids, 1, SAMPLE_TOKENS, Picking(), tokenizer.vocab_size):
            if poll:
                poll()
            if token == tokenizer.end_of_text:
                break
            ids.append(token)
        return Sample(step, prompt.text, tokenizer.decode(ids))


def find_prompts(tokenizer: Tokenizer, wish: str, val: TokenFile) -> list[Prompt]:
    """Those the config names; else the start of a document and how two of validation begin."""
    if wish:
        return [Prompt(text, tuple(tokenizer.encode(text))) for text in wish.split(BETWEEN) if text]
    if val.is_masked:
        return _questions(tokenizer, val)
    end = tokenizer.end_of_text
    starts = np.linspace(0, max(0, val.n_tokens - OPENING_TOKENS - 1), OPENINGS + 1)[:OPENINGS].astype(np.int64)
    openings = val.windows(starts, min(OPENING_TOKENS, val.n_tokens))
    found = [tuple(_after_last(row.tolist(), end)) for row in openings]
    return [*_new_document(tokenizer), *(Prompt(tokenizer.decode(ids), ids) for ids in found if ids)]


def _new_document(tokenizer: Tokenizer) -> list[Prompt]:
    """None where nothing begins one: an alphabet of characters may have no line end."""
    if tokenizer.end_of_text is not None:
        return [Prompt("", (tokenizer.end_of_text,))]
    try:
        return [Prompt("", tuple(tokenizer.encode("\n")))]
    except DataError:
        return []


def _questions(tokenizer: Tokenizer, val: TokenFile) -> list[Prompt]:
    """Of conversations: all before the assistant's first word, of the first few that validation begins with."""
    window, counts = val.marked_windows(np.zeros(1, np.int64), min(QUESTION_TOKENS, val.n_tokens))
    assert counts is not None
    ids, begins = window[0].tolist(), np.flatnonzero(np.diff(counts[0].astype(np.int8)) == 1) + 1
    found: list[tuple[int, ...]] = []
    end = tokenizer.end_of_text
    for place in begins.tolist():
        before = ids[:place]
        starts = [i for i, pair in enumerate(pairwise(before)) if pair == (end, end)]
        question = before[starts[-1] + 1 :] if starts else before
        found.append(tuple(question))
    return [Prompt(_shown(tokenizer, ids), ids) for ids in list(dict.fromkeys(found))[: OPENINGS + 1]]


def _shown(tokenizer: Tokenizer, ids: tuple[int, ...]) -> str:
    """A turn per line."""
    turns = (list(group) for is_end, group in groupby(ids, lambda token: token == tokenizer.end_of_text) if not is_end)
    return "\n".join(tokenizer.decode(turn) for turn in turns)


def _after_last(ids: list[int], end: int | None) -> list[int]:
    """What follows the last end of text in a window, so that a prompt is of one document."""
    return ids if end is None or end not in ids else ids[len(ids) - ids[::-1].index(end) :]
