"""What to type after a config was proposed and written, in order, each as it works."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from gptfit.dataset import data_folder
from gptfit.plan.candidates import Wish
from gptfit.plan.known_data import KNOWN_DATA
from gptfit.plan.propose import Proposal
from gptfit.plan.result import DataFacts
from gptfit.shell import command


def next_commands(choice: Proposal, wish: Wish, written: Path) -> list[str]:
    """A vocabulary where it is to be the data's own, then the tokens where there are none, then the run."""
    data = choice.plan.config.dataset
    column = [] if wish.column == "text" else ["--text-column", wish.column]
    prepare: list[object] = ["gptfit", "prepare", wish.source, *column]
    commands = []
    if wish.source and choice.vocabulary:
        tokenizer, size = f"data/{data}.json", choice.vocabulary
        if find_spec("tokenizers") is None:
            commands.append("pip install 'gptfit[hf]'")
        words = ["gptfit", "tokenizer", "train", wish.source, *column, "--vocab-size", size, "--out", tokenizer]
        commands.append(command(words))
        prepare += ["--tokenizer", tokenizer]
    if wish.source:
        commands.append(command([*prepare, "--out", f"data/{data}"]))
    elif _is_unprepared(wish.data):
        commands.append(f"gptfit prepare SOURCE --out data/{data}  (SOURCE: its Parquet files)")
    return [*commands, command(["gptfit", "train", written])]


def _is_unprepared(data: DataFacts) -> bool:
    return data.name in KNOWN_DATA and not data_folder(data.name).is_dir()
