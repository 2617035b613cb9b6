"""Train a BPE vocabulary of one's own: byte-level, GPT-2's word pattern, written as a tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from gptfit.data.bins import write_file
from gptfit.data.documents import read_unit
from gptfit.data.forecast import plain_reading, source_spans
from gptfit.data.parquet import OpenFiles
from gptfit.data.sources import Source, find_sources
from gptfit.data.tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer
from gptfit.data.work import Span, Unit
from gptfit.errors import DataError, UsageError

LEAST_VOCABULARY = 257  # every byte and end-of-text
DEFAULT_SAMPLE_BYTES = 256 * 2**20  # merges hardly change beyond this, and training time grows with it


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
    try:
        from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
        from tokenizers import Tokenizer as Trainable
    except ImportError:
        raise DataError("training a tokenizer needs an extra; pip install 'gptfit[hf]'") from None
    found = find_sources(sources)
    sampler = _Sampler(found, column, sample_bytes)
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
        raise DataError(f"no documents in {', '.join(sources)}; nothing to learn from")
    if model.get_vocab_size() < vocab_size:
        raise DataError(
            f"{', '.join(sources)}: only {model.get_vocab_size()} entries can be learned from this much text; "
            f"use --vocab-size {model.get_vocab_size()} or more text"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_file(out, model.to_str(pretty=False).encode())
    tokenizer = load_tokenizer(out)
    own, gpt2 = (_bytes_per_token(which, sampler.held_out) for which in (tokenizer, load_tokenizer("gpt2")))
    return TrainedTokenizer(out, tokenizer, sampler.seen_bytes, own, gpt2)


class _Sampler:
    """Texts from all over the sources until enough; every twentieth hundred is held out to judge the result."""

    HELD_OUT_EVERY = 20

    def __init__(self, sources: Sequence[Source], column: str, sample_bytes: int) -> None:
        self._sources = sources
        self._column = column
        self._sample_bytes = sample_bytes
        self.seen_bytes = 0
        self.held_out: list[str] = []

    def training_texts(self) -> Iterator[list[str]]:
        reading = plain_reading(self._sources, self._column)
        number = 0
        with closing(OpenFiles()) as files:
            for span in self._spread():
                with closing(read_unit(reading, Unit(0, (span,)), files)) as batches:
                    for batch in batches:
                        for start in range(0, len(batch.texts), 100):
                            texts = batch.texts[start : start + 100]
                            number += 1
                            if number % self.HELD_OUT_EVERY == 0:
                                self.held_out += texts
                                continue
                            self.seen_bytes += sum(len(text.encode("utf-8")) for text in texts)
                            yield texts
                        if self.seen_bytes >= self._sample_bytes:
                            return

    def _spread(self) -> list[Span]:
        """Spans in an order that visits all parts of the sources early: 0, half, quarter, three quarters, ..."""
        spans = [span for i, source in enumerate(self._sources) for span in source_spans(source, i, self._column)]
        width = max(1, (len(spans) - 1).bit_length())
        order = sorted(range(2**width), key=lambda i: int(f"{i:0{width}b}"[::-1], 2))
        return [spans[i] for i in order if i < len(spans)]


def _bytes_per_token(tokenizer: Tokenizer, texts: list[str]) -> float:
    if not texts:
        return float("nan")
    ids, _ = tokenizer.encoder.encode_batch(texts)
    return sum(len(text.encode("utf-8")) for text in texts) / max(1, len(ids))
