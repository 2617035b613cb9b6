"""The published measurements of tests/measured.csv as settings on cards; rows that cannot be used say why."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path

from gptfit.gpus import GPU, find_or_none
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape

MEASURED = Path(__file__).resolve().parent.parent / "tests" / "measured.csv"

# Names in the table that are no name of a card in gpus.csv.
CARDS = {
    "RTX PRO 6000 Blackwell 96GB": "RTX PRO 6000 Blackwell WS 96GB",
    "A100 (40GB assumed by repo)": "A100 40GB",
    "A100 SXM": "A100 SXM 80GB",
    "A100 SXM 40GB": "A100 40GB",
    "RTX 4070 (comment says 16GB)": "",
    "A100 (model not stated)": "",
    "A800 80GB PCIe": "A100 PCIe 80GB",
    "H800 80GB": "",
    "16GB GPU (15.78 GiB, V100 class)": "V100 SXM2 16GB",
}
DTYPES = {
    "bf16 autocast": "bfloat16",
    "bf16": "bfloat16",
    "tf32": "float32",
    "amp_bf16": "bfloat16",
    "bf16 AMP": "bfloat16",
}
# llm-foundry's table names a size, its config files the shape (scripts/train/yamls/pretrain/mpt-*.yaml).
MPT_SHAPES = {"125m": (12, 12, 768), "760m": (24, 12, 1536), "1b": (24, 16, 2048)}
MPT_VOCAB = 50368
# Rows whose own notes say that something other than the card and the setting decided the number.
SPOILT = {
    "h100nvl": "power-capped or throttled host, slower than the PCIe card",
    "2x250w": "power limit lowered: says by how much the other rows at 250 W are slower",
    "4x200w-d12": "power limit lowered: says by how much the other rows at 200 W are slower",
    "eager-det": "deterministic kernels",
    "nanogpt-a6000-shakespeare": "10M characters model, bound by logging; outside 30M to 1.5B",
    "opt-shampoo": "optimizer unknown to gptfit",
    "opt-soap": "optimizer unknown to gptfit",
    "muon-1010": "Muon not yet distributed: every GPU repeats it",
    "modern-1014": "Muon not yet distributed: every GPU repeats it",
    "pgolf": "MLP x2 and grouped queries; 17M",
    "dancinlab": "compile and attention not stated; 15 % of peak",
    "autoresearch": "sliding-window attention",
    "probe": "a single cold micro-step, timed once",
}
# Cards whose owner lowered the power limit: slower than the data sheet by what the same source measured for one setting.
AT_250_WATTS = 111874 / 100242  # nanochat-3090-2x350w-d12-b4 / 2x250w
SLOWED = {"250w": AT_250_WATTS, "200w": AT_250_WATTS * 178255 / 151761}  # 4x250w-d12-b16 / 4x200w


@dataclass(frozen=True)
class Row:
    """One published measurement."""

    id: str
    source: str  # rows of one source share its habits, so cross-validation leaves them out together
    gpu: GPU
    setting: Setting
    tokens_per_s: float | None
    memory_mib: float | None
    memory_kind: str | None  # device (nvidia-smi) | allocated
    verdict: str | None  # fits | oom
    quality: str

    @property
    def family(self) -> str:
        """Cards of one chip generation and class: what cross-validation by GPU family leaves out together."""
        kind = "GeForce" if self.gpu.is_geforce else "other"
        return f"{kind} {self.gpu.compute_capability}"

    @property
    def kind(self) -> str:
        if not self.setting.compile or not self.setting.flash or self.setting.dtype == "float32":
            return "eager" if self.setting.flash else "naive attention"
        if self.gpu.is_laptop:
            return "laptop"
        return "GeForce" if self.gpu.is_geforce else "other NVIDIA"


@dataclass(frozen=True)
class Unused:
    id: str
    reason: str


def read(path: Path = MEASURED) -> tuple[list[Row], list[Unused]]:
    rows: list[Row] = []
    unused: list[Unused] = []
    with path.open(encoding="utf-8", newline="") as file:
        for record in csv.DictReader(file):
            row = _row(record)
            if isinstance(row, Row):
                rows.append(row)
            else:
                unused.append(Unused(record["id"], row))
    return rows, unused


def speed_rows(rows: list[Row]) -> tuple[list[Row], list[Unused]]:
    """Rows whose tokens/s the speed model may be judged on."""
    used, unused = [], []
    for row in rows:
        spoilt = next((why for part, why in SPOILT.items() if part in row.id), None)
        if row.tokens_per_s is None:
            continue
        if spoilt:
            unused.append(Unused(row.id, spoilt))
        elif row.quality == "C":
            unused.append(Unused(row.id, "quality C: the source is rounded, unclear or contradicts itself"))
        else:
            used.append(row)
    return used, unused


def memory_rows(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.memory_mib is not None and row.memory_kind and row.quality != "C"]


def verdict_rows(rows: list[Row]) -> list[Row]:
    """Fits or out of memory, for models like nanoGPT's whose state is not sharded over GPUs."""
    foreign = ("nanochat", "mosaic", "autoresearch", "pgolf")
    return [
        row
        for row in rows
        if row.verdict is not None and row.quality != "C" and row.setting.flash and row.source not in foreign
    ]


