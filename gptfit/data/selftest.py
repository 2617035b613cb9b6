"""Self-test of a GPT-2 engine before it may write a file: a fixed sample against a stored hash."""

from __future__ import annotations

import hashlib

from gptfit.data.encoders import Encoder
from gptfit.errors import DataError

# Every branch of GPT-2's word pattern, several scripts, long runs, and the special token spelled out.
SAMPLE = (
    "Hello world",
    "I'll say it's 'quoted', they've won 1234567890 times; don't: x=42.5e-3!",
    "def f(x):\n    return x ** 2\n\n\n\tif y:  \r\n  trailing  ",
    "naïve café — “curly” … 漢字かな交じり文 Привет мир שלום مرحبا हिन्दी",
    "\U0001f600\U0001f469\u200d\U0001f52c e\u0301 \x00\x1f\x7f\u00a0\u2003\u3000\ufeff",
    "<|endoftext|> is text here, <|endoftext|>",
    "a" * 500 + " " * 700 + "b" + "\n" * 300,
    "",
)
# sha256 of the ids as little-endian uint32 and then the ends as int64, made with tiktoken 0.14.0.
EXPECTED = "22cc504ae54dbf476ce0e3c2a22b817fcc7bfefc1198001ac546b5d8ec476210"


def check_gpt2(encoder: Encoder) -> None:
    """Raises DataError when the engine's ids differ from GPT-2's."""
    if sample_hash(encoder) != EXPECTED:
        raise DataError(f"{encoder.engine} failed its self-test: its tokens are not GPT-2's")


def sample_hash(encoder: Encoder) -> str:
    ids, ends = encoder.encode_batch(SAMPLE)
    return hashlib.sha256(ids.astype("<u4").tobytes() + ends.astype("<i8").tobytes()).hexdigest()
