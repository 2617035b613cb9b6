"""Train a BPE vocabulary of one's own: byte-level, GPT-2's word pattern, written as a tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptfit.data.bins import write_file
from gptfit.data.documents import DocumentBatch, plain_reading, read_unit
from gptfit.data.parquet import OpenFiles
from gptfit.data.sources import Source, find_sources
from gptfit.data.tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer
from gptfit.data.work import Span, Unit, source_spans
from gptfit.errors import DataError, UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Trainable

LEAST_VOCABULARY = 257  # every byte and end-of-text
DEFAULT_SAMPLE_BYTES = 256 * 2**20  # merges hardly change beyond this, and training time grows with it
QUICK_SAMPLE_BYTES = 8 * 2**20  # for a comparison of sizes: within 2 % of what all of the web files say


@dataclass(frozen=True)
class TrainedTokenizer:
    """The new vocabulary, how much text it saw, and how it compares with GPT-2's on text it did not see."""

    path: Path
    tokenizer: Tokenizer
    trained_on_bytes: int
    bytes_per_token: float
    gpt2_bytes_per_token: float


def train_tokenizer(
    sources: Sequence[str], out: Path, vocab_size: int, column: str = "text", sample_bytes: int = DEFAULT_SAMPLE_BYTES
) -> TrainedTokenizer:
    """A BPE of `vocab_size` entries from up to `sample_bytes` of text, spread over all sources."""
    if vocab_size < LEAST_VOCABULARY:
        raise UsageError(f"--vocab-size {vocab_size} is less than {LEAST_VOCABULARY}: all bytes and end-of-text")
    sampler = _Sampler(find_sources(sources), column, sample_bytes)
    model = _learn(sampler, vocab_size, sources)
    if model.get_vocab_size() < vocab_size:
        raise DataError(
            f"{', '.join(sources)}: only {model.get_vocab_size()} entries can be learned from this much text",
            fix=f"use --vocab-size {model.get_vocab_size()} or more text",
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_file(out, model.to_str(pretty=False).encode())
    tokenizer = load_tokenizer(out)
    own, gpt2 = (_bytes_per_token(which, sampler.held_out) for which in (tokenizer, load_tokenizer("gpt2")))
    return TrainedTokenizer(out, tokenizer, sampler.seen_bytes, own, gpt2)


def measure_vocabularies(
    sources: Sequence[str], sizes: Sequence[int], column: str = "text", sample_bytes: int = QUICK_SAMPLE_BYTES
) -> dict[int, float]:
    """Bytes per token of vocabularies of these sizes, as a share of GPT-2's on the same text, which none has seen.

    One is learned, the largest: a smaller one is its first merges. Sizes that the text is too short for are missing.
    """
    sampler = _Sampler(find_sources(sources), column, sample_bytes, is_even=True)
    learned = json.loads(_learn(sampler, max(sizes), sources).to_str())  # says which extra it needs
    from tokenizers import Tokenizer as Trainable

    gpt2_tokens, shares = len(load_tokenizer("gpt2").encoder.encode_batch(sampler.held_out)[0]), {}
    for size in sorted(size for size in sizes if size <= len(learned["model"]["vocab"])):
        encoded = Trainable.from_str(json.dumps(_cut(learned, size))).encode_batch_fast(sampler.held_out)
        if n_tokens := sum(len(one.ids) for one in encoded):
            shares[size] = gpt2_tokens / n_tokens
    return shares


def _cut(learned: dict[str, Any], size: int) -> dict[str, Any]:
    """The same tokenizer with its first `size` entries."""
    vocab = {piece: number for piece, number in learned["model"]["vocab"].items() if number < size}
    merges = learned["model"]["merges"][: size - LEAST_VOCABULARY]
    return {**learned, "model": {**learned["model"], "vocab": vocab, "merges": merges}}


def _learn(sampler: _Sampler, vocab_size: int, sources: Sequence[str]) -> Trainable:
    try:
        from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
        from tokenizers import Tokenizer as Trainable
    except ImportError:
        raise DataError("training a tokenizer needs an extra", fix="pip install 'gptfit[hf]'") from None
    model = Trainable(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(END_OF_TEXT, special=True)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(sampler.training_texts(), trainer)
    if sampler.seen_bytes == 0:
        raise DataError(f"no documents in {', '.join(sources)}", fix="nothing to learn from")
    return model


class _Sampler:
    """Texts from all over the sources until enough; every twentieth hundred is held out to judge the result.

    In a small sample it is every fourth ten: of a twentieth of it, one table of numbers would be most.
    """

    HELD_OUT = (100, 20)  # texts at a time, of which one in so many
    HELD_OUT_SMALL = (10, 4)

    def __init__(self, sources: Sequence[Source], column: str, sample_bytes: int, is_even: bool = False) -> None:
        self._sources = sources
        self._is_even = is_even  # equally much from every part: a small sample of the whole, not all of a few parts
        self._column = column
        self._sample_bytes = sample_bytes
        self.seen_bytes = 0
        self.held_out: list[str] = []

    def training_texts(self) -> Iterator[list[str]]:
        reading = plain_reading(self._sources, self._column)
        number = 0
        size, every = self.HELD_OUT_SMALL if self._is_even else self.HELD_OUT
        spans = self._spread()
        with closing(OpenFiles()) as files:
            for place, span in enumerate(spans):
                enough = self._sample_bytes * (place + 1) / len(spans) if self._is_even else self._sample_bytes
                with closing(read_unit(reading, Unit(0, (span,)), files)) as batches:
                    for texts in _parts(batches, size):
                        number += 1
                        if number % every == 0:
                            self.held_out += texts
                            continue
                        self.seen_bytes += sum(len(text.encode("utf-8")) for text in texts)
                        yield texts
                        if self.seen_bytes >= enough:
                            break
                if self.seen_bytes >= self._sample_bytes:
                    return

    def _spread(self) -> list[Span]:
        """Spans in an order that visits all parts of the sources early: 0, half, quarter, three quarters, ..."""
        spans = [span for i, source in enumerate(self._sources) for span in source_spans(source, i, self._column)]
        width = max(1, (len(spans) - 1).bit_length())
        order = sorted(range(2**width), key=lambda i: int(f"{i:0{width}b}"[::-1], 2))
        return [spans[i] for i in order if i < len(spans)]


def _parts(batches: Iterator[DocumentBatch], size: int) -> Iterator[list[str]]:
    """So many texts at a time."""
    for batch in batches:
        yield from (batch.texts[start : start + size] for start in range(0, len(batch.texts), size))


def _bytes_per_token(tokenizer: Tokenizer, texts: list[str]) -> float:
    if not texts:
        return float("nan")
    ids, _ = tokenizer.encoder.encode_batch(texts)
    return sum(len(text.encode("utf-8")) for text in texts) / max(1, len(ids))