def _row(record: dict[str, str]) -> Row | str:
    name = CARDS.get(record["gpu"], record["gpu"])
    gpu = find_or_none(name) if name else None
    if gpu is None:
        return "card not stated or not in gpus.csv"
    if not gpu.is_nvidia:
        return "not an NVIDIA card"
    if "fp8" in record["dtype"]:
        return "fp8"
    if record["compile"].startswith("n/a"):
        return "llm.c (CUDA), not PyTorch"
    if "flex" in record["attention"] or "tril mask" in record["attention"]:
        return "attention kernel unlike nanoGPT's"
    shape = _shape(record)
    if shape is None:
        return "shape, vocabulary or micro-batch not stated"
    if record["dtype"] not in DTYPES and record["dtype"] not in ("", "fp32"):
        return f"dtype {record['dtype']!r}"
    if record["dtype"] == "fp32":
        return "float32 without TF32, which gptfit and nanoGPT never use on such a card"
    compile_ = record["compile"]
    if compile_ not in ("yes", "no"):
        return "compile not stated"
    accumulation = int(float(record["grad_accum"] or 8))
    setting = Setting(
        shape=shape,
        micro_batch=int(float(record["micro_batch"])),
        accumulation=accumulation,
        processes=int(float(record["n_gpus"] or 1)),
        dtype=DTYPES.get(record["dtype"], "bfloat16"),
        compile=compile_ == "yes",
        parallel="fsdp" if "FSDP" in record["codebase"] else "ddp",
        sums_late=False,  # composer's FSDP sums gradients in every micro-step
        optimizer="muon" if "Muon" in record["optimizer"] else "adamw",
        muon_rounds=5,
        flash="naive" not in record["attention"],
        logits=_logits(record),
    )
    memory = float(record["peak_vram_mib"]) if record["peak_vram_mib"] else None
    slower = next((ratio for part, ratio in SLOWED.items() if part in record["id"]), 1.0)
    return Row(
        id=record["id"],
        source=re.split(r"[-]", record["id"])[0],
        gpu=slowed(gpu, slower) if slower > 1 else gpu,
        setting=setting,
        tokens_per_s=float(record["tokens_per_s"]) if record["tokens_per_s"] else None,
        memory_mib=memory,
        memory_kind=_memory_kind(record) if memory else None,
        verdict=_verdict(record),
        quality=record["quality"],
    )


def slowed(gpu: GPU, ratio: float) -> GPU:
    """The card with every rate divided by `ratio`; its links are as fast as before."""
    rates = ("bf16_tflops", "fp32_tflops", "tf32_tflops", "bandwidth_gbs")
    return replace(gpu, **{name: rate / ratio for name in rates if (rate := getattr(gpu, name))})


def _shape(record: dict[str, str]) -> ModelShape | None:
    mpt = next(
        (shape for size, shape in MPT_SHAPES.items() if f"-{size}-" in record["id"] and "mosaic" in record["id"]), None
    )
    if mpt:
        layers, heads, width = mpt
        return ModelShape(layers, heads, width, int(float(record["block_size"])), MPT_VOCAB)
    keys = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "micro_batch")
    if not all(record[key] for key in keys):
        return None
    n = {key: int(float(record[key])) for key in keys}
    return ModelShape(n["n_layer"], n["n_head"], n["n_embd"], n["block_size"], n["vocab_size"])


def _logits(record: dict[str, str]) -> str:
    """nanoGPT's loop writes `logits, loss = model(X, Y)`; the speedruns' models return none. torch 2.6 began to reuse them."""
    if re.match("nanoGPT|build-nanogpt", record["codebase"]):
        return "returned"
    return "kept" if "torch 2.5" in record["notes"] else "replaced"


def _memory_kind(record: dict[str, str]) -> str | None:
    if "nanochat" in record["codebase"] or "parameter-golf" in record["codebase"]:
        return None  # another architecture; see block_bytes_modern in docs/formulas.md
    if "max_memory_allocated" in record["notes"].replace("not max_allocated", "") or "probe" in record["id"]:
        return "allocated"
    return "device" if "nvidia-smi" in record["notes"] else None


def _verdict(record: dict[str, str]) -> str | None:
    if "oom" in record["id"]:
        return "oom"
    return "fits" if record["tokens_per_s"] or record["peak_vram_mib"] else None
