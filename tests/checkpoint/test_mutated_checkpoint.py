"""A checkpoint or model folder changed in one place: used, or refused in one line, within its own size in memory."""

from __future__ import annotations

import copy
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gptfit.checkpoint.format import LAST, Checkpoint, load_checkpoint, load_weights
from gptfit.checkpoint.hf_folder import read_hf_folder
from gptfit.checkpoint.hf_names import to_hf
from gptfit.config.keys import TrainConfig
from gptfit.errors import GptfitError
from gptfit.model.base import LanguageModel
from gptfit.model.build import build_model
from gptfit.train.train import train
from tests.checkpoint.test_format import as_nanogpt_saves_it
from tests.test_mutated_files import ODD_VALUES, bounded_memory, changed, either_way, mutations, no_hang, places, torn

MakeConfig = Callable[..., TrainConfig]
TRIES = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
FEW = settings(TRIES, max_examples=8)
ODD_TENSORS = (
    torch.zeros(1),
    torch.zeros(0),
    torch.zeros((), dtype=torch.int64),
    torch.zeros(1).expand(10**7, 1000),  # forty gigabytes by its word, four bytes in the file
    torch.full((2, 2), float("nan")),
    torch.zeros(3, 3).to_sparse(),
    torch.zeros(2, dtype=torch.complex64),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A real checkpoint of each sampler and optimizer, as torch.load gives it."""
    import numpy as np

    folder = tmp_path_factory.mktemp("made")
    ids = (np.arange(3000) * 7 % 65).astype(np.uint16)
    ids.tofile(folder / "train.bin")
    ids[:600].tofile(folder / "val.bin")
    from tests.small_runs import SMALL

    common = {**SMALL, "dataset": str(folder), "max_iters": 2, "n_layer": 1, "eval_interval": 2, "vocab_size": 65}
    found = {}
    for name, keys in {"epoch": {}, "random": {"sampling": "random"}, "muon": {"optimizer": "muon"}}.items():
        out = folder / name
        train(TrainConfig(**{**common, "out_dir": str(out), **keys}))
        found[name] = torch.load(out / LAST, weights_only=True)
    as_nanogpt_saves_it(folder / "epoch" / LAST, "_orig_mod.")
    found["nanogpt"] = torch.load(folder / "epoch" / LAST, weights_only=True)
    found["config"] = common
    return found


def load_model(path: Path) -> tuple[LanguageModel, Checkpoint]:
    checkpoint = load_checkpoint(path)
    model = build_model(checkpoint.shape)
    load_weights(model, checkpoint)
    return model, checkpoint


def read_all(path: Path) -> None:
    with no_hang(), bounded_memory():
        try:
            model, checkpoint = load_model(path)
            assert checkpoint.shape.n_weights <= path.stat().st_size
            del model
        except GptfitError as error:
            assert "allocate" not in str(error), "it was refused only because the memory ran out"
            raise


@TRIES
@given(data=st.data())
def test_a_changed_checkpoint_is_opened_or_refused(made: dict[str, Any], tmp_path: Path, data: st.DataObject) -> None:
    whole = made[data.draw(st.sampled_from(["epoch", "random", "muon", "nanogpt"]))]
    place = data.draw(st.sampled_from(list(places(whole))))
    odd = data.draw(st.sampled_from((*ODD_VALUES, *ODD_TENSORS)))
    torch.save(changed(whole, place, odd, data.draw(st.sampled_from(["replace", "remove", "rename"]))), tmp_path / LAST)
    either_way(lambda: read_all(tmp_path / LAST))


@TRIES
@given(data=st.data())
def test_a_checkpoint_with_changed_bytes_is_opened_or_refused(
    made: dict[str, Any], tmp_path: Path, data: st.DataObject
) -> None:
    """Cut, flipped, doubled or dropped: in the archive's own records too, which are at its end."""
    torch.save(made[data.draw(st.sampled_from(["epoch", "nanogpt"]))], tmp_path / LAST)
    whole = (tmp_path / LAST).read_bytes()
    at_end = max(0, len(whole) - 3000)
    content = data.draw(st.one_of(torn(whole), torn(whole[at_end:]).map(lambda end: whole[:at_end] + end)))
    (tmp_path / LAST).write_bytes(content)
    either_way(lambda: read_all(tmp_path / LAST))


@FEW
@given(data=st.data())
def test_a_changed_checkpoint_is_resumed_or_refused(made: dict[str, Any], tmp_path: Path, data: st.DataObject) -> None:
    """What the loop needs of it: optimizer, progress, config and random streams."""
    name = data.draw(st.sampled_from(["epoch", "random", "muon", "nanogpt"]))
    whole = made[name]
    inside = [place for place in places(whole) if place and place[0] != "model"]
    odd = data.draw(st.sampled_from((*ODD_VALUES, *ODD_TENSORS)))
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    torch.save(changed(whole, data.draw(st.sampled_from(inside)), odd, "replace"), out / LAST)
    keys = {"random": {"sampling": "random"}, "muon": {"optimizer": "muon"}}.get(name, {})
    config = TrainConfig(**{**made["config"], **keys, "out_dir": str(out), "init_from": "resume", "max_iters": 3})

    def resume() -> None:
        with no_hang():
            train(config)

    either_way(resume)


@pytest.mark.parametrize("key", ["n_layer", "n_embd", "vocab_size", "block_size", "n_head"])
def test_a_size_beyond_the_file_is_refused_before_anything_is_built(
    made: dict[str, Any], tmp_path: Path, key: str
) -> None:
    for size in (10**6, 10**9, -1, 0, "12", None, 2.5, True):
        saved = copy.deepcopy(made["epoch"])
        saved["model_args"][key] = size
        torch.save(saved, tmp_path / LAST)
        with no_hang(), bounded_memory(), pytest.raises(GptfitError) as caught:
            load_model(tmp_path / LAST)
        assert len(str(caught.value).splitlines()) == 1


@pytest.fixture(scope="module")
def folder(made: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as Hugging Face has them, of the smallest GPT-2."""
    from safetensors.torch import save_file

    found = tmp_path_factory.mktemp("hf")
    torch.save(made["epoch"], found / LAST)
    args = made["epoch"]["model_args"]
    sizes = {"n_positions": args["block_size"], **{key: args[key] for key in ("n_layer", "n_head", "n_embd")}}
    config = {"model_type": "gpt2", "vocab_size": args["vocab_size"], **sizes, "architectures": ["GPT2LMHeadModel"]}
    (found / "config.json").write_text(json.dumps(config))
    checkpoint = load_checkpoint(found / LAST)
    tensors = to_hf(checkpoint.model, checkpoint.shape)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, found / "model.safetensors")
    open_folder(found)
    return found


@TRIES
@given(data=st.data())
def test_a_changed_model_folder_is_opened_or_refused(folder: Path, tmp_path: Path, data: st.DataObject) -> None:
    """In config.json, or in what the weights say of themselves: names, number formats, shapes and places."""
    config, weights = (folder / "config.json").read_bytes(), (folder / "model.safetensors").read_bytes()
    if data.draw(st.booleans()):
        config = json.dumps(data.draw(mutations({**json.loads(config), "n_inner": 10**6}))).encode()
        config = data.draw(st.one_of(st.just(config), torn(config)))
    else:
        length = int.from_bytes(weights[:8], "little")
        said = json.dumps(data.draw(mutations(json.loads(weights[8 : 8 + length])))).encode()
        changed_head = len(said).to_bytes(8, "little") + said
        weights = data.draw(st.one_of(st.just(changed_head), torn(changed_head))) + weights[8 + length :]
    (tmp_path / "config.json").write_bytes(config)
    (tmp_path / "model.safetensors").write_bytes(weights)

    def read() -> None:
        with bounded_memory():
            open_folder(tmp_path)

    either_way(read)


@pytest.mark.parametrize("key", ["n_layer", "n_embd", "vocab_size", "n_positions", "n_head"])
def test_a_model_folder_with_a_million_layers_does_not_hang(folder: Path, tmp_path: Path, key: str) -> None:
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    for size in (10**6, 10**9, -1, 0, "12", None, 2.5):
        config = {**json.loads((folder / "config.json").read_text()), key: size}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with no_hang(), bounded_memory(), pytest.raises(GptfitError):
            open_folder(tmp_path)


def open_folder(folder: Path) -> None:
    checkpoint, _ = read_hf_folder(folder)
    with torch.device("meta"):
        model = build_model(checkpoint.shape, dropout=0.0)
    load_weights(model, checkpoint)


def test_weights_of_a_model_folder_that_claim_more_than_their_file_are_refused(tmp_path: Path) -> None:
    """A tensor of four bytes that says it is forty gigabytes, and a part that is a thousand times itself unpacked."""
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 4, "n_positions": 16, "vocab_size": 65}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = tmp_path / "pytorch_model.bin"
    torch.save({"wte.weight": torch.zeros(1, dtype=torch.float16).expand(10**7, 1000)}, weights)
    with no_hang(), bounded_memory(), pytest.raises(GptfitError, match="more than the file holds"):
        open_folder(tmp_path)
    torch.save({"wte.weight": torch.zeros(2**22)}, weights)
    packed = tmp_path / "packed.bin"
    with zipfile.ZipFile(weights) as whole, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as small:
        for part in whole.infolist():
            small.writestr(part.filename, whole.read(part))
    assert packed.stat().st_size * 100 < weights.stat().st_size
    packed.replace(weights)
    with no_hang(), pytest.raises(GptfitError, match="its parts say they hold"):
        open_folder(tmp_path)
    with no_hang(), pytest.raises(GptfitError, match="its parts say they hold"):
        load_checkpoint(weights)


def test_what_nanogpt_reads_is_still_what_we_write(made: dict[str, Any]) -> None:
    """Its train.py and sample.py use these keys; the checksums stand beside them in the archive."""
    assert {"model", "optimizer", "model_args", "iter_num", "best_val_loss", "config"} <= set(made["epoch"])


def test_sums_that_a_writer_left_out_are_no_damage(made: dict[str, Any], tmp_path: Path) -> None:
    """torch.serialization.set_crc32_options(False) writes other numbers there, for every part."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(made["epoch"], tmp_path / LAST)
    finally:
        torch.serialization.set_crc32_options(before)
    assert load_checkpoint(tmp_path / LAST).iter_num == 2
