"""Conversations: turns with roles, the plain text they are written as, and which of it a model learns from.

    <|endoftext|>User: Hi!<|endoftext|>Assistant: Hello.<|endoftext|>

A conversation begins with the end-of-text token, and every turn ends with it. The marks are ordinary words of any
vocabulary, so a model that was trained on text needs no new rows. What counts is what the assistant says and its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TEMPLATE = "gptfit-1"  # named in a data set's manifest; another one would get another name
ROLES = ("system", "user", "assistant")
# What other collections call them: ShareGPT, Vicuna, Gemini.
OTHER_NAMES = {"human": "user", "prompter": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
# Where the turns are in a row, and under which keys a turn has its role and text: OpenAI's and ShareGPT's.
SHAPES = (("messages", "role", "content"), ("conversations", "from", "value"))
MOST_TURNS = 10_000
# The same as Turn.text below, for transformers; a system turn without text is left out, as read_conversation does.
JINJA = (
    "{{ eos_token }}{% for message in messages %}"
    "{% if message['role'] != 'system' or message['content'] | trim %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] | trim }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


@dataclass(frozen=True)
class Turn:
    """What one side says. Its tokens are those of `mark`, those of `said`, and the end-of-text token."""

    role: str
    text: str  # without blanks at its ends

    @property
    def mark(self) -> str:
        return f"{self.role.capitalize()}:"

    @property
    def said(self) -> str:
        """With the blank before the first word, which most vocabularies have in the word's own token."""
        return f" {self.text}"

    @property
    def counts(self) -> bool:
        return self.role == "assistant"


ANSWER_MARK = Turn("assistant", "").mark  # what a model is given to answer after


def read_conversation(row: Any) -> list[Turn]:
    """The turns of one row of a chat file, or ValueError with what is wrong with it."""
    turns = read_turns(row)
    if not any(turn.counts for turn in turns):
        raise ValueError("has no turn of the assistant")
    return turns


def read_turns(row: Any) -> list[Turn]:
    """The same of a conversation that may still wait for its first answer."""
    for key, role_key, text_key in SHAPES:
        if isinstance(row, Mapping) and isinstance(row.get(key), list):
            turns = [_turn(i, turn, role_key, text_key) for i, turn in enumerate(row[key][:MOST_TURNS], 1)]
            return _all_with_text([turn for turn in turns if turn.text or turn.role != "system"])
    has = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
    raise ValueError(f"has no list of messages or conversations; it has {has[:200]}")


def _all_with_text(turns: list[Turn]) -> list[Turn]:
    for i, turn in enumerate(turns, 1):
        if not turn.text:
            raise ValueError(f"turn {i} ({turn.role}) is empty")
    return turns


def _turn(number: int, turn: Any, role_key: str, text_key: str) -> Turn:
    if not isinstance(turn, Mapping):
        raise ValueError(f"turn {number} is no object")
    role = turn.get(role_key)
    known = OTHER_NAMES.get(role, role) if isinstance(role, str) else None
    if known not in ROLES:
        raise ValueError(f"turn {number} has {role_key} {str(role)[:40]!r}, not {', '.join(ROLES)}")
    return Turn(known, _text(turn.get(text_key), number, text_key).strip())


def _text(content: Any, number: int, key: str) -> str:
    """A string, or OpenAI's list of parts where all of them are text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    if not texts or len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"turn {number}: its {key} is not text")
    return "".join(map(str, texts))


def pack(turns: Sequence[Turn]) -> str:
    """One line that goes through prepare as a document does."""
    return json.dumps([[turn.role, turn.text] for turn in turns], ensure_ascii=False)


def unpack(line: str) -> list[Turn]:
    return [Turn(role, text) for role, text in json.loads(line)]
