"""Chat: the answer of a model to a conversation, in pieces as it is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gptfit.checkpoint.loaded_model import LoadedModel
from gptfit.conversation import ANSWER_MARK, Turn
from gptfit.data.chat import conversation_tokens
from gptfit.errors import DataError
from gptfit.generate.pick import Picking
from gptfit.generate.sample import sample

STOPS = ("\nUser:",)  # a model that never learned to end a turn goes on with the next one
LEAST_ROOM = 8  # tokens of an answer


def check_chat(opened: LoadedModel) -> list[str]:
    """What the reader should know before the first answer; a vocabulary that cannot end a turn is an error."""
    if opened.tokenizer.end_of_text is None:
        raise DataError(
            f"{opened.path}: its tokenizer ({opened.tokenizer.name}) has no end-of-text token to end a turn with",
            fix="`gptfit sample RUN --interactive` continues text",
        )
    if opened.data is not None and opened.data.chat:
        return []
    return [
        "not trained on conversations, so it continues rather than answers; to teach it: `gptfit prepare --chat FILE`"
    ]


def answer(opened: LoadedModel, turns: Sequence[Turn], tokens: int, picking: Picking) -> Iterator[str]:
    """Ends where the model ends its turn, or after `tokens` tokens. Turns that the window cannot hold are forgotten."""
    picking = replace(picking, seed=picking.seed + len(turns))  # another draw for every answer
    room = opened.shape.block_size - min(tokens, max(LEAST_ROOM, opened.shape.block_size // 4))
    prompt = _prompt(opened, turns, room)
    is_first = True
    for piece in sample(opened, prompt, 1, tokens, picking, STOPS):
        text = piece.text.lstrip() if is_first else piece.text
        is_first = is_first and not text
        if text:
            yield text


def _prompt(opened: LoadedModel, turns: Sequence[Turn], room: int) -> list[int]:
    """The system's turn always, of the others the latest that fit."""
    kept = [turn for turn in turns if turn.role == "system"]
    latest = [turn for turn in turns if turn.role != "system"]
    ending = opened.tokenizer.encode(ANSWER_MARK)
    while True:
        ids = conversation_tokens([*kept, *latest], opened.tokenizer) + ending
        if len(ids) <= room or len(latest) <= 1:
            return ids
        latest = latest[1:]
