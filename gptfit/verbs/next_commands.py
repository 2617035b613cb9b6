"""What to type after a config was proposed and written, in order, each as it works."""

from __future__ import annotations

from pathlib import Path

from gptfit.dataset import data_folder
from gptfit.plan.candidates import Wish
from gptfit.plan.known_data import KNOWN_DATA
from gptfit.plan.propose import Proposal
from gptfit.plan.result import DataFacts


def next_commands(choice: Proposal, wish: Wish, written: Path) -> list[str]:
    """A vocabulary where it is to be the data's own, then the tokens where there are none, then the run."""
    data = choice.plan.config.dataset
    prepare = ["gptfit", "prepare", wish.source]
    commands = []
    if wish.source and choice.vocabulary:
        tokenizer = f"data/{data}.json"
        commands.append(f"gptfit tokenizer train {wish.source} --vocab-size {choice.vocabulary} --out {tokenizer}")
        prepare += ["--tokenizer", tokenizer]
    if wish.source:
        commands.append(" ".join([*prepare, "--out", f"data/{data}"]))
    elif _is_unprepared(wish.data):
        commands.append(f"gptfit prepare SOURCE --out data/{data}  (SOURCE: its Parquet files)")
    return [*commands, f"gptfit train {written}"]


def _is_unprepared(data: DataFacts) -> bool:
    return data.name in KNOWN_DATA and not data_folder(data.name).is_dir()
