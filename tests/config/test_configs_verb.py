"""Ready configs are reachable from an installed gptfit, and all agree on what stock nanoGPT does with our keys."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from gptfit.cli import main
from gptfit.config.keys import KEYS, TrainConfig
from gptfit.config.read import load_config
from gptfit.config.write import render
from gptfit.verbs import configs

REPO = Path(__file__).resolve().parents[2]
FILES = sorted((REPO / "configs").glob("*.py"))


def test_every_config_is_listed_with_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs"]) == 0
    said = capsys.readouterr().out
    assert all(re.search(rf"^{path.stem} +\w", said, re.M) for path in FILES)
    assert "tools/" not in said, "which an installed gptfit does not have"


def test_a_config_is_shown_and_copied_and_the_copy_is_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["configs", "modern_40m_4070"]) == 0
    assert capsys.readouterr().out == (REPO / "configs" / "modern_40m_4070.py").read_text()
    copy = tmp_path / "mine.py"
    assert main(["configs", "modern_40m_4070.py", "--out", str(copy)]) == 0
    assert load_config([copy]).config == load_config([REPO / "configs" / "modern_40m_4070.py"]).config
    assert main(["plan", str(copy), "--gpu", "4070"]) == 0
    assert main(["configs", "modern_40m_4070", "--out", str(copy)]) == 1, "an existing file is not replaced"


def test_json_has_names_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in listed] == [path.stem for path in FILES]
    assert all(set(one["keys"]) <= set(KEYS) for one in listed)


def test_an_unknown_name_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs", "modern_cp"]) == 1
    assert "did you mean modern_cpu?" in capsys.readouterr().err


def test_a_wheel_carries_them_where_the_verb_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pyproject.toml lays them out in the installed package."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
    (target,) = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"].values()
    installed = tmp_path / "site-packages" / target
    installed.mkdir(parents=True)
    (installed / "ready.py").write_text("# A ready one\nseed = 1\n")
    monkeypatch.setattr(configs, "__file__", str(tmp_path / "site-packages" / "gptfit" / "verbs" / "configs.py"))
    assert list(configs.ready_configs()) == ["ready"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_ready_config_says_of_our_keys_what_a_written_one_says(path: Path) -> None:
    """nanoGPT runs a config file and looks at its own names afterwards, so it ignores ours."""
    remark = next(line for line in render(TrainConfig(track="wandb")).splitlines() if line.startswith("track"))
    words = remark.partition("  # ")[2]
    assert words == "gptfit only; stock nanoGPT ignores it"
    for line in path.read_text(encoding="utf-8").splitlines():
        key = line.partition(" = ")[0]
        assert (words in line) == (key in KEYS and not KEYS[key].nanogpt), line
