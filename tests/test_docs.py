"""Docs that cannot lie: every verb has a real example, every link leads somewhere."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from gptfit.cli import VERBS, available_verbs, parser_of
from gptfit.config.keys import KEYS

REPO = Path(__file__).resolve().parent.parent
README = (REPO / "README.md").read_text(encoding="utf-8")
PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))]


def commands(text: str) -> list[str]:
    """The gptfit commands typed in a page's code blocks, continuation lines joined."""
    blocks = re.findall(r"```(?:bash|console|sh|text)\n(.*?)```", text, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ").strip() for line in lines if re.match(r"(\$ )?gptfit [a-z]", line)]


def test_every_verb_in_the_table_has_its_file() -> None:
    assert available_verbs() == list(VERBS)


@pytest.mark.parametrize("verb", available_verbs())
def test_readme_shows_each_verb_with_an_example(verb: str) -> None:
    assert any(command.split()[1] == verb for command in commands(README)), f"README has no example of gptfit {verb}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_documented_command_parses(page: Path) -> None:
    for command in commands(page.read_text(encoding="utf-8")):
        assert strangers(command) == [], f"{page.name}: {command}"


def strangers(command: str) -> list[str]:
    """The words of a command that its verb does not know."""
    words = shlex.split(command, comments=True)[1:]
    for stop in ("|", ">", ">>", "&&", "&"):
        words = words[: words.index(stop)] if stop in words else words
    _, rest = parser_of(words[0]).parse_known_args(words[1:])
    return [word for word in rest if not word.endswith(".py") and word.removeprefix("--").partition("=")[0] not in KEYS]


@pytest.mark.parametrize("verb", available_verbs())
def test_each_verbs_help_has_an_example_and_fits_80_columns(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    examples = import_module(f"gptfit.verbs.{verb}").EXAMPLES
    printed = parser_of(verb).format_help()
    assert [line for line in printed.splitlines() if len(line) > 80] == []
    assert examples
    for example in examples:
        assert f"\n  {example}\n" in printed
        assert example.startswith(f"gptfit {verb}")
        assert strangers(example) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = re.findall(r"[\w-]+\.md", (REPO / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2])
    assert sorted(listed) == sorted(page.name for page in (REPO / "docs").glob("*.md")), "add it to nav in mkdocs.yml"


def test_readme_is_in_the_promised_order() -> None:
    headings = [
        "```console",
        "## Install",
        "make quickstart",
        "## Five commands",
        "## Verbs",
        "## Coming from nanoGPT",
        "## Contributing",
    ]
    places = [README.index(heading) for heading in headings]
    assert places == sorted(places)
