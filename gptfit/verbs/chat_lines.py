"""Chat for another program, `gptfit watch`: a question per line of JSON in, pieces of its answer as lines out.

In:  {"messages": [{"role": "user", "content": "Hi"}]}, or {"stop": true} to end the answer being made.
Out: {"ready": "what was opened"} once, then {"text": "..."} as it is made, and {"end": true} or {"error": "..."}.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from gptfit.conversation import read_turns
from gptfit.errors import GptfitError

if TYPE_CHECKING:
    from gptfit.checkpoint.loaded_model import LoadedModel
    from gptfit.generate.pick import Picking

Questions = queue.Queue[tuple[Any, threading.Event]]  # what was asked, and what ends its answer


def serve_lines(opened: LoadedModel, tokens: int, picking: Picking, notes: list[str]) -> NoReturn:
    """Until stdin ends, which also ends an answer half-way."""
    questions: Questions = queue.Queue()
    threading.Thread(target=_read, args=(questions,), daemon=True).start()
    _say({"ready": notes[0], "notes": notes[1:]})
    while True:
        asked, stop = questions.get()
        try:
            _answer(opened, read_turns(asked), tokens, picking, stop)
        except (GptfitError, ValueError) as error:
            _say({"error": str(error)})


def _read(questions: Questions) -> None:
    """Each question has a stop of its own: one that is said while the model is still loading is not forgotten."""
    stop = threading.Event()
    for line in sys.stdin:
        try:
            said = json.loads(line)
        except ValueError:
            said = {}
        if isinstance(said, dict) and said.get("stop"):
            stop.set()
        else:
            stop = threading.Event()
            questions.put((said, stop))
    os._exit(0)  # whoever asked is gone, so nobody waits for the rest


def _answer(opened: LoadedModel, turns: list[Any], tokens: int, picking: Picking, stop: threading.Event) -> None:
    from gptfit.generate.chat import answer

    for piece in answer(opened, turns, tokens, picking):
        if stop.is_set():
            break
        _say({"text": piece})
    _say({"end": True})


def _say(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()
