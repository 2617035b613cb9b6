"""The index of documents beside the bins: looked for once, never believed when the files are others or it is damaged."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from gptfit.data.document_index import Bounds, index_file, kept_bounds

END = 7


class Finder:
    """Looks for ends of text, and counts how often it had to."""

    def __init__(self, *files: Path) -> None:
        self.files, self.searches = files, 0

    def __call__(self) -> Bounds:
        self.searches += 1
        tokens = np.concatenate([np.fromfile(file, np.uint16) for file in self.files])
        return np.array([0, *(np.flatnonzero(tokens == END) + 1)], dtype=np.int64)

    def bounds(self) -> list[int]:
        return kept_bounds(self.files, END, self).tolist()


def written(path: Path, *tokens: int) -> Path:
    np.array(tokens, dtype=np.uint16).tofile(path)
    return path


def test_documents_are_looked_for_once(tmp_path: Path) -> None:
    find = Finder(written(tmp_path / "train-00000.bin", 1, END, 2), written(tmp_path / "train-00001.bin", 2, END))
    assert [find.bounds() for _ in range(3)] == 3 * [[0, 2, 5]]
    assert find.searches == 1
    assert index_file(find.files[0]) == tmp_path / "train.documents"
    assert (tmp_path / "train.documents").is_file()


def test_other_files_of_the_same_size_have_an_index_of_their_own(tmp_path: Path) -> None:
    find = Finder(written(tmp_path / "train.bin", 1, END, 2, END))
    assert find.bounds() == [0, 2, 4]
    before = (tmp_path / "train.bin").stat().st_mtime_ns
    os.utime(written(tmp_path / "train.bin", 1, 2, 3, END), ns=(before + 1, before + 1))
    assert find.bounds() == [0, 4]


@pytest.mark.parametrize("place", [0, 10, -20, -8, -1])
def test_a_damaged_index_is_made_again(tmp_path: Path, place: int) -> None:
    find = Finder(written(tmp_path / "train.bin", 1, END, 2, END))
    wanted = find.bounds()
    index = tmp_path / "train.documents"
    whole = index.read_bytes()
    for damaged in (b"", b"\n", whole[:place], whole[:place] + bytes([whole[place] ^ 1]) + whole[place:][1:]):
        index.write_bytes(damaged)
        assert find.bounds() == wanted
        assert index.read_bytes() == whole


def test_a_folder_that_cannot_be_written_to_does_without(tmp_path: Path) -> None:
    find = Finder(written(tmp_path / "train.bin", 1, END))
    (tmp_path / "train.documents").mkdir()  # nothing can take this name, whoever asks
    assert find.bounds() == [0, 2]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["train.bin"]
