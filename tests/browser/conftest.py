"""A headless Chromium, a page that records what goes wrong in it, and a running `gptfit watch`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, an extra of the developers")

ARGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[playwright.Browser]:
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"needs a Chromium on the PATH ({', '.join(NAMES)})")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=ARGS)
        yield chromium
        chromium.close()


class Watched:
    """A page, and everything it complained about or asked the network for."""

    def __init__(self, page: playwright.Page) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on(
            "console",
            lambda message: self.errors.append(message.text) if message.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def points(self, chart: str) -> int:
        """How many points the chart has drawn, over all its traces."""
        return int(self.page.evaluate(f"document.getElementById('{chart}').data.reduce((n, t) => n + t.y.length, 0)"))

    def axis_title(self, chart: str) -> str:
        return str(self.page.evaluate(f"document.getElementById('{chart}').layout.xaxis.title.text"))


@pytest.fixture
def open_page(browser: playwright.Browser) -> Iterator[Callable[..., Watched]]:
    contexts = []

    def open_at(address: str, offline: bool = False, width: int = 1200, scheme: str = "light") -> Watched:
        context = browser.new_context(viewport={"width": width, "height": 900}, offline=offline, color_scheme=scheme)
        contexts.append(context)
        context.set_default_timeout(120_000)  # of milliseconds: a page with plotly, while other programs are at work
        watched = Watched(context.new_page())
        watched.page.goto(address)
        return watched

    yield open_at
    for context in contexts:
        context.close()


@pytest.fixture
def watch_server() -> Iterator[Callable[[Path], str]]:
    """watch_server(folder) starts `gptfit watch` and returns its address."""
    started: list[subprocess.Popen[str]] = []

    def start(folder: Path) -> str:
        command = [sys.executable, "-m", "gptfit", "watch", str(folder)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("open "):
                return line.split()[1]
        raise AssertionError("gptfit watch printed no address")

    yield start
    for process in started:
        process.terminate()
        process.wait(timeout=20)
        assert process.stdout is not None
        process.stdout.close()
