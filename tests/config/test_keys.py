"""A key is declared once: everything that treats keys differently derives it, and the docs cannot lag behind."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from gptfit.cli import main
from gptfit.config.key_words import markdown
from gptfit.config.keys import DEFAULTS, GROUPS, KEYS, MODEL_KEYS, TUNABLE, TrainConfig, find_warnings
from gptfit.plan.resolve import PLANNED_KEYS
from gptfit.shape import ModelShape
from gptfit.tune.trials import Variant
from tests.sources import FILES, name_of, nodes

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "gptfit"


def test_a_new_key_is_one_line(tmp_path: Path) -> None:
    """In a copy of the package with one line more, every part knows the key."""
    for file in PACKAGE.rglob("*"):
        if file.suffix in (".py", ".csv"):
            copy = tmp_path / "gptfit" / file.relative_to(PACKAGE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    keys = tmp_path / "gptfit" / "config" / "keys.py"
    text = keys.read_text(encoding="utf-8")
    line = '    shine: int = _optimizer(3, "how brightly it learns", within=COUNT, on_resume="frozen")\n'
    keys.write_text(text.replace("    momentum: float", f"{line}    momentum: float", 1), encoding="utf-8")
    done = subprocess.run([sys.executable, "-c", USES_THE_NEW_KEY], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    help_text, message, refusal = done.stdout.split("-----\n")
    assert "shine=3 *" in help_text
    assert "how brightly it learns" in help_text
    assert "shine = 0 is out of range; use a whole number from 1" in message
    assert "shine is 5 but the checkpoint" in refusal


USES_THE_NEW_KEY = """
from gptfit.cli import main
from gptfit.checkpoint.format import Checkpoint
from gptfit.checkpoint.resume import check_resume
from gptfit.compare.changes import affects
from gptfit.config.keys import GPTFIT_KEYS, TrainConfig
from gptfit.config.key_words import markdown
from gptfit.config.read import load_config
from gptfit.config.write import render
from gptfit.errors import ConfigError

try:
    main(["train", "--help"])
except SystemExit:
    pass
print("-----")
config = load_config([], ["--shine=5"]).config
assert "shine = 5  # gptfit only" in render(config)
assert affects("shine") == "loss"
assert "shine" in GPTFIT_KEYS
assert "| `shine` * | `3` | how brightly it learns |" in markdown()
try:
    load_config([], ["--shine=0"])
except ConfigError as error:
    print(error)
print("-----")
old = Checkpoint({}, None, {}, 1, 1.0, {"shine": 3})
try:
    check_resume(old, config, config.shape())
except ConfigError as error:
    print(error)
"""

# Lists of key names that are about something else than what a key is.
ALLOWED = {
    "config/recipe.py",  # what the recipe sets
    "plan/proposed_config.py",  # what a proposal sets
    "logs/infer_header.py",  # what the name of a log file can tell
    "train/setup.py",  # nanoGPT's model_args, as they stand in ckpt.pt
    "checkpoint/format.py",  # the same
    "checkpoint/hf_folder.py",  # the same, from a Hugging Face config.json
}


def lists_of_keys(source: str) -> list[int]:
    """Lines of literals that name six or more keys and nothing else."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            names = [part.value for part in node.elts if isinstance(part, ast.Constant)]
        elif isinstance(node, ast.Dict):
            names = [part.value for part in node.keys if isinstance(part, ast.Constant)]
        else:
            continue
        if len(names) >= 6 and all(name in KEYS for name in names):
            found.append(node.lineno)
    return found


def test_no_file_keeps_a_list_of_keys_of_its_own() -> None:
    for file in PACKAGE.rglob("*.py"):
        name = file.relative_to(PACKAGE).as_posix()
        if name not in ALLOWED:
            assert not lists_of_keys(file.read_text(encoding="utf-8")), f"{name} lists keys; derive them from KEYS"
    assert lists_of_keys('X = ("seed", "dtype", "bias", "n_layer", "n_head", "n_embd")') == [1]


def test_docs_keys_is_current() -> None:
    page = (REPO / "docs" / "keys.md").read_text(encoding="utf-8")
    assert page == markdown(), "write it again: gptfit keys --markdown > docs/keys.md"


