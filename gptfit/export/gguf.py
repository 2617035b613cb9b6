"""Export to GGUF, llama.cpp's file: its gpt2 architecture, or arcee for a portable modern model; read back bit for bit."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from gptfit.checkpoint.hf_names import with_biases
from gptfit.checkpoint.loaded_model import LoadedModel
from gptfit.config.recipe import strange_keys
from gptfit.conversation import JINJA
from gptfit.data.tokenizer_formats import BpeTables, to_bpe_tables
from gptfit.errors import DeviceError, RunError
from gptfit.export.arcee import ARCEE, add_arcee_numbers, arcee_tensors
from gptfit.export.result import Exported
from gptfit.model.layers import LAYER_NORM_EPSILON

# nanoGPT's names -> llama.cpp's, whose linear layers have torch's order: (out, in).
TOP = {"transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm"}
BLOCK = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
GELU_NOTE = "llama.cpp computes GELU in its tanh form, ours is exact: its logits differ in the third decimal place"
FILE_TYPES = {"float32": 0, "float16": 1}  # llama.cpp's numbers for what most tensors are in
NO_END_NOTE = "this vocabulary has no end-of-text and llama.cpp assumes one: run it with --ignore-eos"


def write_gguf(opened: LoadedModel, path: Path, dtype: str = "float32") -> Exported:
    """Matrices in `dtype`; vectors are always float32, as llama.cpp wants them."""
    _check_architecture(opened)
    try:
        import gguf
    except ImportError:
        raise DeviceError("--to gguf needs the gguf package", fix="pip install 'gptfit[hf]'") from None
    tensors = _tensors(opened, np.dtype(dtype))
    # Closed also where a write fails: Windows lets nobody remove a file that is open.
    with closing(gguf.GGUFWriter(path, "gpt2" if opened.shape.arch == "gpt2" else ARCEE)) as writer:
        _add_model(writer, opened, FILE_TYPES[dtype])
        _add_tokenizer(writer, gguf.TokenType, to_bpe_tables(opened.tokenizer), opened)
        for name, tensor in tensors.items():
            writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    is_other_gelu = opened.shape.arch == "gpt2" and opened.gelu == "none"
    notes = [note for note, said in ((GELU_NOTE, is_other_gelu), (NO_END_NOTE, _no_end(opened))) if said]
    return Exported(path, (_check(gguf, path, tensors),), tuple(notes))


def _check_architecture(opened: LoadedModel) -> None:
    strange = strange_keys(opened.shape) if opened.shape.arch == "modern" else {}
    if strange:
        spoken = ", ".join(f"{key} = {value!r}" for key, value in strange.items())
        message = f"{opened.path}: llama.cpp cannot compute {spoken}"
        raise RunError(message, fix="export with --to hf, or train with --portable=True")


def _tensors(opened: LoadedModel, dtype: np.dtype[Any]) -> dict[str, np.ndarray]:
    state = {name: tensor.detach().cpu().float() for name, tensor in opened.model.state_dict().items()}
    if opened.shape.arch == "modern":
        named = arcee_tensors(state, opened.shape)
    else:
        with_all = with_biases(state, opened.shape)
        named = {gguf_name(name): tensor for name, tensor in with_all.items() if name != "lm_head.weight"}
    return {
        name: np.ascontiguousarray(tensor.numpy().astype(dtype if tensor.dim() > 1 else np.float32))
        for name, tensor in named.items()
    }


def gguf_name(name: str) -> str:
    """transformer.h.3.attn.c_proj.weight -> blk.3.attn_output.weight."""
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    number, _, part = stem.removeprefix("transformer.h.").partition(".")
    return f"blk.{number}.{BLOCK[part]}.{kind}"


def _no_end(opened: LoadedModel) -> bool:
    return opened.tokenizer.end_of_text is None


def _add_model(writer: Any, opened: LoadedModel, file_type: int) -> None:
    shape = opened.shape
    writer.add_name(opened.path.parent.name or "gptfit")
    writer.add_context_length(shape.block_size)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(4 * shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_head_count(shape.n_head)
    if shape.arch == "gpt2":
        writer.add_layer_norm_eps(LAYER_NORM_EPSILON)
    else:
        add_arcee_numbers(writer, shape)
    writer.add_file_type(file_type)
    writer.add_vocab_size(shape.vocab_size)


def _add_tokenizer(writer: Any, kinds: Any, tables: BpeTables, opened: LoadedModel) -> None:
    """A model padded beyond its tokenizer gets unused names, as llama.cpp's own converter does."""
    padding = [f"[PAD{index}]" for index in range(len(tables.tokens), opened.shape.vocab_size)]
    types = [kinds.CONTROL if index in tables.special else kinds.NORMAL for index in range(len(tables.tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tables.tokens, *padding])
    writer.add_token_types([*types, *[kinds.UNUSED] * len(padding)])
    writer.add_token_merges(list(tables.merges))
    writer.add_add_bos_token(False)
    end = opened.tokenizer.end_of_text
    if end is not None:
        writer.add_bos_token_id(end)
        writer.add_eos_token_id(end)
    if opened.data is not None and opened.data.chat:
        writer.add_chat_template(JINJA)


def _check(gguf: Any, path: Path, tensors: dict[str, np.ndarray]) -> str:
    reader = gguf.GGUFReader(path)
    # GGUF counts dimensions from the inside out, and hands the data back as written.
    found = {tensor.name: np.asarray(tensor.data).reshape(tensors[tensor.name].shape) for tensor in reader.tensors}
    if found.keys() != tensors.keys() or not all(np.array_equal(found[name], tensors[name]) for name in tensors):
        raise RunError(f"{path}: reads back differently", fix="nothing was exported")
    return f"{len(found)} tensors read back bit for bit"
