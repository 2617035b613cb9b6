"""Train a BPE vocabulary of one's own: byte-level, GPT-2's word pattern, written as a tokenizer.json."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import takewhile
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

OnProgress = Callable[[int, int], None]  # parts done, of so many
LEAST_VOCABULARY = 257  # every byte and end-of-text
DEFAULT_SAMPLE_BYTES = 256 * 2**20  # merges hardly change beyond this, and training time grows with it
READING_SHARE = 0.5  # of the time that comparing sizes takes
# The trainer's time grows with the square of a word, and no language has words of this many bytes: a longer run (a table's
# blanks, a line of dashes) is cut, so that what is learned from text is what it was.
LONGEST_WORD = 1000
SIGNAL_SECONDS = 0.2  # until a Ctrl-C is noticed
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
    sources: Sequence[str],
    out: Path,
    vocab_size: int,
    column: str = "text",
    sample_bytes: int = DEFAULT_SAMPLE_BYTES,
    on_progress: OnProgress = lambda done, total: None,
) -> TrainedTokenizer:
    """A BPE of `vocab_size` entries from up to `sample_bytes` of text, spread over all sources."""
    if vocab_size < LEAST_VOCABULARY:
        raise UsageError(f"--vocab-size {vocab_size} is less than {LEAST_VOCABULARY}: all bytes and end-of-text")
    if sample_bytes < 1:
        raise UsageError(f"--sample-mib {sample_bytes // 2**20} leaves nothing to learn from", fix="give 1 or more")
    sampler = _Sampler(find_sources(sources), column, sample_bytes, on_progress=on_progress)
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
    sources: Sequence[str],
    sizes: Sequence[int],
    column: str = "text",
    sample_bytes: int = QUICK_SAMPLE_BYTES,
    on_progress: OnProgress = lambda done, total: None,
) -> dict[int, float]:
    """Bytes per token of vocabularies of these sizes, as a share of GPT-2's on the same text, which none has seen.

    One is learned, the largest: a smaller one is its first merges. Sizes that the text is too short for are missing.
    """

    def on_read(done: int, total: int) -> None:
        on_progress(int(READING_SHARE * 1000 * done / total), 1000)

    sampler = _Sampler(find_sources(sources), column, sample_bytes, is_even=True, on_progress=on_read)
    learned = json.loads(_learn(sampler, max(sizes), sources).to_str())  # says which extra it needs
    from tokenizers import Tokenizer as Trainable

    gpt2_tokens, shares = len(load_tokenizer("gpt2").encoder.encode_batch(sampler.held_out)[0]), {}
    possible = sorted(size for size in sizes if size <= len(learned["model"]["vocab"]))
    for place, size in enumerate(possible):
        on_progress(int(1000 * (READING_SHARE + (1 - READING_SHARE) * place / len(possible))), 1000)
        encoded = Trainable.from_str(json.dumps(_cut(learned, size))).encode_batch_fast(sampler.held_out)
        if n_tokens := sum(len(one.ids) for one in encoded):
            shares[size] = gpt2_tokens / n_tokens
    on_progress(1000, 1000)
    return shares


def _cut(learned: dict[str, Any], size: int) -> dict[str, Any]:
    """The same tokenizer with its first `size` entries."""
    vocab = {piece: number for piece, number in learned["model"]["vocab"].items() if number < size}
    merges = learned["model"]["merges"][: size - LEAST_VOCABULARY]
    return {**learned, "model": {**learned["model"], "vocab": vocab, "merges": merges}}


def _learn(sampler: _Sampler, vocab_size: int, sources: Sequence[str]) -> Trainable:
    try:
        from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
        from tokenizers import Tokenizer as Trainable
    except ImportError:
        raise DataError("training a tokenizer needs an extra", fix="pip install 'gptfit[hf]'") from None
    model = Trainable(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces = pre_tokenizers.Split(Regex(f".{{1,{LONGEST_WORD}}}"), "isolated")  # of a word, where a byte is a character
    model.pre_tokenizer = pre_tokenizers.Sequence([words, pieces])
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(END_OF_TEXT, special=True)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    _train_beside(lambda texts: model.train_from_iterator(texts, trainer), sampler.training_texts())
    model.pre_tokenizer = words
    if sampler.seen_bytes == 0:
        raise DataError(f"no documents in {', '.join(sources)}", fix="nothing to learn from")
    return model


def _train_beside(train: Callable[[Iterator[list[str]]], None], texts: Iterator[list[str]]) -> None:
    """In a thread of its own: the trainer hears no Ctrl-C for as long as it merges, and whoever waits for it does."""
    is_stopped = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            train(takewhile(lambda _: not is_stopped.is_set(), texts))
        except BaseException as error:  # noqa: BLE001 - raised again by the one who waits
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)  # the program ends without it
    thread.start()
    try:
        while thread.is_alive():
            thread.join(SIGNAL_SECONDS)
    except KeyboardInterrupt:
        is_stopped.set()
        thread.join(SIGNAL_SECONDS)  # a thread that is still reading should be out of Python when the program ends
        raise
    if failed:
        raise failed[0]


class _Sampler:
    """Texts from all over the sources until enough; every twentieth hundred is held out to judge the result.

    In a small sample it is every fourth ten: of a twentieth of it, one table of numbers would be most.
    """

    HELD_OUT = (100, 20)  # texts at a time, of which one in so many
    HELD_OUT_SMALL = (10, 4)

    def __init__(
        self,
        sources: Sequence[Source],
        column: str,
        sample_bytes: int,
        is_even: bool = False,
        on_progress: OnProgress = lambda done, total: None,
    ) -> None:
        self._on_progress = on_progress
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
                self._tell(place, len(spans))
                enough = self._sample_bytes * (place + 1) / len(spans) if self._is_even else self._sample_bytes
                with closing(read_unit(reading, Unit(0, (span,)), files)) as batches:
                    for texts in _parts(batches, size):
                        number += 1
                        if number % every == 0:
                            self.held_out += texts
                            continue
                        self.seen_bytes += sum(len(text.encode("utf-8")) for text in texts)
                        yield texts
                        self._tell(place, len(spans))
                        if self.seen_bytes >= enough:
                            break
                if self.seen_bytes >= self._sample_bytes:
                    break
        self._on_progress(1000, 1000)

    def _tell(self, place: int, n_spans: int) -> None:
        """Whichever ends first: all sources read, or enough of them."""
        share = max(place / n_spans, self.seen_bytes / self._sample_bytes)
        self._on_progress(min(999, int(1000 * share)), 1000)

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
