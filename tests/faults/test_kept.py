"""Which trials are made, and what the table says of them."""

from __future__ import annotations

from pathlib import Path

from .harness import FAULTS, Call, Tally
from .kept import Kept, present_code

CALL = Call(0, "write", "a")


def wanted(kept: Kept, name: str = "train") -> list[int]:
    is_wanted = kept.is_wanted_of(name)
    return [n for n in range(20) if is_wanted(n, CALL, FAULTS[0])]


def test_another_offset_tries_other_calls_and_all_offsets_try_all() -> None:
    by_offset = [wanted(Kept(None, 7, offset)) for offset in range(7)]
    assert by_offset[3] == [3, 10, 17]
    assert sorted(n for one in by_offset for n in one) == list(range(20))


def test_every_command_is_counted_for_itself() -> None:
    """So that what is tried does not depend on which commands were named before."""
    kept = Kept(None, 7, 3)
    assert wanted(kept, "train") == wanted(kept, "prepare") == [3, 10, 17]


def test_the_table_names_the_commit_and_which_trials_were_made(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "kept.jsonl", 7, 3)
    kept.note_of("train")(3, FAULTS[0], [])
    kept.done("train", Tally("train", [CALL] * 20))
    row = f"| `train` | 20 | 1 | 3 + 7n | 0 | 0 | {present_code()} |"
    assert row in kept.table(["train"])
    assert row in Kept(tmp_path / "kept.jsonl").table(["train"]), "read again from the file"
    assert wanted(Kept(tmp_path / "kept.jsonl", 7, 3)) == [10, 17], "what was made is not made again"
