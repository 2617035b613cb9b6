"""The pages as a site: no link leads nowhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(find_spec("mkdocs") is None or find_spec("material") is None, reason="needs the docs extra")
def test_the_site_builds_without_a_broken_link_and_fetches_nothing(tmp_path: Path) -> None:
    words = ["build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", *words],
        cwd=REPO,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    start = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "tutorial.html" in start
    fetched = re.findall(r'(?:src|href)="(https?://[^"]+\.(?:css|js|woff2?)[^"]*)"', start)
    assert fetched == [], "the site stands by itself"
