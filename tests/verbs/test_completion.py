"""The Tab key: what it offers, in a real bash, and without loading what takes seconds."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gptfit.cli import available_verbs, main
from gptfit.config.keys import KEYS
from gptfit.gpus import all_gpus, find
from gptfit.verbs.completion import SCRIPTS, candidates

# A bash in which Tab was pressed: the words so far in, what it would offer out.
PRESS_TAB = """
gptfit() { "$PYTHON" -m gptfit "$@"; }
source "$SCRIPT"
COMP_WORDS=(gptfit "$@")
COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
_gptfit
printf '%s\\n' "${COMPREPLY[@]}"
complete -p gptfit
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shell") / "gptfit.bash"
    path.write_text(SCRIPTS["bash"])
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["pro"], ["propose"]),
        (["plan", "--gpu", "=", "4070-ti"], ["4070-ti-12gb", "4070-ti-super-16gb"]),
        (["train", "x.py", "--chunked"], ["--chunked_loss="]),
        (["train", "x.p"], []),
    ],
)
def test_bash_finishes_words(script: Path, words: list[str], offered: list[str]) -> None:
    done = subprocess.run(
        ["bash", "-c", PRESS_TAB, "bash", *words],
        env={"PYTHON": sys.executable, "SCRIPT": str(script), "PATH": "/usr/bin:/bin"},
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    *found, registered = done.stdout.splitlines()
    assert [word for word in found if word] == offered
    assert registered == "complete -o default -F _gptfit gptfit", "files where nothing is offered"


# The same in the others, as far as that goes without a keyboard: what zsh's function offers, what fish says it would.
OTHER_SHELLS = {
    "zsh": """
gptfit() { "$PYTHON" -m gptfit "$@"; }
compdef() { : }
compadd() { [[ $1 == -S ]] && shift 2; print -rl -- "${(@P)2}" }
_files() { : }
eval "$SCRIPT"
words=(gptfit "$@"); CURRENT=$#words
_gptfit
""",
    "fish": """
function gptfit; $PYTHON -m gptfit $argv; end
echo $SCRIPT | source
complete -C "gptfit $argv"
""",
}


@pytest.mark.parametrize("shell", OTHER_SHELLS)
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["pro"], ["propose"]),
        (["plan", "--gpu=4070-ti"], ["--gpu=4070-ti-12gb", "--gpu=4070-ti-super-16gb"]),
        (["train", "x.py", "--chunked"], ["--chunked_loss="]),
    ],
)
def test_zsh_and_fish_finish_words(shell: str, words: list[str], offered: list[str], tmp_path: Path) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"no {shell} here")
    done = subprocess.run(
        [
            path,
            "-f" if shell == "zsh" else "-N",
            "-c",
            OTHER_SHELLS[shell],
            *(["zsh"] if shell == "zsh" else []),
            *words,
        ],
        env={"PYTHON": sys.executable, "SCRIPT": SCRIPTS[shell], "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == offered, done.stderr


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_is_printed_and_its_shell_can_read_it(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert printed == SCRIPTS[shell]
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=printed, text=True, check=True)


def test_every_verb_option_and_key_is_offered() -> None:
    assert candidates([""]) == available_verbs()
    assert candidates(["help", "qui"]) == ["quickstart"]
    offered = candidates(["train", "--"])
    assert {f"--{key}=" for key in KEYS} <= set(offered)
    assert {"--recipe", "--gpus"} <= set(offered)
    assert candidates(["runs", "--n"]) == [], "keys belong to verbs that take a config"


def test_values_are_offered_where_they_are_a_choice() -> None:
    assert candidates(["train", "--compile="]) == ["--compile=True", "--compile=False"], "zsh and fish keep the word"
    assert candidates(["train", "--arch", "=", "m"]) == ["modern"], "bash splits it"
    assert candidates(["train", "--arch", "="]) == ["gpt2", "modern"]
    assert candidates(["export", "out", "--to", "g"]) == ["gguf"]
    assert candidates(["tokenizer", ""]) == ["train"]
    assert candidates(["tokenizer", "train", ""]) == [], "then comes a file"
    assert candidates(["keys", "chunk"]) == ["chunked_loss"]
    assert "modern_cpu" in candidates(["configs", ""])
    assert candidates(["plna", ""]) == []


def test_each_card_offered_is_that_card() -> None:
    offered = candidates(["gpus", ""])
    assert {find(name).name for name in offered} == {gpu.name for gpu in all_gpus()}
    assert "4070-12gb" in offered
    assert not [name for name in offered if set(name) & set(" ()/")], "words that a shell need not quote"


def test_a_shell_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion"]) == 1
    assert "bash|zsh|fish" in capsys.readouterr().err


def test_tab_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom gptfit.cli import available_verbs\nfrom gptfit.verbs.completion import candidates\n"
        "for verb in available_verbs(): candidates([verb, '--'])\n"
        "candidates(['plan', '--gpu', ''])\n"
        "print(*{'torch', 'numpy', 'pyarrow', 'rich', 'plotly', 'starlette', 'ray'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
