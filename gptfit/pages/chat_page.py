"""The chat page: a conversation with the model of a run, its answer streamed as it is made."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gptfit.errors import GptfitError
from gptfit.logs.runlog import RUN_LOG
from gptfit.pages.chat_child import ChatChild
from gptfit.pages.run_list import Listing
from gptfit.pages.shell import data_block, document
from gptfit.units import duration

MOST_BYTES = 2**20  # of a question with all that was said before
WAIT_SECONDS = 0.25  # between looks at whether the browser is still there
LONGEST_SILENCE = 300.0  # while a large model is loaded
BUSY = "another answer is being written; stop it or wait"
CHECKPOINTS = ("best.pt", "ckpt.pt")


def has_model(listing: Listing, run_id: str) -> bool:
    """Whether there is something to talk with."""
    try:
        path = listing.path_of(run_id)
    except GptfitError:
        return False
    return path.name == RUN_LOG and any((path.parent / name).is_file() for name in CHECKPOINTS)


def chat_routes(head: str, top: str, listing: Listing, child: ChatChild) -> list[Route]:
    return [
        Route("/chat", lambda request: _page(head, top, listing, request)),
        Route("/api/chat", partial(_ask, listing, child), methods=["POST"]),
    ]


def _page(head: str, top: str, listing: Listing, request: Request) -> Response:
    run_id = request.query_params.get("id", "")
    if not has_model(listing, run_id):
        inside = f'{top}<h1>This run has no checkpoint to talk with</h1><p><a href="/">All runs</a></p>'
        return HTMLResponse(document("Not found", head, inside, ""), status_code=404)
    name = listing.path_of(run_id).parent.name
    inside = (
        f"{top}<h1>Chat with {escape(name)}</h1>"
        '<div id="talk" class="talk" role="log" aria-live="polite" aria-label="Conversation"></div>'
        '<p id="state" class="soft small" role="status"></p>'
        '<form id="ask" class="ask"><textarea id="question" rows="2" aria-label="Your message" '
        'placeholder="Say something. Enter sends, Shift and Enter begins a new line."></textarea>'
        '<div class="bar"><button type="submit" id="send">Send</button>'
        '<button type="button" id="stop" disabled>Stop</button>'
        '<button type="button" id="again">New conversation</button></div></form>'
    )
    data = data_block({"id": run_id})
    return HTMLResponse(document(f"Chat with {name}", head, inside, f'{data}<script src="/page/chat.js"></script>'))


async def _ask(listing: Listing, child: ChatChild, request: Request) -> Response:
    """JSON only, which a page elsewhere cannot send without being asked first; Guard has looked at the host."""
    if not request.headers.get("content-type", "").startswith("application/json"):
        return _refused("ask with JSON", 415)
    said = await request.body() if int(request.headers.get("content-length") or MOST_BYTES + 1) <= MOST_BYTES else b""
    try:
        asked: Any = json.loads(said)
        run_id, messages = str(asked["id"]), list(asked["messages"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return _refused("a question has an id and messages", 400)
    if not has_model(listing, run_id):
        return _refused("no such run, or it has no checkpoint", 404)
    if child.is_busy:
        return _refused(BUSY, 409)
    lines = _lines(child, listing.path_of(run_id).parent, messages, request)
    return StreamingResponse(lines, media_type="application/x-ndjson")


def _refused(line: str, status: int) -> Response:
    return JSONResponse({"error": line}, status_code=status)


async def _lines(child: ChatChild, run: Path, messages: list[Any], request: Request) -> AsyncIterator[str]:
    """As they come; when the browser goes away the model stops too.

    Asked in here and without waiting, so that whoever goes away before the first line leaves nothing behind.
    """
    silent = 0.0
    try:
        answer = child.ask(run, messages)
    except OSError as error:
        yield json.dumps({"error": f"the model could not be started: {error.strerror or error}"}) + "\n"
        return
    if answer is None:
        yield json.dumps({"error": BUSY}) + "\n"
        return
    try:
        while silent < LONGEST_SILENCE:
            line = await run_in_threadpool(answer.next, WAIT_SECONDS)
            silent = silent + WAIT_SECONDS if line is None else 0.0
            if line is None:
                if await request.is_disconnected():
                    return
                continue
            yield json.dumps(line) + "\n"
            if "end" in line or "error" in line:
                return
        yield json.dumps({"error": f"the model said nothing for {duration(LONGEST_SILENCE)}"}) + "\n"
    finally:
        # Not awaited: a task that is being cancelled may not wait.
        answer.close_soon()
