"""The code torch.compile writes for a card, on a machine without one: `python bench/_card_code.py REQUEST`, JSON out.

    python bench/_card_code.py '{"what": "step", "n_layer": 2, "arch": "gpt2", "micro_batch": 8, "capability": [8, 9]}'

Fake CUDA tensors run CUDA's autocast, autograd and Inductor down to the text of its Triton kernels; nothing is computed.
A small library answers for the device that a CPU build of torch does not have (card_stand_in.cpp; needs g++ and Triton).
`what` is 'step', forward and backward of a whole model, or 'chunk', the kernel of the chunked loss.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
# What Inductor asks of a card: an RTX 4070's figures where they differ from card to card.
PROPERTIES = {
    "name": "a card that is not there",
    "total_memory": 12 * 1024**3,
    "multi_processor_count": 46,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 1536,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "L2_cache_size": 36 * 1024**2,
    "shared_memory_per_block_optin": 101376,
    "gcnArchName": "",  # asked of every card, told by AMD's
}


def main() -> int:
    request = json.loads(sys.argv[1])
    load_stand_in()
    print(json.dumps(generate(request)))
    return 0


def load_stand_in() -> None:
    """Before torch: it asks once whether there is CUDA and keeps the answer."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    torch_folder = Path(found.origin).parent
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "card_stand_in.so"
        parts = [f"-L{torch_folder}/lib", f"-Wl,-rpath,{torch_folder}/lib", "-lc10", "-ltorch_cpu"]
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{torch_folder}/include"]
        subprocess.run([*command, str(HERE / "card_stand_in.cpp"), "-o", str(library), *parts], check=True)
        ctypes.CDLL(str(library))


def generate(request: dict[str, Any]) -> dict[str, Any]:
    """{'code': [forward, backward] or [chunk], 'weights': [[name, shape]]}."""
    import torch

    sources: list[str] = []
    _answer_for_card(torch, tuple(request["capability"]))
    _keep_sources(sources)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        weights = _trace_chunk(torch, request) if request["what"] == "chunk" else _trace_step(torch, request)
    return {"code": sources, "weights": weights}


class _NotRun(RuntimeError):
    pass


def _trace_step(torch: Any, request: dict[str, Any]) -> list[tuple[str, list[int]]]:
    """A micro-step under CUDA's autocast with the flash kernel, which torch would choose on a card."""
    from torch.nn import functional as F

    from gptfit.model.build import build_model
    from gptfit.shape import ModelShape

    def flash(q: Any, k: Any, v: Any, dropout_p: float = 0.0, is_causal: bool = False, scale: Any = None) -> Any:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]

    F.scaled_dot_product_attention = flash  # type: ignore[assignment]
    sizes = {
        name: request[name] for name in ("n_head", "n_embd", "block_size", "vocab_size", "arch") if name in request
    }
    defaults = {"n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304}
    shape = ModelShape(n_layer=request["n_layer"], **{**defaults, **sizes})
    with torch.device("meta"):
        model = build_model(shape)
    _put_on_card(torch, model)
    ids, targets = (
        torch.empty(request["micro_batch"], shape.block_size, dtype=torch.long, device="cuda") for _ in range(2)
    )
    returns_logits = request.get("logits") == "returned"

    class Wrapped(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, ids: Any, targets: Any) -> Any:
            if not returns_logits:
                return model(ids, targets)
            logits = model.logits(ids)
            return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    wrapped = Wrapped()
    wrapped.model = model
    with torch.autocast("cuda", torch.bfloat16):
        _compile(torch, wrapped, ids, targets)
    return [(name, list(weight.shape)) for name, weight in model.named_parameters()]


def _trace_chunk(torch: Any, request: dict[str, Any]) -> list[tuple[str, list[int]]]:
    from gptfit.model.head import fused_losses

    rows, vocab = request["rows"], request["vocab_size"]
    logits = torch.empty(rows, vocab, dtype=torch.bfloat16, device="cuda")
    ids = torch.empty(rows, dtype=torch.long, device="cuda")
    _compile(torch, fused_losses(), logits, ids, request["cap"])
    return []


def _compile(torch: Any, function: Any, *inputs: Any) -> None:
    compiled = function if not isinstance(function, torch.nn.Module) else torch.compile(function)
    try:
        compiled(*inputs)
    except _NotRun:
        return
    except RuntimeError as error:
        if "not run" not in str(error):
            raise


def _put_on_card(torch: Any, model: Any) -> None:
    """Parameters made there: neither a random start nor a copy exists for a card that is not there."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                if id(weight) not in made:
                    made[id(weight)] = torch.nn.Parameter(torch.empty(weight.shape, device="cuda"))
                module._parameters[name] = made[id(weight)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda")


def _answer_for_card(torch: Any, capability: tuple[int, int]) -> None:
    """The questions Dynamo, Inductor and Triton ask torch.cuda and the driver."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    properties = SimpleNamespace(major=capability[0], minor=capability[1], **PROPERTIES)
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: capability,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "_lazy_init": lambda: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], PROPERTIES["warp_size"])
    driver.set_active(SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0))


def _keep_sources(sources: list[str]) -> None:
    """Inductor writes its code and stops there. Passes that would compute something on the card are left out."""
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm
    from torch._inductor.graph import GraphLowering

    def keep(graph: Any) -> Any:
        sources.append(graph.codegen()[0].value)

        def call(arguments: Any) -> Any:
            raise _NotRun("not run: there is no card")

        return SimpleNamespace(call=call, __file__="", key="")

    GraphLowering.compile_to_module = keep  # type: ignore[method-assign, assignment]
    for module, name in (
        (fuse_attention, "_sfdp_init"),
        (pad_mm, "_pad_mm_init"),
        (misc_patterns, "_misc_patterns_init"),
    ):
        setattr(module, name, lambda device=None: None)
    torch._inductor.config.fx_graph_cache = False
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.joint_graph_constant_folding = False
    torch._functorch.config.enable_autograd_cache = False
    torch._functorch.config.force_non_lazy_backward_lowering = True


if __name__ == "__main__":
    sys.exit(main())
