"""Measuring without preparing: exact where the file says so truly, a range that holds where it does not."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gptfit.data import measure
from gptfit.data.measure import measure_parquet
from gptfit.data.tokenizer import load_tokenizer
from gptfit.errors import DataError

from .conftest import WriteParquet, stories


@pytest.mark.parametrize(("name", "tokens"), [("web_usgov", 3_040_131), ("web_mdn", 14_698_118)])
def test_a_true_token_count_column_is_summed_and_without_it_the_range_holds(
    shared: Path, tmp_path: Path, name: str, tokens: int
) -> None:
    source = shared / "data" / f"{name}.parquet"
    found = measure_parquet(source)
    assert (found.tokens.value, found.tokens.basis) == (tokens, "exact")
    pq.write_table(pq.read_table(source, columns=["text"]), tmp_path / "a.parquet", row_group_size=500)
    guess = measure_parquet(tmp_path / "a.parquet")
    assert guess.tokens.basis == "measured"
    assert guess.tokens.low <= tokens <= guess.tokens.high
    assert guess.tokens.high - guess.tokens.low < 0.2 * tokens
    assert guess.rows == found.rows


def test_a_token_count_of_another_tokenizer_is_not_believed(tmp_path: Path) -> None:
    texts = stories(50)
    pq.write_table(
        pa.table({"text": texts, "token_count": [len(text.split()) for text in texts]}), tmp_path / "a.parquet"
    )
    encode = load_tokenizer("gpt2").encode
    found = measure_parquet(tmp_path / "a.parquet")
    assert found.tokens.value == sum(len(encode(text)) + 1 for text in texts)  # small enough to be counted whole
    assert found.tokens.basis == "exact"
    assert found.text_bytes == sum(len(text.encode()) for text in texts)


def test_repeated_texts_in_one_dictionary_are_not_undercounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SAMPLE_BYTES", 5000)
    texts = stories(4, words=100) * 500
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    found = measure_parquet(tmp_path / "a.parquet")
    truth = sum(len(text.encode()) for text in texts)
    assert abs(found.text_bytes / truth - 1) < 0.1


def test_a_file_without_rows_or_text_is_one_line(parquet: WriteParquet) -> None:
    with pytest.raises(DataError, match="has no rows"):
        measure_parquet(parquet("a.parquet", [], kind=pa.string()))
    with pytest.raises(DataError, match="has no column 'text'; it has body, n"):
        measure_parquet(parquet("b.parquet", ["x"], column="body"))
    with pytest.raises(DataError, match="no such file"):
        measure_parquet("nowhere.parquet")
