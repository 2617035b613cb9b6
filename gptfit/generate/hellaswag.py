"""HellaSwag in completion style: which of the endings does the model find likeliest?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

from gptfit.checkpoint.loaded_model import LoadedModel
from gptfit.errors import DataError
from gptfit.generate.score import score_continuations


@dataclass(frozen=True)
class Item:
    """A beginning, its endings, and the index of the true one."""

    context: str
    endings: tuple[str, ...]
    label: int


@dataclass(frozen=True)
class Accuracy:
    """`accuracy` by the sum of log-probabilities, `normalised` by their mean per token."""

    items: int
    accuracy: float
    normalised: float

    @property
    def standard_error(self) -> float:
        return sqrt(self.normalised * (1 - self.normalised) / self.items)


def read_items(path: str | Path) -> list[Item]:
    """HellaSwag's own jsonl: `ctx`, `endings` and `label` in each line."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})", fix="give HellaSwag's jsonl file") from None
    items = list(_parse(lines, path))
    if not items:
        raise DataError(f"{path}: holds no question", fix="give HellaSwag's jsonl file")
    return items


def _parse(lines: list[str], path: Path) -> Iterator[Item]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            item = Item(str(row["ctx"]), tuple(str(ending) for ending in row["endings"]), int(row["label"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}:{number}: not a question with ctx, endings and label ({error!r})") from None
        if len(item.endings) < 2 or not 0 <= item.label < len(item.endings) or not item.context:
            raise DataError(f"{path}:{number}: needs a ctx, two endings or more, and the label of one of them")
        yield item


def hellaswag(opened: LoadedModel, items: list[Item], progress: Callable[[int, int], None] | None = None) -> Accuracy:
    """An ending is tokenized after a space, as in the reference evaluation of GPT-2's 0.2859 and 0.2955."""
    encode = opened.tokenizer.encode
    by_sum = by_mean = 0
    for done, item in enumerate(items, start=1):
        endings = [encode(f" {ending}") for ending in item.endings]
        scores = score_continuations(opened.model, encode(item.context), endings)
        by_sum += _best([score.log_p for score in scores]) == item.label
        by_mean += _best([score.mean for score in scores]) == item.label
        if progress:
            progress(done, len(items))
    return Accuracy(len(items), by_sum / len(items), by_mean / len(items))


def _best(values: list[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)
