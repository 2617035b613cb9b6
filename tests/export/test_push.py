"""`gptfit export --push` with the hub's own client library against a small hub of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

from gptfit.cli import main
from tests.export.stand_in_hub import TOKEN, StandInHub, StoredRepo
from tests.generate.test_evaluate import make_byte_run
from tests.models import save_checkpoint, tiny_model

hub_library = pytest.importorskip("huggingface_hub")
pytest.importorskip("transformers")
# The client library's own use of the HTTP library below it.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")
WEIGHTS = "model.safetensors"
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """The library reads its variables once, when imported; it was imported long ago."""
    found = StandInHub()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", found.endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield found
    found.close()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose export is not compared with transformers each time: other tests do that."""
    module = import_module("gptfit.export.hf")
    monkeypatch.setattr(module, "_check_logits", lambda *_: "not looked at")
    monkeypatch.setattr(module, "_check_tokenizer", lambda *_: "not looked at")
    folder = make_byte_run(tmp_path / "out-mine", 60)
    told = {"notify": "https://ntfy.sh/secret-topic", "init_from": "/home/me/other", "wandb_project": "ours"}
    save_checkpoint(tiny_model(vocab_size=257), folder / "ckpt.pt", dataset=str(folder / "data"), **told)
    return folder


def files_beside(run: Path) -> set[str]:
    return {path.name for path in run.iterdir()}


def error_of(capsys: Capture) -> str:
    """The one line, and nothing of the library's."""
    said = capsys.readouterr().err.splitlines()
    assert not any("Traceback" in line for line in said)
    lines = [line for line in said if line.startswith("gptfit: ")]
    assert len(lines) == 1
    return lines[0]


def test_a_run_arrives_private_with_its_card_and_nothing_stays_behind(
    hub: StandInHub, run: Path, capsys: Capture
) -> None:
    before = files_beside(run)
    assert main(["export", str(run), "--push", "me/mine"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0] == f"{hub.endpoint}/me/mine"
    assert f"{len(hub.repos['me/mine'].files) - 1} files on the hub are equal to ours" in said
    assert "it is private" in said
    repo = hub.repos["me/mine"]
    assert repo.is_private
    assert repo.large == {WEIGHTS}
    assert {"config.json", "tokenizer.json", "README.md", WEIGHTS} <= set(repo.files)
    card = repo.files["README.md"].decode()
    assert card.startswith("---\nlibrary_name: transformers")
    assert 'from_pretrained("me/mine")' in card
    assert "init_from = 'other'" in card
    assert not any(word in card for word in (str(run.parent), "secret", "/home/me", "wandb"))
    assert files_beside(run) == before


def test_public_only_where_it_is_said(hub: StandInHub, run: Path, capsys: Capture) -> None:
    assert main(["export", str(run), "--push", "me/mine", "--public", "--out", str(run / "kept")]) == 0
    assert not hub.repos["me/mine"].is_private
    assert "it is public" in capsys.readouterr().out
    assert 'from_pretrained("me/mine")' in (run / "kept" / "README.md").read_text()


def test_an_interrupted_push_goes_on_without_sending_weights_twice(hub: StandInHub, run: Path, capsys: Capture) -> None:
    hub.refuse["POST /api/models/me/mine/commit/"] = 413
    assert main(["export", str(run), "--push", "me/mine"]) == 1
    assert "answered 413" in (said := error_of(capsys))
    assert "run the same command again" in said
    assert WEIGHTS not in hub.repos["me/mine"].files
    hub.refuse.clear()
    assert main(["export", str(run), "--push", "me/mine"]) == 0
    assert WEIGHTS in hub.repos["me/mine"].files
    assert sum(call.startswith("PUT /store/") for call in hub.calls) == 1
    # And once more changes nothing.
    before = dict(hub.repos["me/mine"].files)
    assert main(["export", str(run), "--push", "me/mine"]) == 0
    assert hub.repos["me/mine"].files == before
    assert "it is private" in capsys.readouterr().out


def test_other_files_are_not_overwritten_unasked(hub: StandInHub, run: Path, capsys: Capture) -> None:
    theirs = {"README.md": b"# precious", "notes.txt": b"mine"}
    hub.repos["me/mine"] = StoredRepo(is_private=False, files=dict(theirs))
    assert main(["export", str(run), "--push", "me/mine"]) == 1
    assert "me/mine: exists on the hub and has README.md, notes.txt; choose another name, or --replace" in error_of(
        capsys
    )
    assert hub.repos["me/mine"].files == theirs
    assert main(["export", str(run), "--push", "me/mine", "--replace"]) == 0
    assert hub.repos["me/mine"].files["notes.txt"] == b"mine"
    assert b"gptfit" in hub.repos["me/mine"].files["README.md"]
    assert "the repository was there before and stays public" not in capsys.readouterr().err


def no_token(hub: StandInHub, patch: pytest.MonkeyPatch) -> None:
    patch.delenv("HF_TOKEN")
    patch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nowhere/token")


def wrong_token(hub: StandInHub, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("HF_TOKEN", "hf_wrong")


def no_network(hub: StandInHub, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")


def not_theirs(hub: StandInHub, patch: pytest.MonkeyPatch) -> None:
    hub.refuse["POST /api/repos/create"] = 403


def hidden(hub: StandInHub, patch: pytest.MonkeyPatch) -> None:
    hub.refuse["POST /api/repos/create"] = 409


def read_only(hub: StandInHub, patch: pytest.MonkeyPatch) -> None:
    hub.refuse["POST /api/models/me/mine/preupload"] = 403


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (no_token, "no token for"),
        (wrong_token, "the hub does not accept the token; log in with `hf auth login`"),
        (no_network, "http://127.0.0.1:9 cannot be reached ("),
        (not_theirs, "the token may not write there; use one with write access to me"),
        (read_only, "the token may not write there"),
        (hidden, "exists on the hub and is not yours to see; choose another name"),
    ],
)
def test_what_goes_wrong_is_one_line(
    fault: Callable[[StandInHub, pytest.MonkeyPatch], None],
    said: str,
    hub: StandInHub,
    run: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(hub, monkeypatch)
    before = files_beside(run)
    assert main(["export", str(run), "--push", "me/mine"]) == 1
    assert f"gptfit: me/mine: {said}" in error_of(capsys)
    assert files_beside(run) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--push", "mine"], "name it OWNER/NAME"),
        (["--push", "me/mine/too"], "name it OWNER/NAME"),
        (["--push", "me/mine", "--to", "gguf"], "leave --to out"),
        (["--to", "hf", "--public"], "are for --push"),
        (["--to", "hf", "--dtype", "float16"], "is for --to gguf"),
        ([], "--to hf, --to gguf or --to nanogpt"),
    ],
)
def test_words_that_do_not_go_together(words: list[str], said: str, run: Path, capsys: Capture) -> None:
    assert main(["export", str(run), *words]) == 1
    assert said in error_of(capsys)


def test_a_name_the_hub_does_not_allow(hub: StandInHub, run: Path, capsys: Capture) -> None:
    assert main(["export", str(run), "--push", "me/a--b c"]) == 1
    assert "me/a--b c: " in error_of(capsys)
    assert not hub.repos


@pytest.mark.slow  # a process of its own that imports torch and transformers
def test_the_command_line_finds_the_hub_where_the_environment_says(hub: StandInHub, run: Path) -> None:
    environment = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_HOME": str(run / "home")}
    words = [sys.executable, "-m", "gptfit", "export", str(run), "--push", "me/mine"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "logits of 32 tokens equal ours in transformers" in done.stdout
    assert set(hub.repos) == {"me/mine"}
