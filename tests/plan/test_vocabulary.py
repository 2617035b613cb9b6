"""A vocabulary as a choice: what the law says of it, and what is measured of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from gptfit.data.train_bpe import measure_vocabularies, train_tokenizer
from gptfit.plan.loss import law_parameters
from gptfit.shape import ModelShape

# Own vocabularies on FineWeb as shares of GPT-2's 4.65 bytes per token.
FINEWEB_SHARES = {8192: 0.88, 16384: 0.95}


@pytest.mark.parametrize(
    ("layers", "width", "vocabulary", "published"), [(6, 384, 8192, 1.8), (8, 512, 8192, 1.4), (12, 768, 16384, 1.13)]
)
def test_a_smaller_vocabulary_saves_the_published_flops_per_character(
    layers: int, width: int, vocabulary: int, published: float
) -> None:
    usual = ModelShape(layers, 1, width, 1024, 50304, arch="modern")
    own = replace(usual, vocab_size=vocabulary)
    saved = usual.flops_per_token / (own.flops_per_token / FINEWEB_SHARES[vocabulary])
    assert saved == pytest.approx(published, rel=0.12)
    assert law_parameters(own) == law_parameters(usual) == usual.tied_parameters


def test_one_vocabulary_learned_says_what_every_smaller_one_would(shared: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    source = str(tmp_path / "pages.parquet")
    pages = pq.read_table(shared / "data" / "web_usgov.parquet", columns=["text"]).column("text")
    pq.write_table(pa.table({"text": pc.utf8_slice_codeunits(pages, 0, 500)}), source)
    assert 32768 not in measure_vocabularies([source], (512, 32768), sample_bytes=200_000), "too little text for it"
    told: list[int] = []
    shares = measure_vocabularies(
        [source], (512, 1024), sample_bytes=10**9, on_progress=lambda done, _: told.append(done)
    )
    assert told == sorted(told), "never backwards"
    assert (told[0], told[-1]) == (0, 1000)
    assert shares[512] < shares[1024] < 1
    trained = train_tokenizer([source], tmp_path / "own.json", 512)
    assert shares[512] == pytest.approx(trained.bytes_per_token / trained.gpt2_bytes_per_token, rel=0.03)
