"""What every page is put into: the document around it, its data, style and scripts, for a file or for a server."""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

PLOTLY_FILE = "plotly.min.js"
MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript"}
# Nothing may be fetched, whatever a log says; plotly adds style elements of its own and draws images as data.
STANDALONE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'self'; style-src 'unsafe-inline'; img-src data: blob:"
)


def document(title: str, head: str, inside: str, scripts: str) -> str:
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)} · gptfit</title>\n{head}\n</head>\n"
        f"<body>\n<main>\n{inside}\n</main>\n{scripts}\n</body>\n</html>\n"
    )


def standalone(title: str, inside: str, data: dict[str, Any], script: str, plotly: str | None = None) -> str:
    """A page that opens without a server or a network; `plotly` is the element that loads it where it is not inside."""
    policy = f'<meta http-equiv="Content-Security-Policy" content="{STANDALONE_POLICY}">'
    head = f"{policy}<style>{asset('style.css')}</style>"
    plotly = plotly or f"<script>{plotly_javascript()}</script>"
    return document(title, head, inside, f"{data_block(data)}{plotly}\n<script>{script}</script>")


def data_block(data: Any, name: str = "data") -> str:
    """JSON inside HTML: no `<` survives, so nothing in a log can end the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def asset_names() -> list[str]:
    """The files of page/ that a server may hand out."""
    return sorted(file.name for file in resources.files("gptfit.pages").joinpath("page").iterdir())


def asset(name: str) -> str:
    return resources.files("gptfit.pages").joinpath("page", name).read_text(encoding="utf-8")


def plotly_path() -> Path:
    """In the installed package, so that the page needs no network."""
    return Path(str(resources.files("plotly").joinpath("package_data", PLOTLY_FILE)))


def plotly_javascript() -> str:
    return plotly_path().read_text(encoding="utf-8")
