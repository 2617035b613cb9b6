"""Export to a Hugging Face folder: weights, config, tokenizer, model card; the logits compared through transformers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptfit.checkpoint.hf_names import hf_name_of_gelu, to_hf
from gptfit.checkpoint.loaded_model import LoadedModel
from gptfit.conversation import ANSWER_MARK, JINJA, Turn
from gptfit.data.chat import conversation_tokens
from gptfit.data.tokenizer import END_OF_TEXT, load_tokenizer
from gptfit.data.tokenizer_formats import to_tokenizer_json
from gptfit.errors import DeviceError, RunError
from gptfit.export.model_card import write_model_card
from gptfit.export.result import Exported
from gptfit.model.layers import LAYER_NORM_EPSILON

MODELLING = "gptfit.export.hf_modelling"
TOLERANCE = 1e-5  # of the largest logit, float32
CHECK_TOKENS = 256
# One line with everything a tokenizer may get wrong.
CHECK_TEXT = "Hello, world!\n  it's 1984\tin the naïve café — ok 你好 🙂"
CHECK_TURNS = (Turn("system", "Be brief."), Turn("user", CHECK_TEXT.strip()), Turn("assistant", "Yes:\n\n 1. two"))
OWN_CODE_CHECK = """
import sys, torch, transformers
folder, scratch = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, trust_remote_code=True)
with torch.inference_mode():
    torch.save(model.eval()(torch.load(scratch + "/ids.pt")).logits.clone(), scratch + "/logits.pt")
"""
OWN_IMPORT = re.compile(r"^from (gptfit(?:\.\w+)+) import", re.MULTILINE)


def write_hf(opened: LoadedModel, folder: Path) -> Exported:
    """A GPT2LMHeadModel folder for arch='gpt2'; for others one that brings its own modelling code."""
    _need_transformers()
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    is_gpt2 = opened.shape.arch == "gpt2"
    state = {name: tensor.detach().cpu() for name, tensor in opened.model.state_dict().items()}
    tensors = to_hf(state, opened.shape) if is_gpt2 else {f"model.{name}": t.clone() for name, t in state.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = _gpt2_config(opened) if is_gpt2 else _own_config(opened)
    _write_json(folder / "config.json", config | _ids(opened))
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 200, "use_cache": is_gpt2}
    _write_json(folder / "generation_config.json", sampling | _ids(opened))
    if not is_gpt2:
        bundle_code(folder)
    _write_tokenizer(opened, folder)
    checks = [_check_logits(opened, folder, is_gpt2), _check_tokenizer(opened, folder)]
    if opened.data is not None and opened.data.chat:
        checks.append(_check_template(opened, folder))
    write_model_card(opened, folder, tuple(checks))
    notes = () if is_gpt2 else ("load it with trust_remote_code=True: its code is in the folder",)
    return Exported(folder, tuple(checks), notes)


def bundle_code(folder: Path) -> None:
    """The model's own source files side by side, importing each other: no second copy of the formulas to keep."""
    waiting, done = [MODELLING], set()
    while waiting:
        name = waiting.pop()
        if name in done:
            continue
        done.add(name)
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).read_text(encoding="utf-8")
        waiting += OWN_IMPORT.findall(source)
        source = OWN_IMPORT.sub(lambda match: f"from .{_file_of(match[1])} import", source)
        (folder / f"{_file_of(name)}.py").write_text(source, encoding="utf-8")


def _file_of(module: str) -> str:
    return "modeling_gptfit" if module == MODELLING else f"gptfit_{module.rpartition('.')[2]}"


