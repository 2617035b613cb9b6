"""The live pages of a folder of runs: a list, one run as it trains, and any of them compared."""

from __future__ import annotations

import atexit
import secrets
from collections.abc import Awaitable, Callable
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from gptfit.compare.comparison import compare_runs
from gptfit.compare.sentences import explain
from gptfit.errors import GptfitError
from gptfit.pages.chat_child import ChatChild
from gptfit.pages.chat_page import chat_routes, has_model
from gptfit.pages.follow import end_of_whole_lines, news
from gptfit.pages.html import body
from gptfit.pages.plan_page import PlanSite, plan_routes
from gptfit.pages.report import page_data, page_samples
from gptfit.pages.run_list import ODD, Listing
from gptfit.pages.shell import MEDIA_TYPES, PLOTLY_FILE, asset, asset_names, data_block, document, plotly_path

# Scripts only from this server, none inside a page; plotly adds style elements of its own.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
MOST_COMPARED = 8
COOKIE = "gptfit_token"
HEAD = '<link rel="stylesheet" href="/page/style.css"><link rel="icon" href="data:,">'
TOP = (
    '<header class="top"><span><a class="brand" href="/">gptfit watch</a> <a class="brand" href="/plan">plan</a></span>'
    '<span><span id="live" class="live"></span> '
    '<button type="button" id="theme" class="small" aria-label="Light or dark">light / dark</button></span></header>'
)


def watch_app(root: Path, hosts: tuple[str, ...], token: str | None = None, plan: PlanSite | None = None) -> Starlette:
    """`hosts` are the names the page may be asked for under; `token` is needed when others can reach the port."""
    listing = Listing(root)
    child = ChatChild()
    atexit.register(child.end)
    routes = [
        *chat_routes(HEAD, TOP, listing, child),
        *(plan_routes(HEAD, TOP, plan) if plan else ()),
        Route("/", lambda request: _list_page(root)),
        Route("/run", lambda request: _guarded(lambda: _run_page(listing, request))),
        Route("/compare", lambda request: _guarded(lambda: _compare_page(listing, request))),
        Route("/api/runs", lambda request: JSONResponse(listing.runs())),
        Route("/api/news", lambda request: _guarded(lambda: _news(listing, request))),
        Route(f"/page/{PLOTLY_FILE}", lambda request: FileResponse(plotly_path(), media_type="text/javascript")),
        Route("/page/{name}", _asset),
    ]
    app = Starlette(routes=routes, middleware=[Middleware(Guard, hosts=hosts, token=token)])
    app.state.chat = child
    return app


class Guard(BaseHTTPMiddleware):
    """A page elsewhere in the browser must not read the runs: the Host header is checked, and the token where one is set."""

    def __init__(self, app: Any, hosts: tuple[str, ...], token: str | None) -> None:
        super().__init__(app)
        self._hosts, self._token = hosts, token

    async def dispatch(self, request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        host = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host", "")
        if self._hosts and host.lower() not in self._hosts:
            return PlainTextResponse("this page answers only under its own address", status_code=421)
        given = request.query_params.get("token") or request.cookies.get(COOKIE) or ""
        if self._token and not secrets.compare_digest(given.encode(), self._token.encode()):
            return PlainTextResponse("open the address that `gptfit watch` printed, with its token", status_code=403)
        response = await call_next(request)
        response.headers["Content-Security-Policy"] = POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        if self._token and request.query_params.get("token"):
            response.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
        return response


def _guarded(answer: Callable[[], Response]) -> Response:
    """An expected failure is one line here too."""
    try:
        return answer()
    except GptfitError as error:
        return _trouble(str(error))
    except ODD as error:  # a log that somebody else wrote
        return _trouble(f"this log holds values that make no sense ({type(error).__name__})")


def _trouble(line: str) -> Response:
    shown = line.encode("utf-8", "replace").decode()
    inside = f'{TOP}<h1>{escape(shown)}</h1><p><a href="/">All runs</a></p>'
    return HTMLResponse(document("Not found", HEAD, inside, ""), status_code=404)


def _list_page(root: Path) -> Response:
    inside = (
        f"{TOP}<h1>Runs in {escape(root.name or str(root))}</h1>"
        '<div class="bar"><span class="soft small" id="count"></span>'
        '<button type="button" id="compare" disabled>Compare the ticked runs</button></div>'
        '<div class="card scroll"><table class="runs"><thead><tr><th></th><th>run</th><th>status</th><th>step</th><th>loss</th>'
        '<th>validation</th><th>time left</th><th></th></tr></thead><tbody id="runs"></tbody></table></div>'
    )
    return HTMLResponse(document("Runs", HEAD, inside, '<script src="/page/list.js"></script>'))


def _run_page(listing: Listing, request: Request) -> Response:
    run_id = request.query_params.get("id", "")
    path = listing.path_of(run_id)
    # Measured before reading, so that what is written meanwhile is sent again rather than never.
    offset = end_of_whole_lines(path)
    return _page(listing, [run_id], {"id": run_id, "offset": offset, "status": listing.status(run_id)})


def _compare_page(listing: Listing, request: Request) -> Response:
    return _page(listing, request.query_params.getlist("id")[:MOST_COMPARED], None)


def _page(listing: Listing, run_ids: list[str], follow: dict[str, Any] | None) -> Response:
    """The same view as the report, with scripts and style from this server."""
    logs = [listing.open(run_id) for run_id in run_ids]
    comparison = compare_runs(logs)
    explanation = explain(comparison)
    chat = _chat_link(run_ids[0]) if follow and has_model(listing, run_ids[0]) else ""
    inside = TOP + chat + body(comparison, explanation, page_samples(logs, comparison))
    data = data_block(page_data(logs, comparison) | {"follow": follow})
    names = [PLOTLY_FILE, "charts.js", *(["live.js"] if follow else [])]
    scripts = "".join(f'<script src="/page/{name}"></script>' for name in names)
    title = " and ".join(run.name for run in comparison.runs[:3])
    return HTMLResponse(document(title, HEAD, inside, data + scripts))


def _chat_link(run_id: str) -> str:
    return f'<p class="small beside"><a href="/chat?id={escape(quote(run_id))}">chat with this run</a></p>'


def _news(listing: Listing, request: Request) -> Response:
    run_id = request.query_params.get("id", "")
    said = request.query_params.get("from", "0")
    offset = int(said) if said.isdecimal() and said.isascii() and len(said) < 16 else 0
    return JSONResponse(news(listing.path_of(run_id), offset) | {"status": listing.status(run_id)})


def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in asset_names():
        return PlainTextResponse("no such file", status_code=404)
    return Response(asset(name), media_type=MEDIA_TYPES[Path(name).suffix])
