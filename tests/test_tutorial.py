"""docs/tutorial.md: each of its commands is run on a small stand-in, and prints what the page says it prints."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parent.parent
VERBS = [
    "inspect",
    "plan",
    "propose",
    "prepare",
    "tune",
    "train",
    "watch",
    "runs",
    "compare",
    "sample",
    "eval",
    "export",
]
DOCUMENTS = 24
# The page's small.py, smaller still: what is checked is that everything runs, not what it learns.
TINY = """
device = 'cpu'
compile = False
n_layer = 1
n_head = 1
n_embd = 16
block_size = 16
batch_size = 4
max_iters = 6
lr_decay_iters = 6
eval_interval = 3
eval_iters = 8
log_interval = 3
learning_rate = 0.002  # so little text wants a low one
early_stop_evals = 0
out_dir = 'out-library'
"""


@pytest.fixture(scope="module")
def tool() -> Iterator[Any]:
    sys.path.insert(0, str(REPO / "tools"))
    yield import_module("tutorial")
    sys.path.remove(str(REPO / "tools"))


def page_of(tool: Any) -> str:
    return str(tool.PAGE.read_text(encoding="utf-8"))


def test_the_page_shows_the_whole_journey(tool: Any) -> None:
    typed = re.findall(r"^(?:\$ )?gptfit (\w+)", page_of(tool), flags=re.M)
    assert [verb for verb in VERBS if verb not in typed] == []
    blocks = tool.blocks(page_of(tool))
    assert sum(block.command.startswith("gptfit plan") for block in blocks) == 6, "the tries of a real history"
    assert all(block.output for block in blocks), "python tools/tutorial.py fills them"


def test_plans_for_a_card_are_what_the_page_says_to_the_letter(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPTFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "0")  # the tool sets it; this puts it back
    tool.write_files(page_of(tool), tmp_path, {})
    exact = [block for block in tool.blocks(page_of(tool)) if not block.kind]
    assert len(exact) == 7, "six plans and the proposal for a known data set"
    wrong = {block.command: found for block in exact if (found := block.differences(tool.run(block.command, tmp_path)))}
    assert wrong == {}, "if that is meant: python tools/tutorial.py --plans"


@pytest.mark.slow
def test_every_command_prints_what_the_page_says(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole journey on a small stand-in: what may differ are figures, and words where a model writes them."""
    monkeypatch.setenv("GPTFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "0")
    page = page_of(tool).replace("--minutes 1 ", "--minutes 0.02 ")
    (tmp_path / "story").mkdir()
    missing = {
        block.command: found
        for block, printed in tool.journey(page, tmp_path / "story", {"small.py": TINY}, DOCUMENTS)
        if (found := block.differences(printed))
    }
    assert missing == {}, "if that is meant: python tools/tutorial.py"


def test_a_page_that_says_something_else_is_noticed(tool: Any) -> None:
    exact = tool.Block("gptfit plan", "fits yes\n", "")
    assert exact.differences("fits yes\n") == []
    assert exact.differences("fits no\n")
    figures = tool.Block("gptfit train", "iter 3: loss 2\ndone: step 6\n", "numbers differ")
    assert figures.differences("iter 30: loss 4\ndone: step 60\nmore\n") == []
    assert figures.differences("iter 30: loss 4\n") == ["done: step 6"]
    broken = tool.Block(
        "gptfit propose", " why  8 epochs of it; a larger\n      model would not help\n", "numbers differ"
    )
    assert broken.differences(" why  8 epochs of it; a larger model would not help\n") == []
