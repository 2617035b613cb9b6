"""The page to play with a plan: its form and its routes. The figures come from the function it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from gptfit.errors import GptfitError
from gptfit.pages.shell import PLOTLY_FILE, data_block, document

# What the form asked -> everything the page shows.
Answer = Callable[[Mapping[str, str]], dict[str, Any]]
MOST_ASKED = 64  # fields in one question; a longer one is nobody's form


@dataclass(frozen=True)
class PlanSite:
    """What the page asks and who answers."""

    form: list[dict[str, Any]]
    sizes: Mapping[str, tuple[int, ...]]  # a name -> n_layer, n_head, n_embd
    answer: Answer


def plan_routes(head: str, top: str, site: PlanSite) -> list[Route]:
    """`head` and `top` are those of the site the page is part of."""
    return [
        Route("/plan", lambda request: _page(head, top, site)),
        Route("/api/plan", lambda request: _answered(site.answer, request)),
    ]


def _answered(answer: Answer, request: Request) -> Response:
    """What is wrong with the question is an answer too: one line for the page to show."""
    asked = dict(list(request.query_params.items())[:MOST_ASKED])
    try:
        return JSONResponse(answer(asked))
    except GptfitError as error:
        return JSONResponse({"error": str(error)})


def _page(head: str, top: str, site: PlanSite) -> Response:
    groups = "".join(_group(group) for group in site.form)
    inside = (
        f'{top}<h1 id="headline" aria-live="polite">Plan</h1><p class="lead" id="wrong" role="alert" hidden></p>'
        f'<div class="plan"><form id="form" class="card" autocomplete="off">{groups}'
        '<div id="extra" class="chips"></div></form>'
        '<div class="stack">'
        '<section class="card" aria-labelledby="memory-title"><p class="chart-title" id="memory-title">Memory</p>'
        '<div id="memory" class="memory" role="img"></div><p class="small soft" id="parts"></p></section>'
        '<section class="card numbers" id="numbers" aria-label="Main figures"></section>'
        '<section class="card" id="problems" aria-label="Problems" hidden></section>'
        '<section class="card"><p class="chart-title">Expected validation loss of a run that ends after so many tokens</p>'
        '<div id="curve" class="chart"></div></section>'
        '<section class="card scroll"><table><tbody id="rows"></tbody></table></section>'
        '<section class="card"><div class="bar"><span class="chart-title">Command</span>'
        '<button type="button" data-copy="command">Copy</button></div><pre class="sample" id="command"></pre></section>'
        '<section class="card"><div class="bar"><span class="chart-title">Config file</span>'
        '<button type="button" data-copy="config">Copy</button></div><pre class="sample" id="config"></pre></section>'
        "</div></div>"
    )
    scripts = f'<script src="/page/{PLOTLY_FILE}"></script><script src="/page/plan.js"></script>'
    return HTMLResponse(document("Plan", head, inside, data_block(site.sizes, "sizes") + scripts))


def _group(group: dict[str, Any]) -> str:
    fields = "".join(_field(field) for field in group["fields"])
    return f"<fieldset><legend>{escape(group['title'])}</legend>{fields}</fieldset>"


def _field(field: dict[str, Any]) -> str:
    """A label and a control that every browser gives keyboard and touch for nothing."""
    name, title = escape(field["name"]), escape(field.get("meaning", ""))
    if "options" in field:
        options = "".join(
            f'<option value="{escape(str(value))}"{" selected" if value == field["value"] else ""}>{escape(words)}</option>'
            for value, words in field["options"]
        )
        control = f'<select name="{name}" id="f-{name}" title="{title}">{options}</select>'
    else:
        step = escape(str(field.get("step", 1)))
        control = (
            f'<input type="number" name="{name}" id="f-{name}" value="{escape(str(field["value"]))}" min="0" '
            f'step="{step}" inputmode="decimal" placeholder="{escape(field.get("empty", ""))}" title="{title}">'
        )
    label = escape(field["label"]).replace("_", "_<wbr>")  # where a long key may be broken
    return f'<label for="f-{name}">{label}</label>{control}'
