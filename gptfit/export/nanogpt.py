"""Export to nanoGPT: a ckpt.pt with its keys alone, and the meta.pkl its sample.py needs for other vocabularies."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from gptfit.checkpoint.format import LAST, Checkpoint, load_checkpoint
from gptfit.checkpoint.loaded_model import LoadedModel
from gptfit.config.keys import DEFAULTS, GPTFIT_KEYS
from gptfit.data.tokenizer import nanogpt_meta
from gptfit.errors import RunError
from gptfit.export.result import Exported


def write_nanogpt(opened: LoadedModel, folder: Path) -> Exported:
    """What nanoGPT's sample.py and train.py read; the optimizer goes along if the checkpoint has one."""
    checkpoint = opened.checkpoint
    if opened.shape.arch != "gpt2":
        raise RunError(f"{opened.path}: nanoGPT has no arch = {opened.shape.arch!r}", fix="export with --to hf")
    if isinstance(checkpoint.optimizer, dict) and len(checkpoint.optimizer.get("param_groups", ())) != 2:
        checkpoint = _without_optimizer(checkpoint)
    folder.mkdir(parents=True)
    saved = checkpoint.as_saved()
    del saved["gptfit"]
    saved["config"] = _nanogpt_config(opened)
    saved["model"] = {name: tensor.detach().cpu().clone() for name, tensor in opened.model.state_dict().items()}
    torch.save(saved, folder / LAST)
    notes = ["nanoGPT computes the exact GELU; these weights want the tanh form"] if opened.gelu == "tanh" else []
    if opened.tokenizer.name != "gpt2":
        (folder / "meta.pkl").write_bytes(pickle.dumps(nanogpt_meta(opened.tokenizer)))
        notes.append(f"copy meta.pkl into nanoGPT's data/{saved['config']['dataset']} for its sample.py")
    return Exported(folder, (_check(opened, folder),), tuple(notes))


def _nanogpt_config(opened: LoadedModel) -> dict[str, Any]:
    """nanoGPT's own keys; its sample.py looks for meta.pkl in data/<dataset>, so the name must be a plain one."""
    defaults = {key: value for key, value in DEFAULTS.items() if key not in GPTFIT_KEYS}
    config = {key: opened.checkpoint.config.get(key, value) for key, value in defaults.items()}
    return config | {"dataset": Path(str(config["dataset"])).name}


def _without_optimizer(checkpoint: Checkpoint) -> Checkpoint:
    """nanoGPT's AdamW has two groups; another optimizer's state would stop it from loading."""
    return Checkpoint(**{**vars(checkpoint), "optimizer": None})


def _check(opened: LoadedModel, folder: Path) -> str:
    back = load_checkpoint(folder / LAST)
    state = opened.model.state_dict()
    same = back.model.keys() == state.keys() and all(
        torch.equal(t, state[name].cpu()) for name, t in back.model.items()
    )
    if not same:
        raise RunError(f"{folder}: reads back differently", fix="nothing was exported")
    return f"{len(state)} tensors read back bit for bit"
