"""Documents in another order every epoch: each exactly once, the same again after a resume, and what is refused."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gptfit.checkpoint.format import load_checkpoint
from gptfit.config.keys import TrainConfig
from gptfit.dataset import Split
from gptfit.errors import ConfigError, DataError
from gptfit.logs.events import Event, Step
from gptfit.train.documents import ShuffledDocuments
from gptfit.train.order import EpochOrder
from gptfit.train.train import train
from tests.generate.test_evaluate import make_byte_run

END = 999


def make_file(folder: Path, documents: int = 40) -> tuple[ShuffledDocuments, list[tuple[int, ...]]]:
    """Documents of different lengths, each of one number and an end, in two files."""
    texts = [(*([number] * (1 + number % 7)), END) for number in range(documents)]
    tokens = np.array([token for text in texts for token in text], dtype=np.uint16)
    files = (folder / "a.bin", folder / "b.bin")
    for file, part in zip(files, np.split(tokens, [55]), strict=True):
        part.tofile(file)
    split = Split(len(tokens), files)
    return ShuffledDocuments(split, "uint16", 1000, END, seed=3), texts


def documents_of(file: ShuffledDocuments, epoch: int) -> list[tuple[int, ...]]:
    stream = file.windows(np.array([epoch * file.n_tokens]), file.n_tokens)[0].tolist()
    ends = [i + 1 for i, token in enumerate(stream) if token == END]
    return [tuple(stream[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


def test_every_epoch_has_every_document_whole_and_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    file, texts = make_file(tmp_path)
    assert file.n_documents == len(texts)
    orders = [documents_of(file, epoch) for epoch in range(4)]
    assert orders[0] == texts  # the first as the file has it
    for order in orders:
        assert sorted(order) == sorted(texts)
    assert len({tuple(order) for order in orders}) == 4
    assert documents_of(file, 1) == orders[1]  # forgotten meanwhile, made again


def test_windows_of_an_epoch_are_cut_out_of_its_own_order(tmp_path: Path) -> None:
    file, _ = make_file(tmp_path)
    order = EpochOrder(file.n_tokens, 8, seed=3, is_reshuffled=True)
    second = file.windows(np.array([file.n_tokens]), file.n_tokens)[0]
    starts = order.starts(order.windows, order.windows)
    assert all(file.n_tokens <= start <= 2 * file.n_tokens - 9 for start in starts)
    for start, window in zip(starts, file.windows(starts, 9), strict=True):
        place = int(start) - file.n_tokens
        assert window.tolist() == second[place : place + 9].tolist()


def test_a_token_beyond_the_vocabulary_is_named_where_the_file_has_it(tmp_path: Path) -> None:
    file, _ = make_file(tmp_path)
    file.vocab_size = END
    with pytest.raises(DataError, match=r"\w\.bin: token id 999 at position \d+ is beyond") as caught:
        file.windows(np.array([file.n_tokens]), file.n_tokens)
    named, position = str(caught.value).split(":")[0], str(caught.value).split("position ")[1].split()[0]
    assert np.fromfile(named, dtype=np.uint16)[int(position)] == END


def test_a_file_without_ends_is_refused(tmp_path: Path) -> None:
    np.zeros(50, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(DataError, match="no end of text"):
        ShuffledDocuments(Split(50, (tmp_path / "a.bin",)), "uint16", 1000, END, seed=3)


@pytest.mark.parametrize("files", [(), ("a.bin",)])
def test_an_empty_split_can_be_opened_for_its_emptiness_to_be_said(tmp_path: Path, files: tuple[str, ...]) -> None:
    (tmp_path / "a.bin").touch()
    file = ShuffledDocuments(Split(0, tuple(tmp_path / name for name in files)), "uint16", 1000, END, seed=3)
    assert (file.n_tokens, file.n_documents) == (0, 0)
    assert not (tmp_path / "a.documents").exists()


def test_a_single_document_stays_in_order(tmp_path: Path) -> None:
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "a.bin")
    file = ShuffledDocuments(Split(50, (tmp_path / "a.bin",), documents=1), "uint16", 1000, END, seed=3)
    assert file.windows(np.array([50]), 50)[0].tolist() == list(range(50))


def test_a_run_over_several_epochs_resumes_exactly_and_another_order_is_another_run(
    small_config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    data = str(make_byte_run(tmp_path / "bytes", 60) / "data")  # 200 tokens: 12 windows an epoch
    common: dict[str, Any] = {"dataset": data, "shuffle_documents": True, "dropout": 0.1, "arch": "modern"}

    def interrupt(event: Event) -> None:
        if isinstance(event, Step) and event.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    def weights(name: str) -> dict[str, torch.Tensor]:
        return load_checkpoint(tmp_path / name).model

    train(small_config(out_dir=str(tmp_path / "whole"), **common))
    assert train(small_config(out_dir=str(tmp_path / "parts"), **common), interrupt).reason == "SIGINT"
    train(small_config(out_dir=str(tmp_path / "parts"), init_from="resume", **common))
    train(small_config(out_dir=str(tmp_path / "plain"), **common | {"shuffle_documents": False}))
    whole, parts, plain = weights("whole"), weights("parts"), weights("plain")
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())
    assert not all(torch.equal(tensor, plain[name]) for name, tensor in whole.items())


def test_data_that_does_not_say_its_end_of_text_is_refused(
    small_config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    data = make_byte_run(tmp_path / "bytes", 60) / "data"
    manifest = json.loads((data / "manifest.json").read_text())
    del manifest["tokenizer"]["end_of_text"]
    (data / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="does not say which token ends a document"):
        train(small_config(dataset=str(data), shuffle_documents=True))
    with pytest.raises(ConfigError, match="needs sampling = 'epoch'"):
        small_config(shuffle_documents=True, sampling="random")
