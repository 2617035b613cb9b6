"""A portable modern model in llama.cpp: its graph, written again from its source, and llama.cpp itself where it is installed."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gptfit.checkpoint.loaded_model import LoadedModel, open_model
from gptfit.cli import main
from gptfit.config.keys import PORTABLE
from gptfit.data.tokenizer import load_tokenizer
from gptfit.export.export import export
from gptfit.shape import ModelShape
from tests.generate.test_evaluate import make_byte_run
from tests.models import save_checkpoint, tiny_model

gguf = pytest.importorskip("gguf")
# Heads of 4 have one pair that turns and one that stands still; 16 have four of each.
SHAPES: list[dict[str, Any]] = [
    {},
    {"n_layer": 3, "n_head": 8, "block_size": 64},
    {"n_head": 1, "qk_scale": 1.2, "block_size": 1024},
    {"tied_head": True, "n_head": 4},
]
TOLERANCE = 1e-4  # of logits that differ by several


def portable_run(folder: Path, **changes: Any) -> LoadedModel:
    """A byte run whose model has nothing but what llama.cpp computes."""
    make_byte_run(folder, 60)
    model = tiny_model("modern", vocab_size=257, **PORTABLE | changes)
    save_checkpoint(model, folder / "ckpt.pt", dataset=str(folder / "data"), **PORTABLE | changes)
    return open_model(str(folder))


def ids_of(shape: ModelShape) -> list[int]:
    return [int(i) for i in torch.randint(257, (shape.block_size,), generator=torch.Generator().manual_seed(5))]


@torch.inference_mode()
def our_logits(opened: LoadedModel, ids: list[int]) -> np.ndarray[Any, Any]:
    return opened.model.logits(torch.tensor([ids]))[0].double().numpy()


@pytest.mark.parametrize("changes", SHAPES)
def test_llama_cpps_graph_computes_our_logits(changes: dict[str, Any], tmp_path: Path) -> None:
    from tests.export.arcee_in_numpy import ArceeFile

    opened = portable_run(tmp_path, **changes)
    export(opened, "gguf", str(tmp_path / "m.gguf"))
    file, ids = ArceeFile(tmp_path / "m.gguf"), ids_of(opened.shape)
    ours, theirs = our_logits(opened, ids), file.logits(ids)
    assert ours.std() > 0.5
    assert np.abs(ours - theirs).max() < TOLERANCE
    assert (ours.argmax(1) == theirs.argmax(1)).all()
    assert file.number("context_length") == opened.shape.block_size
    assert np.isfinite([np.abs(tensor).max() for tensor in file.tensors.values()]).all()


def test_half_precision_rounds_matrices_only(tmp_path: Path) -> None:
    from tests.export.arcee_in_numpy import ArceeFile

    opened = portable_run(tmp_path)
    assert main(["export", str(tmp_path), "--to", "gguf", "--dtype", "float16", "--out", str(tmp_path / "m.gguf")]) == 0
    file, ids = ArceeFile(tmp_path / "m.gguf"), ids_of(opened.shape)
    for tensor in file.reader.tensors:
        assert tensor.tensor_type.name == ("F16" if len(tensor.shape) > 1 else "F32")
    assert file.field("general.file_type") == 1
    ours, theirs = our_logits(opened, ids), file.logits(ids)
    assert 0 < np.abs(ours - theirs).max() < 0.02
    assert (ours.argmax(1) == theirs.argmax(1)).all()


def test_every_arcee_tensor_is_one_llama_cpp_knows(tmp_path: Path) -> None:
    export(portable_run(tmp_path), "gguf", str(tmp_path / "m.gguf"))
    known = {
        gguf.TENSOR_NAMES[kind].format(bid=layer) + ".weight"
        for kind in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.ARCEE]
        for layer in range(2)
    }
    written = {tensor.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    # The other one is an old table that no file has any more.
    assert known - written == {"blk.0.attn_rot_embd.weight", "blk.1.attn_rot_embd.weight"}
    assert written <= known


def test_a_modern_model_that_is_not_portable_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_byte_run(tmp_path, 60, "modern")
    assert main(["export", str(run), "--to", "gguf"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "llama.cpp cannot compute qk_norm = True, smear = True" in said
    assert "train with --portable=True" in said


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-4), ("float16", 0.02)])
@pytest.mark.parametrize("changes", SHAPES)
def test_llama_cpp_computes_our_logits(changes: dict[str, Any], dtype: str, most: float, tmp_path: Path) -> None:
    """`pip install xllamacpp` brings llama.cpp built; its server answers with the next token's log probabilities."""
    pytest.importorskip("xllamacpp")
    opened = portable_run(tmp_path, **changes)
    export(opened, "gguf", str(tmp_path / "m.gguf"), dtype=dtype)
    ids = ids_of(opened.shape)
    lengths = sorted({*range(1, 16), opened.shape.block_size // 2, opened.shape.block_size - 1})
    theirs = llama_cpp_answers(tmp_path / "m.gguf", [ids[:length] for length in lengths])
    logits = our_logits(opened, ids)
    ours = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    for length, answer in zip(lengths, theirs, strict=True):
        if answer is not None:
            assert np.abs(answer - ours[length - 1]).max() < most
            assert answer.argmax() == ours[length - 1].argmax()
    assert sum(answer is not None for answer in theirs) >= 3


def llama_cpp_answers(path: Path, prompts: list[list[int]]) -> list[np.ndarray[Any, Any] | None]:
    """Log probabilities of every token after each prompt; None where the likeliest is no whole character, which it hides."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup, params.cpuparams.n_threads = 2048, 1, False, 1
    # As exact as it can: its usual cache of keys and values is float16.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    wish = {"n_predict": 1, "n_probs": 257, "temperature": 0.0, "cache_prompt": False}
    answers = [server.handle_completions(wish | {"prompt": prompt})["choices"][0]["logprobs"] for prompt in prompts]
    found: list[np.ndarray[Any, Any] | None] = []
    for answer in answers:
        rows = answer["content"][0]["top_logprobs"] if answer else []
        known = {row["id"]: row["logprob"] for row in rows}
        found.append(np.array([known[token] for token in range(257)]) if known else None)
    return found


def test_llama_cpp_reads_our_tokenizer(tmp_path: Path) -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    export(portable_run(tmp_path), "gguf", str(tmp_path / "m.gguf"))
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup = str(tmp_path / "m.gguf"), 256, False
    server = xllamacpp.Server(params)
    text = "Hello naïve world,\n\n  it's 1984 — 你好 🙂"
    ids = asked(server, "tokenize", {"content": text, "add_special": False})["tokens"]
    assert ids == load_tokenizer("bytes").encode(text)
    assert asked(server, "detokenize", {"tokens": ids})["content"] == text


def asked(server: Any, what: str, wish: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{server.listening_address}/{what}", json.dumps(wish).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def test_a_checkpoint_in_torchs_old_format_is_exported_too(tmp_path: Path) -> None:
    opened = portable_run(tmp_path)
    saved = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    torch.save(saved, tmp_path / "ckpt.pt", _use_new_zipfile_serialization=False)
    export(opened, "gguf", str(tmp_path / "new.gguf"))
    export(open_model(str(tmp_path)), "gguf", str(tmp_path / "old.gguf"))
    assert (tmp_path / "new.gguf").read_bytes() == (tmp_path / "old.gguf").read_bytes()


def test_a_file_that_is_no_checkpoint_is_one_short_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ckpt.pt").write_bytes(b"no checkpoint")
    assert main(["export", str(tmp_path), "--to", "gguf"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"gptfit: {tmp_path}/ckpt.pt: not a readable checkpoint (")
    assert "mmap" not in said
    assert "use another one of this run" in said
