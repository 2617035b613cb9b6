"""The pictures of the README: a plan as SVG, a comparison page as PNG, from the commands a reader can type.

python bench/_pictures.py LOG_A LOG_B --config CONFIG_A CONFIG_B --gpu 4070
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
PLAN = ["plan", "--gpu", "RTX 4070", "--batch_size=8", "--gradient_accumulation_steps=64"]
PLAN += ["--max_iters=6000", "--lr_decay_iters=6000", "--warmup_iters=300"]
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("logs", nargs="+")
    parser.add_argument("--config", nargs="+", default=[])
    parser.add_argument("--gpu", default="4070")
    args = parser.parse_args()
    draw_plan(DOCS / "plan.svg")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "comparison.html"
        configs = ["--config", *args.config] if args.config else []
        gptfit("compare", *args.logs, *configs, "--gpu", args.gpu, "--html", str(page))
        photograph(page, DOCS / "comparison.png")
    for name in ("plan.svg", "comparison.png"):
        print(f"docs/{name}: {(DOCS / name).stat().st_size / 1024:.0f} KiB")


def gptfit(*words: str) -> str:
    environment = {**os.environ, "FORCE_COLOR": "1"}
    command = [sys.executable, "-m", "gptfit", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def draw_plan(target: Path) -> None:
    """The terminal's own text and colours, as rich draws a terminal."""
    from rich.console import Console
    from rich.text import Text

    text = Text.from_ansi("\n".join(line.rstrip() for line in gptfit(*PLAN).splitlines()))
    width = max(line.cell_len for line in text.split("\n")) + 1
    terminal = Console(record=True, width=width, file=io.StringIO())
    terminal.print(text)
    drawing = terminal.export_svg(title=f"gptfit {' '.join(PLAN[:3])} ...")
    # Rich links its font on a public server; the reader's own monospace font will do.
    target.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawing, flags=re.DOTALL), encoding="utf-8")


def photograph(page: Path, target: Path) -> None:
    from playwright.sync_api import sync_playwright

    path = next(found for name in CHROMIUM if (found := shutil.which(name)))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": 1100, "height": 1320})
        tab.set_default_timeout(180_000)  # of milliseconds; the page carries plotly, and other programs may be at work
        tab.goto(page.as_uri())
        tab.wait_for_selector(".main-svg")
        tab.wait_for_timeout(1000)  # plotly sizes its charts once more after drawing them
        tab.screenshot(path=target)
        browser.close()


if __name__ == "__main__":
    main()
