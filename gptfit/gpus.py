"""GPU: one row per card of gpus.csv, found by what torch, nvidia-smi or a person calls it."""

from __future__ import annotations

import csv
import difflib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gptfit.errors import DeviceError

TABLE = Path(__file__).with_name("gpus.csv")
# nanoGPT's estimate_mfu divides by this whatever the card is: the bf16 peak of an A100.
NANOGPT_PEAK_TFLOPS = 312.0


@dataclass(frozen=True)
class GPU:
    """A card's data sheet. `None` means no reliable figure exists; `source` and `confidence` say how good one is."""

    name: str
    compute_capability: str  # '8.9' for NVIDIA; 'mps' and 'gfx…' name the others
    vram_gib: float
    bandwidth_gbs: float
    bf16_tflops: float | None  # dense bf16 (fp16 where the card has no bf16) with fp32 accumulation
    fp32_tflops: float | None
    tf32_tflops: float | None
    has_bf16: bool
    source: str
    confidence: str  # high | medium | low
    measured_low_tflops: float | None  # published matmul rates of real cards
    measured_high_tflops: float | None
    measured_dtype: str
    measured_source: str
    board_watts: float | None = None  # power limit as sold; None for laptop cards, whose maker sets it

    @property
    def is_laptop(self) -> bool:
        return "Laptop" in self.name

    @property
    def is_geforce(self) -> bool:
        return bool(re.match(r"(GTX|RTX) \d{4}(?!.* Ada)", self.name))

    @property
    def is_nvidia(self) -> bool:
        return self.compute_capability[0].isdigit()


@cache
def all_gpus() -> tuple[GPU, ...]:
    """The whole table, in file order."""
    with TABLE.open(encoding="utf-8") as file:
        return tuple(_row(row) for row in csv.DictReader(file))


def find(name: str, vram_gib: float | None = None) -> GPU:
    """The one card meant by `name`; a card sold with several memory sizes needs the size, or is the smallest.

    >>> find("NVIDIA GeForce RTX 4070").name, find("4070 ti super").name
    ('RTX 4070 12GB', 'RTX 4070 Ti SUPER 16GB')
    """
    wanted = _parse(name)
    matches = [gpu for gpu in all_gpus() if wanted.matches(_parse(gpu.name), gpu)]
    if vram_gib is not None:
        # Drivers report a little less than the box says: 11.6 for 12.
        matches = [gpu for gpu in matches if 0.85 <= vram_gib / gpu.vram_gib <= 1.05] or matches
    if not matches:
        raise DeviceError(f"GPU {name!r} is not in the table{_nearest(name)}", fix="`gptfit gpus` shows it")
    # The smallest memory never promises what does not fit; among equals the fastest is the common one (H100 SXM).
    return min(matches, key=lambda gpu: (gpu.vram_gib, -gpu.bandwidth_gbs))


def find_or_none(name: str, vram_gib: float | None = None) -> GPU | None:
    try:
        return find(name, vram_gib)
    except DeviceError:
        return None


@dataclass(frozen=True)
class _Name:
    """A card's name in parts. Two names mean one card when the model words are equal and nothing else contradicts."""

    words: frozenset[str]  # what makes it this card and no sibling: {'4070', 'ti'}
    series: frozenset[str]  # rtx, gtx: often left out
    form: frozenset[str]  # sxm, pcie: often left out
    memory_gb: int | None

    def matches(self, row: _Name, gpu: GPU) -> bool:
        return (
            self.words == row.words
            and bool(self.words)
            and _agree(self.series, row.series)
            and _agree(self.form, row.form)
            and self.memory_gb in (None, round(gpu.vram_gib))
        )


def _agree(left: frozenset[str], right: frozenset[str]) -> bool:
    return not left or not right or bool(left & right)


_NOISE = frozenset(
    [
        "nvidia",
        "geforce",
        "gpu",
        "tesla",
        "quadro",
        "graphics",
        "amd",
        "radeon",
        "instinct",
        "apple",
        "generation",
        "edition",
        "blackwell",
        "gb",
    ]
)
_SERIES = frozenset(("rtx", "gtx"))
_SAME = {
    "mobile": "laptop",
    "workstation": "ws",
    "sxm2": "sxm",
    "sxm3": "sxm",
    "sxm4": "sxm",
    "sxm5": "sxm",
    "hbm3": "sxm",  # torch calls an H100 SXM "NVIDIA H100 80GB HBM3"
}
_FORM = frozenset(("sxm", "pcie", "nvl", "ws"))


def _parse(name: str) -> _Name:
    text = re.sub(r"\(.*?\)", " ", name.lower()).replace("max-q", "maxq")
    # Two sizes at once ("8/16GB") are no size; a GH200's name carries its CPU memory.
    text = re.sub(r"\b(\d+/\d+ ?gb|480gb)\b", " ", text)
    memory = re.search(r"\b(\d+) ?(?:gb|gib)\b", text)
    if memory:
        text = text.replace(memory[0], " ")
    text = re.sub(r"\b(rtx|gtx)(?=\d)", r"\1 ", text)
    text = re.sub(r"\b(\d{4})(ti|super|laptop|d)(super)?\b", r"\1 \2 \3", text)
    words = {_SAME.get(word, word) for word in re.findall(r"[a-z0-9]+", text)} - _NOISE
    return _Name(
        words=frozenset(words - _SERIES - _FORM),
        series=frozenset(words & _SERIES),
        form=frozenset(words & _FORM),
        memory_gb=int(memory[1]) if memory else None,
    )


def _nearest(name: str) -> str:
    """Names that share a model word or look alike; first those with the memory asked for."""
    wanted = _parse(name)
    shared = [gpu for gpu in all_gpus() if wanted.words & _parse(gpu.name).words - {"ti", "super", "laptop"}]
    shared.sort(key=lambda gpu: round(gpu.vram_gib) != wanted.memory_gb)
    # People type 4070 and not RTX 4070 12GB, and mistype it as 4O70.
    said = {gpu.name.lower(): gpu.name for gpu in all_gpus()}
    said |= {re.sub(r"\b(rtx|gtx|\d+gb)\b", "", long): card for long, card in said.items()}
    plain = {re.sub(r"[^a-z0-9]", "", words): card for words, card in said.items()}
    alike = difflib.get_close_matches(re.sub(r"[^a-z0-9]", "", name.lower()), plain, n=3, cutoff=0.5)
    names = list(dict.fromkeys([gpu.name for gpu in shared[:4]] + [plain[a] for a in alike]))[:4]
    return f"; nearest: {', '.join(names)}" if names else ""


def _row(row: dict[str, str]) -> GPU:
    def number(key: str) -> float | None:
        return float(row[key]) if row[key] else None

    return GPU(
        name=row["name"],
        compute_capability=row["compute_capability"],
        vram_gib=float(row["vram_gib"]),
        bandwidth_gbs=float(row["bandwidth_gbs"]),
        bf16_tflops=number("bf16_tflops"),
        fp32_tflops=number("fp32_tflops"),
        tf32_tflops=number("tf32_tflops"),
        has_bf16=row["has_bf16"] == "yes",
        source=row["source"],
        confidence=row["confidence"],
        measured_low_tflops=number("measured_low_tflops"),
        measured_high_tflops=number("measured_high_tflops"),
        measured_dtype=row["measured_dtype"],
        measured_source=row["measured_source"],
        board_watts=number("board_watts"),
    )