def _gpt2_config(opened: LoadedModel) -> dict[str, Any]:
    shape = opened.shape
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": hf_name_of_gelu(opened.gelu),
        "n_layer": shape.n_layer,
        "n_head": shape.n_head,
        "n_embd": shape.n_embd,
        "n_positions": shape.block_size,
        "n_ctx": shape.block_size,
        "vocab_size": shape.vocab_size,
        "layer_norm_epsilon": LAYER_NORM_EPSILON,
        "tie_word_embeddings": True,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def _own_config(opened: LoadedModel) -> dict[str, Any]:
    return {
        "architectures": ["GptfitForCausalLM"],
        "model_type": "gptfit",
        "auto_map": {
            "AutoConfig": "modeling_gptfit.GptfitConfig",
            "AutoModelForCausalLM": "modeling_gptfit.GptfitForCausalLM",
        },
        "shape": dataclasses.asdict(opened.shape),
        # Under the names that other tools look for.
        "num_hidden_layers": opened.shape.n_layer,
        "num_attention_heads": opened.shape.n_head,
        "hidden_size": opened.shape.n_embd,
        "vocab_size": opened.shape.vocab_size,
        "max_position_embeddings": opened.shape.block_size,
        "tie_word_embeddings": opened.shape.tied_head,
        "use_cache": False,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def _ids(opened: LoadedModel) -> dict[str, Any]:
    end = opened.tokenizer.end_of_text
    return {"bos_token_id": end, "eos_token_id": end}


def _write_tokenizer(opened: LoadedModel, folder: Path) -> None:
    (folder / "tokenizer.json").write_text(to_tokenizer_json(opened.tokenizer), encoding="utf-8")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": opened.shape.block_size,
        "clean_up_tokenization_spaces": False,
    }
    end = opened.tokenizer.end_of_text
    if end is not None:
        spelled = opened.tokenizer.pieces[end].decode("utf-8", "replace") or END_OF_TEXT
        config |= {"bos_token": spelled, "eos_token": spelled}
    if opened.data is not None and opened.data.chat:
        config["chat_template"] = JINJA
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _check_logits(opened: LoadedModel, folder: Path, is_gpt2: bool) -> str:
    length = min(CHECK_TOKENS, opened.shape.block_size)
    ids = torch.randint(opened.shape.vocab_size, (2, length), generator=torch.Generator().manual_seed(1337))
    with torch.inference_mode():
        ours = opened.model.logits(opened.device.put(ids)).float().cpu()
        theirs = _gpt2_logits(folder, ids) if is_gpt2 else _own_code_logits(folder, ids)
    difference, scale = float((ours - theirs).abs().max()), max(1.0, float(ours.abs().max()))
    if not difference <= TOLERANCE * scale:
        raise RunError(f"{folder}: transformers gives other logits (by {difference:.2g})", fix="nothing was exported")
    return f"logits of {ids.numel():,} tokens equal ours in transformers, largest difference {difference:.1e}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers draws a progress bar for every load."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _gpt2_logits(folder: Path, ids: Tensor) -> Tensor:
    from transformers import GPT2LMHeadModel

    with _quiet():
        model = GPT2LMHeadModel.from_pretrained(folder, local_files_only=True).eval()
    found: Tensor = model(ids).logits
    return found


def _own_code_logits(folder: Path, ids: Tensor) -> Tensor:
    """In a process and a code cache of their own, so that it is the folder's code that runs and no trace stays."""
    with tempfile.TemporaryDirectory() as scratch:
        torch.save(ids, f"{scratch}/ids.pt")
        words = [sys.executable, "-c", OWN_CODE_CHECK, str(folder.resolve()), scratch]
        environment = {**os.environ, "HF_MODULES_CACHE": scratch, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(words, env=environment, cwd=scratch, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1][:160]
            raise RunError(f"{folder}: transformers cannot load it ({reason})", fix="nothing was exported")
        found: Tensor = torch.load(f"{scratch}/logits.pt", weights_only=True)
    return found


def _check_tokenizer(opened: LoadedModel, folder: Path) -> str:
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    known = {piece.decode("utf-8", "replace") for piece in opened.tokenizer.pieces}
    text = "".join(c for c in CHECK_TEXT if c in known) if opened.tokenizer.name == "chars" else CHECK_TEXT
    ours, theirs = opened.tokenizer.encode(text), tokenizer.encode(text)
    if ours != theirs or tokenizer.end_of_text != opened.tokenizer.end_of_text:
        raise RunError(f"{folder}: the exported tokenizer gives other tokens", fix="nothing was exported")
    return f"tokenizer.json gives the same {len(ours)} tokens of a sample line"


def _check_template(opened: LoadedModel, folder: Path) -> str:
    """transformers must make of a conversation the tokens that the model was trained on."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    messages = [{"role": turn.role, "content": f" {turn.text}\n"} for turn in CHECK_TURNS]
    for turns, asks in ((CHECK_TURNS, False), (CHECK_TURNS[:-1], True)):
        ours = conversation_tokens(turns, opened.tokenizer)
        ours += opened.tokenizer.encode(ANSWER_MARK) if asks else []
        text = loaded.apply_chat_template(messages[: len(turns)], tokenize=False, add_generation_prompt=asks)
        if loaded(text, add_special_tokens=False)["input_ids"] != ours:
            raise RunError(f"{folder}: the chat template gives other tokens than prepare", fix="nothing was exported")
    return "apply_chat_template gives the tokens of prepare --chat"


def _need_transformers() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for package in ("transformers", "tokenizers"):
        if find_spec(package) is None:
            raise DeviceError(f"--to hf checks its work with {package}", fix="pip install 'gptfit[hf]'")
