"""A config file can never run code, hang, or end in anything but one ConfigError line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptfit.config.read import load_config
from gptfit.errors import ConfigError

HOSTILE = {
    "a call": "batch_size = __import__('os').system('touch exploded')",
    "a bare call": "import os\nos.system('touch exploded')",
    "a loop": "for i in range(10):\n    batch_size = i",
    "a function": "def f():\n    pass",
    "an endless power": "batch_size = 9**9**9",
    "a long text": "wandb_run_name = 'a' * 10**10",
    "nested parentheses": "batch_size = " + "(" * 3000 + "1" + ")" * 3000,
    "nested minus signs": "batch_size = " + "-" * 50_000 + "1",
    "a long sum": "batch_size = " + "1+" * 20_000 + "1",
    "a lambda": "batch_size = (lambda: 1)()",
    "a comprehension": "batch_size = [i for i in range(9)][3]",
    "an attribute": "batch_size = batch_size.__class__",
    "an unknown name": "batch_size = rows * 2",
    "division by zero": "batch_size = 1 // 0",
    "a tuple": "batch_size, n_layer = 1, 2",
    "an open quote": "wandb_run_name = 'gpt",
    "a format": "wandb_run_name = '%99999999999d' % 1",
    "a huge number": "max_iters = 10**400",
    "a set key of the wrong type": "batch_size = 'eight'",
    "NUL bytes": "batch_size = 8\x00",
    "an f-string": "wandb_run_name = f'{batch_size}'",
    "an augmented line": "batch_size += 1",
    "a wide shift": "batch_size = 1 << 99999999",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_files_are_one_line_and_run_nothing(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "hostile.py"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config([path])
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "exploded").exists()


def test_bom_windows_line_ends_and_repeated_keys_are_read(tmp_path: Path) -> None:
    path = tmp_path / "windows.py"
    path.write_bytes(b"\xef\xbb\xbfbatch_size = 4\r\nn_layer = 2\r\nbatch_size = 8\r\n")
    loaded = load_config([path])
    assert (loaded.config.batch_size, loaded.config.n_layer) == (8, 2)
    assert "set again" in loaded.notes[0]


def test_folder_missing_file_huge_file_and_binary_file(tmp_path: Path) -> None:
    big = tmp_path / "big.py"
    with open(big, "wb") as file:
        file.truncate(100_000_000)
    (tmp_path / "train_gpt2.py").write_text("")
    (tmp_path / "binary.py").write_bytes(bytes(range(256)))
    for path, words in (
        (tmp_path, "is a folder"),
        (tmp_path / "train_gtp2.py", "did you mean"),
        (big, "too large"),
        (tmp_path / "binary.py", "not UTF-8"),
        (Path("a\0b.py"), "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_config([path])


@given(text=st.text())
def test_any_text_reads_or_is_a_config_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / f"any-{os.getpid()}.py"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        load_config([path])
    except ConfigError as error:
        assert "\n" not in str(error)


@given(key=st.text(max_size=30), value=st.text(max_size=60))
def test_any_override_reads_or_is_an_expected_error(key: str, value: str) -> None:
    try:
        load_config([], [f"--{key}={value}"])
    except ConfigError:
        pass


KEYS = ("batch_size", "learning_rate", "compile", "dtype", "n_head", "chunked_loss", "max_iters")


@given(
    key=st.sampled_from(KEYS),
    value=st.one_of(st.integers(), st.floats(), st.booleans(), st.text(max_size=9), st.none()),
)
def test_any_value_for_a_real_key_reads_or_is_a_config_error(key: str, value: object) -> None:
    try:
        load_config([], [f"--{key}={value!r}"])
    except ConfigError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(("words", "code"), [
    (["gpus", "nope"], 1), (["gpus", "--nope"], 1), (["fly"], 1), (["--help"], 0), (["--version"], 0), ([], 0),
])  # fmt: skip
def test_exit_codes_and_no_traceback(words: list[str], code: int) -> None:
    done = subprocess.run([sys.executable, "-m", "gptfit", *words], capture_output=True, text=True)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == (1 if code else 0)
