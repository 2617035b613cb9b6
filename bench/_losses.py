"""The published losses of tests/losses.csv beside what gptfit predicts for them."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from gptfit.estimate import Estimate
from gptfit.plan import loss
from gptfit.shape import ModelShape

LOSSES = Path(__file__).resolve().parent.parent / "tests" / "losses.csv"
NANOCHAT = LOSSES.with_name("losses_nanochat.csv")  # one recipe, with value tables
NANOCHAT_WIDTHS = {"d12": 768, "d20": 1280}
# nanochat's layers by the parameters of its iso-FLOP optima and of d26; 64 channels per layer, 32,768 entries.
ISO_FLOP_LAYERS = {110_700_000: 12, 167_800_000: 14, 250_650_000: 16, 381_760_000: 19, 918_000_000: 26}
ISO_FLOP_VOCABULARY = 32_768

# Points that are no run of a known recipe: zero-shot evaluations, disputed counts, bugs, extra embedding tables.
UNUSABLE = ("zero-shot", "reproduction (blog)", "locuslab", "speedrun", "modded Muon", "@400k", "May 2024", "FGPT")
MODERN = {"modern arch Adam": ("modern", "adamw"), "modern arch Muon": ("modern", "muon"), "Muon (record 4)": ("modern", "muon"),
          "track-3 simple Adam": ("modern", "adamw"), "track-3 simple Muon": ("modern", "muon"),
          "track-3 tuned Muon": ("modern", "muon"), "1.5B Muon": ("gpt2", "muon"), "1.5B Muon 7.5B tok": ("gpt2", "muon")}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One published final loss."""

    name: str
    dataset: str
    kind: str | None
    tokenizer: str
    parameters: float
    tokens: float
    unique_tokens: float
    val_loss: float
    use: str
    arch: str
    optimizer: str
    value_tables: int = 0

    @property
    def modern(self) -> bool:
        return self.name in MODERN or bool(self.value_tables)

    @property
    def scored(self) -> bool:
        """GPT-2 BPE on FineWeb, FineWeb-Edu or OpenWebText with the plain recipe."""
        return self.tokenizer.startswith("gpt2") and self.kind is not None and not self.modern

    @property
    def is_iso_flop(self) -> bool:
        return bool(self.value_tables) and self.kind == "fineweb-edu"

    @property
    def shape_only(self) -> bool:
        return self.name.startswith("Gadre") and "x0.25" not in self.name and self.parameters >= 30e6

    @property
    def predicted(self) -> Estimate:
        answer = loss.predict(
            round(self.parameters),
            self.tokens,
            self.unique_tokens,
            self.dataset,
            self.arch,
            self.optimizer,
            value_tables=self.value_tables,
        )
        assert answer is not None
        return answer.loss

    @property
    def inside(self) -> bool:
        return self.predicted.low <= self.val_loss <= self.predicted.high

    @property
    def law_error(self) -> float:
        recipe = self.arch, self.optimizer, self.value_tables
        return self.val_loss - loss.recipe_loss(self.parameters, self.tokens, self.unique_tokens, *recipe)

    @property
    def inside_left_out(self) -> bool:
        """The same with the data set's offset taken from its other points alone, where it has any."""
        others = [
            p.law_error for p in read() if p.kind == self.kind and p.name != self.name and (p.scored or p.shape_only)
        ]
        offset = sum(others) / len(others) if others else loss.UNKNOWN_OFFSET
        below, above = self.predicted.value - self.predicted.low, self.predicted.high - self.predicted.value
        return -below <= self.law_error - offset <= above


def read(path: Path = LOSSES) -> list[Point]:
    points = []
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if not row["tokens_seen"] or any(word in row["name"] for word in UNUSABLE):
                continue
            arch, optimizer = MODERN.get(row["name"], ("gpt2", "adamw"))
            dataset = row["dataset"]
            if not (row["tokenizer"].startswith("gpt2") or row["name"].startswith("Gadre")):
                continue
            tokens = float(row["tokens_seen"])
            points.append(
                Point(
                    name=row["name"],
                    dataset=dataset,
                    kind=loss.dataset_kind(dataset),
                    tokenizer=row["tokenizer"],
                    parameters=float(row["params_tied_equiv"]),
                    tokens=tokens,
                    unique_tokens=float(row["unique_tokens"] or tokens),
                    val_loss=float(row["val_loss_nats"]),
                    use=row["use_in_fit"],
                    arch=arch,
                    optimizer=optimizer,
                )
            )
    return points


def read_nanochat(path: Path = NANOCHAT) -> list[Point]:
    """All of one recipe: what is neither tied weights nor the one untied embedding is value tables."""
    points = []
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            tokens, parameters = float(row["tokens_seen"]), float(row["params_tied_equiv"])
            embedding = 50_304 * NANOCHAT_WIDTHS[row["name"].split()[1]]
            tables = round(float(row["params_total"]) - parameters - embedding)
            kind, val_loss = loss.dataset_kind(row["dataset"]), float(row["val_loss_nats"])
            given = (row["name"], row["dataset"], kind, row["tokenizer"], parameters, tokens, tokens, val_loss)
            points.append(Point(*given, use=row["use_in_fit"], arch="modern", optimizer="muon", value_tables=tables))
    return points


def read_iso_flop(path: Path = LOSSES) -> list[Point]:
    """nanochat on FineWeb-Edu in its own vocabulary, whose losses are given per GPT-2 token."""
    points = []
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            layers = ISO_FLOP_LAYERS.get(round(float(row["params_tied_equiv"] or 0)))
            if not row["name"].startswith("nanochat") or layers is None:
                continue
            shape = ModelShape(
                layers, 1, 64 * layers, 2048, ISO_FLOP_VOCABULARY, arch="modern", value_embeddings="tables"
            )
            tokens, parameters = float(row["tokens_seen"]), loss.law_parameters(shape)
            kind, val_loss = loss.dataset_kind(row["dataset"]), float(row["val_loss_nats"])
            given = (row["name"], row["dataset"], kind, row["tokenizer"], parameters, tokens, tokens, val_loss)
            points.append(Point(*given, "no", "modern", "muon", shape.value_tables))
    return points
