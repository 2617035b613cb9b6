"""The report page: one self-contained HTML file, or a folder's files sharing one plotly.min.js; opens offline."""

from __future__ import annotations

from collections.abc import Sequence
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
from gptfit.pages.shell import PLOTLY_FILE, asset, plotly_javascript, standalone


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
    plotly = f'<script src="{PLOTLY_FILE}"></script>' if shared else None
    if shared and not (out.parent / PLOTLY_FILE).is_file():
        _write_page(out.parent / PLOTLY_FILE, plotly_javascript())
    inside = TOP + body(comparison, explanation, page_samples(logs, comparison))
    title = " and ".join(run.name for run in comparison.runs[:3])
    _write_page(out, standalone(title, inside, page_data(logs, comparison), asset("charts.js"), plotly))


TOP = (
    '<header class="top"><span class="brand">gptfit</span>'
    '<button type="button" id="theme" class="small" aria-label="Light or dark">light / dark</button></header>'
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
    return [(comparison.letter(i) if len(logs) > 1 else "", samples(log.samples)) for i, log in enumerate(logs)]


def _write_page(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode("utf-8", "replace"))
    except OSError as error:
        raise RunError(f"{path}: the page cannot be written ({reason_of(error)})", fix=remedy_of(error)) from None
