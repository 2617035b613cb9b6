"""Where is what: thirty questions with the file and the function that answer them, and the house rules that a test can see.

A question that fails after a move is answered anew here, in one line; then look whether docs/architecture.md still holds.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest

from .sources import FILES, PACKAGE, nodes, parsed
from .test_layers import NOUNS

REPO = PACKAGE.parent
LONGEST_FUNCTION = 60  # lines
USUAL_FUNCTION = 10  # lines; the median

# question, file, what in it: a function, a class, Class.method or a constant
QUESTIONS = [
    ("Which keys may not change when a run is resumed?", "checkpoint/resume.py", "check_resume"),
    ("How is an out-of-memory error recognised?", "device/out_of_memory.py", "is_out_of_memory"),
    ("Where is overfitting noticed?", "train/overfitting.py", "is_noticed"),
    ("What happens to the micro-batch when memory runs out?", "train/out_of_memory.py", "smaller_micro_batch"),
    (
        "What are the words of the advice after an out-of-memory error?",
        "train/out_of_memory.py",
        "out_of_memory_advice",
    ),
    ("What is the default of a config key?", "config/keys.py", "TrainConfig"),
    ("Why does a config not start?", "config/check.py", "find_conflicts"),
    ("How is a config file read without running it?", "config/read.py", "read_config_file"),
    ("How is a config file written?", "config/write.py", "render"),
    ("Which keys does the modern recipe set?", "config/recipe.py", "modern_keys"),
    ("How many bytes does a training step need?", "plan/memory.py", "predict"),
    ("How many tokens per second will it do?", "plan/speed.py", "predict"),
    ("What loss is to be expected?", "plan/loss.py", "predict"),
    ("Which learning rate is usual for this size?", "plan/usual_values.py", "learning_rate"),
    ("How are shapes searched for the lowest loss?", "plan/propose.py", "propose"),
    ("How many parameters and FLOPs has a model?", "shape.py", "ModelShape"),
    ("What is the learning rate at step 1,000?", "schedule.py", "learning_rate"),
    ("Which documents are validation?", "data/split.py", "SplitRule"),
    ("How does an interrupted prepare know where it was?", "data/journal.py", "Journal"),
    ("How is the GPT-2 vocabulary found without a download?", "data/gpt2_vocabulary.py", "merges"),
    ("In which order are training windows seen?", "train/order.py", "EpochOrder"),
    ("Where is the optimizer made?", "train/optimizers.py", "make_optimizer"),
    ("How is a checkpoint written so that no moment is without a good one?", "checkpoint/store.py", "CheckpointStore"),
    ("How is any trained model opened?", "checkpoint/loaded_model.py", "open_model"),
    ("What is asked of a tuning session, and what comes out?", "tune/session.py", "run_session"),
    ("How does tune choose the next size to try?", "tune/search.py", "next_candidate"),
    ("How is the winner of a tuning session chosen?", "tune/rank.py", "winner"),
    ("How are nanoGPT's printed lines read as a run?", "logs/nanogpt.py", "read_nanogpt"),
    ("What does each difference between two runs affect?", "compare/changes.py", "affects"),
    ("How much may two losses differ by luck?", "compare/noise.py", "noise_between"),
    ("Who is said to be the winner, and when nobody?", "compare/verdict.py", "verdict"),
    ("Where is a page kept from being read by another site (the Host header)?", "pages/live.py", "Guard"),
    ("How is the next token picked: temperature, top-k?", "generate/pick.py", "Picker"),
    ("How is the exact validation loss found?", "generate/exact_loss.py", "split_loss"),
    ("How is an exported model checked?", "export/export.py", "export"),
    ("How is a card found by what a person calls it?", "gpus.py", "find"),
    ("What does `import gptfit` offer?", "__init__.py", "__all__"),
]


def names(file: Path) -> set[str]:
    """What a file defines at its top, and the members of its classes as Class.member."""
    found: set[str] = set()
    for node in parsed(file).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


@pytest.mark.parametrize(("question", "file", "name"), QUESTIONS, ids=[question for question, _, _ in QUESTIONS])
def test_the_question_is_answered_where_the_list_says(question: str, file: str, name: str) -> None:
    assert (PACKAGE / file).is_file(), f"{question} gptfit/{file} is not there"
    assert name in names(PACKAGE / file), f"{question} {name} is not in gptfit/{file}"


def test_there_are_thirty_questions_and_most_packages_are_asked_about() -> None:
    assert len({question for question, _, _ in QUESTIONS}) >= 30
    packages = {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").is_file()}
    asked = {file.partition("/")[0] for _, file, _ in QUESTIONS}
    assert packages - asked <= {"verbs", "doctor", "model"}  # whose file names are the answer


def test_no_function_is_too_long_and_most_are_short() -> None:
    lengths = {}
    for file in FILES:
        for node in nodes(file):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                where = f"{file.relative_to(REPO)}:{node.lineno} {node.name}"
                lengths[where] = (node.end_lineno or node.lineno) - node.lineno + 1
    assert {where: lines for where, lines in lengths.items() if lines > LONGEST_FUNCTION} == {}
    assert median(lengths.values()) <= USUAL_FUNCTION


def test_no_two_modules_share_a_class_name() -> None:
    homes = defaultdict(list)
    for file in FILES:
        for node in parsed(file).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(file.relative_to(REPO)))
    shared = {name: places for name, places in homes.items() if len(places) > 1}
    assert shared == {}


def test_the_architecture_page_draws_every_package() -> None:
    page = (REPO / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawing = page.split("```")[1]
    for folder in PACKAGE.iterdir():
        if (folder / "__init__.py").is_file():
            assert f"{folder.name}/" in drawing, f"docs/architecture.md does not draw {folder.name}/"


def test_the_architecture_page_draws_every_noun() -> None:
    page = (REPO / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = page.split("```")[1].split()
    assert {noun for noun in NOUNS if noun not in drawn} == set()


def test_every_file_the_architecture_page_names_is_there() -> None:
    page = (REPO / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = {word for part in page.split("`")[1::2] for word in part.split() if word.endswith((".py", ".csv"))} - {
        "verbs/NAME.py"
    }
    assert len(named) > 30
    missing = {name for name in named if not any((base / name).is_file() for base in (PACKAGE, REPO))}
    assert missing == set()


def imported_modules(file: Path) -> set[str]:
    """Modules of ours that a file imports anywhere, inside functions and for type checkers too."""
    found = set()
    for node in nodes(file):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_no_modules_need_each_other_even_by_late_imports() -> None:
    names_of = {file: "gptfit." + ".".join(file.relative_to(PACKAGE).with_suffix("").parts) for file in FILES}
    needs = {name: imported_modules(file) & set(names_of.values()) for file, name in names_of.items()}
    done: set[str] = set()
    while free := {name for name in needs.keys() - done if needs[name] - {name} <= done}:
        done |= free
    stuck = {name: sorted(needs[name] - done) for name in needs.keys() - done}
    assert stuck == {}
