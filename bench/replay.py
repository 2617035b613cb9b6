"""What torch's allocator holds for a compiled step on a card, by replaying its rules; nothing here needs a card.

python bench/replay.py               MiB by micro-batch: gradients made in backward, and made first; beside the plan
python bench/replay.py code          the same tensors against code that Inductor generates now (minutes; g++, Triton)
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from _code_events import replay_code
from _lifetimes import CUBLAS_WORKSPACE, Held, replay

from gptfit.plan import memory
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape
from gptfit.units import MIB

MICRO_BATCHES = (4, 8, 12, 16, 24, 32, 64, 128)
CODES = (("gpt2", "returned"), ("gpt2", "replaced"), ("modern", "replaced"))


def main() -> int:
    if sys.argv[1:] == ["code"]:
        for arch, logits in CODES:
            listed, generated = compare_with_code(arch, logits, n_layer=12)
            print(f"{arch}, logits {logits}: listed {_words(listed)}, generated {_words(generated)}")
        return 0
    for arch in ("gpt2", "modern"):
        print(f"\n{arch}, 12 layers of 768, vocabulary 50304, 1024 tokens; MiB without the context")
        print("    B   lives   held: made in backward, expandable;  made first, expandable   plan")
        for micro_batch in MICRO_BATCHES:
            print(
                _line(
                    Setting(
                        ModelShape(12, 12, 768, 1024, 50304, arch=arch), micro_batch, accumulation=8, logits="replaced"
                    )
                )
            )
    return 0


def _line(setting: Setting) -> str:
    ways = [replay(setting, expandable, settled) for settled in (False, True) for expandable in (False, True)]
    planned = memory.predict(setting).device.value - memory.FITTED.context_bytes
    cells = "  ".join(f"{held.reserved / MIB:10,.0f}" for held in ways)
    return f"{setting.micro_batch:5d} {ways[0].allocated / MIB:7,.0f} {cells}  {planned / MIB:10,.0f}"


def compare_with_code(arch: str, logits: str, n_layer: int, micro_batch: int = 8) -> tuple[Held, Held]:
    """(our list of tensors, Inductor's code of today), both replayed."""
    setting = Setting(ModelShape(n_layer, 12, 768, 1024, 50304, arch=arch), micro_batch, accumulation=2, logits=logits)
    made = card_code(what="step", n_layer=n_layer, arch=arch, logits=logits, micro_batch=micro_batch)
    run = replay_code(made["code"], made["weights"], logits == "returned", CUBLAS_WORKSPACE)
    return replay(setting), Held(run.peak_allocated, run.reserved)


def card_code(capability: tuple[int, int] = (8, 9), **request: object) -> dict[str, list[object]]:
    """In a process of its own, whose torch believes in a card."""
    script = Path(__file__).resolve().with_name("_card_code.py")
    command = [sys.executable, str(script), json.dumps({**request, "capability": capability})]
    made = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, list[object]] = json.loads(made.splitlines()[-1])
    return found


def _words(held: Held) -> str:
    return f"{held.allocated / MIB:,.0f} live, {held.reserved / MIB:,.0f} held"


if __name__ == "__main__":
    sys.exit(main())
