"""The report page: one self-contained HTML file, or a folder's files sharing one plotly.min.js; opens offline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from gptfit.compare.comparison import Comparison, compare_runs
from gptfit.compare.comparison_json import at_equal_json
from gptfit.compare.sentences import Explanation, explain
from gptfit.errors import RunError
from gptfit.files import reason_of, remedy_of, write_whole
from gptfit.logs.open_run import open_run
from gptfit.logs.runlog import RunLog
from gptfit.pages.html import body
from gptfit.pages.series import MOST_POINTS, run_series, samples

PLOTLY_FILE = "plotly.min.js"
# Nothing may be fetched, whatever a log says; plotly adds style elements of its own and draws images as data.
STANDALONE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'self'; style-src 'unsafe-inline'; img-src data: blob:"
)


def write_report(
    paths: Sequence[str | Path], out_html: str | Path, gpu_name: str | None = None, shared: bool = False
) -> None:
    """The page of one run, or of several compared. `shared` puts plotly beside the page instead of inside it."""
    logs = [open_run(path) for path in paths]
    comparison = compare_runs(logs, gpu_name)
    write_page(logs, comparison, explain(comparison), Path(out_html), shared)


def write_page(
    logs: Sequence[RunLog], comparison: Comparison, explanation: Explanation, out: Path, shared: bool = False
) -> None:
    """Complete or not at all: written beside the target, then renamed."""
    if shared:
        plotly = f'<script src="{PLOTLY_FILE}"></script>'
        if not (out.parent / PLOTLY_FILE).is_file():
            _write_page(out.parent / PLOTLY_FILE, plotly_javascript())
    else:
        plotly = f"<script>{plotly_javascript()}</script>"
    inside = body(comparison, explanation, page_samples(logs, comparison))
    scripts = f"{plotly}\n<script>{asset('charts.js')}</script>"
    data = data_block(page_data(logs, comparison))
    policy = f'<meta http-equiv="Content-Security-Policy" content="{STANDALONE_POLICY}">'
    style = f"<style>{asset('style.css')}</style>"
    title = " and ".join(run.name for run in comparison.runs[:3])
    _write_page(out, document(title, policy + style, TOP + inside, data + scripts))


TOP = (
    '<header class="top"><span class="brand">gptfit</span>'
    '<button type="button" id="theme" class="small" aria-label="Light or dark">light / dark</button></header>'
)


def document(title: str, head: str, inside: str, scripts: str) -> str:
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)} · gptfit</title>\n{head}\n</head>\n"
        f"<body>\n<main>\n{inside}\n</main>\n{scripts}\n</body>\n</html>\n"
    )


def page_data(logs: Sequence[RunLog], comparison: Comparison) -> dict[str, Any]:
    """What the charts draw: thinned series per run, and the difference along each axis for two runs."""
    share = max(200, MOST_POINTS // len(logs))
    runs = []
    for i, (log, facts) in enumerate(zip(logs, comparison.runs, strict=True)):
        runs.append({"letter": comparison.letter(i), "name": facts.name, **run_series(log, facts, share)})
    gaps = at_equal_json(comparison) if len(comparison.duels) == 1 else None
    return {"runs": runs, "unit": comparison.unit, "gaps": gaps}


def page_samples(logs: Sequence[RunLog], comparison: Comparison) -> list[tuple[str, list[dict[str, Any]]]]:
    return [(comparison.letter(i) if len(logs) > 1 else "", samples(log.messages)) for i, log in enumerate(logs)]


def data_block(data: Mapping[str, Any], name: str = "data") -> str:
    """JSON inside HTML: no `<` survives, so nothing in a log can end the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def asset(name: str) -> str:
    return resources.files("gptfit.pages").joinpath("page", name).read_text(encoding="utf-8")


def plotly_javascript() -> str:
    """From the installed package, so that the page needs no network."""
    return resources.files("plotly").joinpath("package_data", PLOTLY_FILE).read_text(encoding="utf-8")


def _write_page(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode("utf-8", "replace"))
    except OSError as error:
        raise RunError(f"{path}: the page cannot be written ({reason_of(error)})", fix=remedy_of(error)) from None
