"""The folders of tensors beside a checkpoint: held against their index, and removed only where certainly nobody's."""

from __future__ import annotations

import pickle
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gptfit.checkpoint.divided import remove_unnamed, write_parts
from gptfit.checkpoint.format import LAST, load_checkpoint, load_weights
from gptfit.checkpoint.part_index import INDEX
from gptfit.config.keys import TrainConfig
from gptfit.errors import GptfitError
from gptfit.model.build import build_model
from tests.small_runs import SMALL
from tests.test_mutated_files import bounded_memory, no_hang

NAME = "parts-00000002-1"
WEIGHT = "model.transformer.wte.weight"  # 65 rows of 32


def read(folder: Path) -> None:
    """As `sample` does."""
    checkpoint = load_checkpoint(folder, lazy=True).to_use()
    with torch.device("meta"):
        model = build_model(checkpoint.shape)
    load_weights(model.to_empty(device="cpu"), checkpoint)


def save(folder: Path, content: dict[str, Any], sums: dict[str, list[int]]) -> None:
    parts = {"folder": NAME, "files": sums, "tied": {"lm_head.weight": "transformer.wte.weight"}}
    torch.save({**content, "gptfit": {"arch": "gpt2", "parts": parts, "averaged": 1}}, folder / LAST)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in parts as one process writes it, with an average."""
    folder = tmp_path_factory.mktemp("whole")
    config = TrainConfig(**{**SMALL, "vocab_size": 65})
    weights = dict(build_model(config.shape()).named_parameters())
    tensors = {f"{kind}.{name}": p.detach() for kind in ("model", "average") for name, p in weights.items()}
    keys = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size")
    content = {
        "model": {},
        "optimizer": {"state": {}, "param_groups": []},
        "model_args": {key: getattr(config, key) for key in keys},
        "iter_num": 2,
        "best_val_loss": 1.0,
        "config": {},
    }
    save(folder, content, write_parts(folder / NAME, tensors, 0))
    torch.save(content, folder / "content.pt")
    read(folder)
    return folder


@pytest.fixture
def tamper(whole: Path, tmp_path: Path) -> Callable[[Callable[[Any], object]], Path]:
    """A copy whose index was changed, with sums to match."""

    def made(change: Callable[[Any], object]) -> Path:
        copy = tmp_path / "copy"
        shutil.copytree(whole, copy)
        index = copy / NAME / INDEX
        known = pickle.loads(index.read_bytes())
        change(known)
        index.write_bytes(pickle.dumps(known))
        contents = {file.name: file.read_bytes() for file in (copy / NAME).iterdir()}
        sums = {name: [len(content), zlib.crc32(content)] for name, content in contents.items()}
        save(copy, torch.load(copy / "content.pt", weights_only=True), sums)
        return copy

    return made


def place_of(index: Any, name: str = WEIGHT) -> Any:
    return next(place for known, place in index.storage_data.items() if known.fqn == name)


def set_size(*size: int) -> Callable[[Any], None]:
    def change(index: Any) -> None:
        known = index.state_dict_metadata[WEIGHT]
        known.size = torch.Size(size)
        known.chunks = [replace(known.chunks[0], sizes=torch.Size(size))]

    return change


def set_chunks(*rows: tuple[int, int]) -> Callable[[Any], None]:
    """Chunks that begin at a row and have so many, all stored where the whole is."""

    def change(index: Any) -> None:
        known, place = index.state_dict_metadata[WEIGHT], place_of(index)
        chunk, at = known.chunks[0], next(at for at in index.storage_data if at.fqn == WEIGHT)
        known.chunks = [replace(chunk, offsets=torch.Size((a, 0)), sizes=torch.Size((n, 32))) for a, n in rows]
        index.storage_data.update({replace(at, offset=torch.Size((a, 0))): place for a, _ in rows})

    return change


def set_place(**changes: Any) -> Callable[[Any], None]:
    def change(index: Any) -> None:
        for name, value in changes.items():
            setattr(place_of(index), name, value)

    return change


def set_tensor(**changes: Any) -> Callable[[Any], None]:
    def change(index: Any) -> None:
        for name, value in changes.items():
            setattr(index.state_dict_metadata[WEIGHT], name, value)

    return change


WRONG: dict[str, Callable[[Any], object]] = {
    "12 TB": set_size(10**9, 3000),
    "two billion rows": set_size(2 * 10**9, 32),
    "fewer rows": set_size(64, 32),
    "no dimension": set_size(),
    "no chunks": set_tensor(chunks=[]),
    "no list of chunks": set_tensor(chunks=None),
    "a size in words": set_tensor(size="many"),
    "a first row that is missing": set_chunks((1, 64)),
    "last rows that are missing": set_chunks((0, 30), (30, 30)),
    "a gap": set_chunks((0, 30), (31, 34)),
    "rows twice": set_chunks((0, 65), (0, 65)),
    "a file that is not there": set_place(relative_path="__7_0.distcp"),
    "a file elsewhere": set_place(relative_path="../ckpt.pt"),
    "an offset beyond the file": set_place(offset=10**15),
    "an offset before it": set_place(offset=-5),
    "another offset": set_place(offset=7),
    "a length beyond the file": set_place(length=2 * 10**9),
    "a length of nothing": set_place(length=0),
    "a coded piece": set_place(transform_descriptors=["zlib"]),
    "no place": lambda index: index.storage_data.clear(),
    "no tensors": lambda index: index.state_dict_metadata.clear(),
    "no dictionary": lambda index: setattr(index, "state_dict_metadata", None),
    "a weight less": lambda index: index.state_dict_metadata.pop(WEIGHT),
    "an average less": lambda index: index.state_dict_metadata.pop("average.transformer.wte.weight"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_index_that_does_not_fit_its_files_is_refused(
    tamper: Callable[[Callable[[Any], object]], Path], name: str
) -> None:
    """A checksum finds accidents; somebody may have sent the folder."""
    folder = tamper(WRONG[name])
    with no_hang(), bounded_memory(), pytest.raises(GptfitError) as caught:
        read(folder)
    assert len(str(caught.value).splitlines()) == 1
    assert "allocate" not in str(caught.value)


def test_a_tensor_in_several_chunks_of_rows_is_whole(tamper: Callable[[Callable[[Any], object]], Path]) -> None:
    """As several processes write it, the last of them with nothing; here each chunk finds more rows than it says."""
    folder = tamper(set_chunks((0, 33), (33, 32), (65, 0)))
    assert "transformer.wte.weight" in load_checkpoint(folder).model


def test_a_piece_that_went_away_while_the_model_is_read_is_one_line(whole: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    checkpoint = load_checkpoint(copy)
    for piece in (copy / NAME).glob("__*"):
        piece.unlink()
    with pytest.raises(GptfitError, match="cannot be read") as caught:
        dict(checkpoint.model)
    assert len(str(caught.value).splitlines()) == 1


def test_a_model_larger_than_its_folder_is_refused_before_it_is_built(whole: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    content = torch.load(copy / LAST, weights_only=True)
    content["model_args"]["n_embd"] = 10**6
    torch.save(content, copy / LAST)
    with no_hang(), bounded_memory(), pytest.raises(GptfitError, match="more than the file"):
        read(copy)


def test_only_folders_that_no_checkpoint_names_are_removed(tmp_path: Path) -> None:
    for name in ("parts-00000002-1", "parts-00000004-1", "parts-mine", "parts-4"):
        (tmp_path / name).mkdir()
    torch.save({"gptfit": {"parts": {"folder": "parts-00000004-1"}}}, tmp_path / "ckpt.pt")
    torch.save({"model": {}}, tmp_path / "nanogpt.pt")
    remove_unnamed(tmp_path)
    assert {path.name for path in tmp_path.glob("parts-*")} == {"parts-00000004-1", "parts-mine", "parts-4"}


def test_while_a_checkpoint_cannot_be_read_its_tensors_stay(tmp_path: Path) -> None:
    """A disk that refuses one reading must not cost the whole checkpoint."""
    (tmp_path / "parts-00000002-1").mkdir()
    (tmp_path / "ckpt.pt").write_bytes(b"cannot be read now")
    remove_unnamed(tmp_path)
    assert (tmp_path / "parts-00000002-1").is_dir()