def test_every_key_says_what_it_means_in_one_phrase() -> None:
    for key in KEYS.values():
        assert len(key.meaning) > 8, key.name
        assert not key.meaning.endswith("."), key.name
        assert key.default is None or key.problem(DEFAULTS) is None


def test_the_model_is_described_by_keys_of_the_same_names_and_defaults() -> None:
    for field in fields(ModelShape):
        assert field.name in KEYS
        assert KEYS[field.name].on_resume == "frozen"
    assert TrainConfig(n_layer=3, arch="modern", smear=False).shape(77) == ModelShape(
        3, 12, 768, 1024, 77, arch="modern", smear=False
    )


def test_tune_varies_what_the_keys_say_it_may() -> None:
    assert set(Variant.of(0, DEFAULTS).as_dict()) == {"threads", *TUNABLE}


def test_nanogpt_has_the_keys_it_has() -> None:
    """The keys of nanoGPT's train.py, letter for letter."""
    theirs = (
        "out_dir eval_interval log_interval eval_iters eval_only always_save_checkpoint init_from wandb_log wandb_project "
        "wandb_run_name dataset gradient_accumulation_steps batch_size block_size n_layer n_head n_embd dropout bias "
        "learning_rate max_iters weight_decay beta1 beta2 grad_clip decay_lr warmup_iters lr_decay_iters min_lr backend "
        "device dtype compile"
    )
    assert {name for name, key in KEYS.items() if key.nanogpt} == set(theirs.split())


@pytest.mark.parametrize("word", ["chunked_loss", "--chunked_loss", "chunked_loss=True"])
def test_the_verb_describes_one_key(word: str, capsys: Any) -> None:
    assert main(["keys", "--", word]) == 0
    said = capsys.readouterr().out
    assert said.startswith("chunked_loss = 'auto'\n")
    assert "takes: 'auto', True, False" in said
    assert "affects: speed, memory" in said
    assert "stock nanoGPT ignores it" in said


def test_the_verb_lists_every_key_in_80_columns(capsys: Any) -> None:
    assert main(["keys"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name}=" in said for name in KEYS)
    assert all(group in said for group in GROUPS)
    assert max(len(line) for line in said.splitlines()) <= 80


def test_the_verb_suggests_the_key_that_was_meant(capsys: Any) -> None:
    assert main(["keys", "batchsize"]) == 1
    assert "did you mean batch_size?" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["train", "plan", "tune"])
def test_help_says_what_every_key_means(verb: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    said = capsys.readouterr().out
    assert all(f"  {name}=" in said for name in KEYS)
    assert "micro-batch: windows computed at once" in said


def test_every_key_is_read_by_something_or_said_to_be_ignored() -> None:
    """Outside config/: as an attribute of a config, as part of the model, or as part of a setting."""
    read = set(MODEL_KEYS) | set(PLANNED_KEYS)
    for file in PACKAGE.rglob("*.py"):
        if file.parent.name != "config":
            tree = ast.parse(file.read_text(encoding="utf-8"))
            read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {name for name, key in KEYS.items() if name not in read} == {
        name for name, key in KEYS.items() if key.ignored
    }


def keys_read_somewhere() -> set[str]:
    """Keys that code asks a config for, by name; those of the model become a ModelShape together."""
    found = set(MODEL_KEYS)
    for file in FILES:
        for node in nodes(file):
            if isinstance(node, ast.Attribute) and node.attr in KEYS:
                owner = ast.unparse(node.value)
                is_own = name_of(file) == "config/keys.py" and owner == "self"
                if owner.endswith("config") or is_own:
                    found.add(node.attr)
    return found


def test_every_key_is_read_or_reported_as_not_used() -> None:
    unread = set(KEYS) - keys_read_somewhere()
    assert unread == {"always_save_checkpoint"}
    for name in unread:
        said = find_warnings(DEFAULTS | {name: not DEFAULTS[name]})
        assert [(problem.where, "is not used" in problem.message) for problem in said] == [(name, True)]
        assert KEYS[name].meaning.startswith("not used")
