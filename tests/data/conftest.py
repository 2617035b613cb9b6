"""Small Parquet files with known text, and a report that keeps what it is told."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gptfit.data.options import Forecast, PrepareProgress
from gptfit.dataset import read_dataset


class Kept:
    """A report for tests."""

    def __init__(self) -> None:
        self.forecasts: list[Forecast] = []
        self.steps: list[PrepareProgress] = []
        self.notes: list[str] = []

    def forecast(self, forecast: Forecast) -> None:
        self.forecasts.append(forecast)

    def progress(self, progress: PrepareProgress) -> None:
        self.steps.append(progress)

    def note(self, line: str) -> None:
        self.notes.append(line)


@pytest.fixture
def kept() -> Kept:
    return Kept()


def stories(n: int, seed: int = 0, words: int = 60) -> list[str]:
    """Texts of different lengths, no two alike."""
    rng = random.Random(seed)
    vocabulary = ["the", "cat", "sat", "on", "a", "naïve", "mat;", "don't", "42", "times\n\n漢字", "said", "she's"]
    return [f"{seed}/{i} " + " ".join(rng.choices(vocabulary, k=rng.randint(1, 2 * words))) for i in range(n)]


WriteParquet = Callable[..., Path]


@pytest.fixture
def parquet(tmp_path: Path) -> WriteParquet:
    def write(
        name: str, texts: Sequence[object], rows: int = 50, column: str = "text", kind: pa.DataType | None = None
    ) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({column: pa.array(texts, kind), "n": range(len(texts))}), path, row_group_size=rows)
        return path

    return write


def digest(folder: Path) -> dict[str, str]:
    """sha256 of each split's tokens, however many files it has."""
    info = read_dataset(folder)
    found = {}
    for name, split in (("train", info.train), ("val", info.val)):
        if split:
            found[name] = hashlib.sha256(b"".join(file.read_bytes() for file in split.files)).hexdigest()
    return found


def ids(path: Path, dtype: str = "uint16") -> list[int]:
    found: list[int] = np.fromfile(path, dtype).tolist()
    return found
