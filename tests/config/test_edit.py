"""Editing a config changes the keys it is told to and nothing else."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from gptfit.config.read import read_config_file
from gptfit.config.write import set_keys

LAB_NOTE = '''# 124M on a 4070, naïve start — see notes
"""why"""
batch_size = 12  # größer passt nicht
gradient_accumulation_steps = (
    5  # cards
    * 8
)  # total
n_layer: int = 12

learning_rate = 6e-4   # peak
'''


def values_of(text: str, folder: Path) -> dict[str, object]:
    file = folder / "c.py"
    file.write_text(text, encoding="utf-8")
    return dict(read_config_file(file).values)


def test_values_change_in_place_and_comments_stay() -> None:
    text = set_keys(LAB_NOTE, {"batch_size": 8, "gradient_accumulation_steps": 60})
    assert text == LAB_NOTE.replace("batch_size = 12", "batch_size = 8").replace("5  # cards\n    * 8", "60")


def test_a_missing_key_is_added_below_a_remark() -> None:
    assert set_keys("n_layer = 6\n", {"compile": False}, "tuned") == "n_layer = 6\n\n# tuned\ncompile = False\n"


def test_the_assignment_that_counts_is_the_last(tmp_path: Path) -> None:
    text = set_keys("batch_size = 4\nbatch_size = 6\n", {"batch_size": 8})
    assert text == "batch_size = 4\nbatch_size = 8\n"


def test_a_line_that_computes_with_the_key_keeps_its_value(tmp_path: Path) -> None:
    text = "batch_size = 12\nmax_iters = 1200 // batch_size\n"
    edited = set_keys(text, {"batch_size": 8}, "tuned")
    assert edited.startswith(text)
    assert values_of(edited, tmp_path) == {"batch_size": 8, "max_iters": 100}


def test_two_keys_that_change_together_may_use_each_other(tmp_path: Path) -> None:
    text = "batch_size = 12\ngradient_accumulation_steps = 480 // batch_size  # same step\n"
    edited = set_keys(text, {"batch_size": 8, "gradient_accumulation_steps": 60})
    assert edited == "batch_size = 8\ngradient_accumulation_steps = 60  # same step\n"


@given(
    st.dictionaries(st.sampled_from(["batch_size", "n_layer", "max_iters", "seed"]), st.integers(1, 9999), min_size=1),
    st.dictionaries(st.sampled_from(["batch_size", "n_layer", "warmup_iters"]), st.integers(1, 9999), min_size=1),
)
def test_reading_back_gives_the_old_values_with_the_new_on_top(old: dict[str, int], new: dict[str, int]) -> None:
    text = "".join(f"{key} = {value}  # ü\n" for key, value in old.items())
    with TemporaryDirectory() as folder:
        assert values_of(set_keys(text, new), Path(folder)) == {**old, **new}
