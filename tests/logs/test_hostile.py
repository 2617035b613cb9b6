"""Logs nobody meant: every one is either read or refused in one line, never a traceback."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gptfit.compare.comparison import compare_runs
from gptfit.compare.comparison_json import comparison_json
from gptfit.compare.sentences import explain
from gptfit.errors import GptfitError
from gptfit.logs.open_run import open_run
from gptfit.pages.html import body
from gptfit.pages.report import page_data, page_samples
from gptfit.pages.shell import data_block

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-10, 10**30),
    st.floats(),
    st.text(max_size=8),
    st.just([]),
    st.just({}),
    st.just({"name": 3, "peak_tflops": "fast", "gpu": [], "n_embd": "wide", "tokenizer": 7, "torch": None}),
)
HEADER_KEYS = (
    "name config shape parameters flops_per_token tokens_per_step processes device dataset versions kind memory_gib"
)
CONFIG_KEYS = (
    "n_layer n_head n_embd block_size batch_size gradient_accumulation_steps max_iters learning_rate dtype vocab_size"
)
EVENT_KEYS = "step loss ms tokens seconds lr grad_norm memory_gib val_loss train_loss val_bpb kind message reason text"
FRAGMENTS = (
    "iter 10: loss 3.4, time 5.00ms, mfu 1.00%",
    "iter 9: loss nan, time 0.00ms, mfu -100.00%",
    "iter 99999999999999999999: loss 3, time 5ms",
    "step 10: train loss 3.0000, val loss nan",
    "step 00010/00100 (1%) | loss: 3.4 | dt: 0.00ms | tok/sec: 0 | mfu: 0.00 | total time: 0.00m",
    "Step 00010 | Validation bpb: 0.9",
    "Overriding config with x.py:",
    "Overriding: batch_size = 0",
    "Overriding: n_head = 0",
    "block_size = 9**9",
    "n_layer = 0",
    "tokens per iteration will be: 0",
    "number of parameters: 0.00M",
    "Model config: {'n_layer': 10**99}",
    "Model config:",
    "{",
    "total : 5",
    "found vocab_size = 0",
    "\x1b[31m",
    "\r\r",
)


def everything(paths: list[Path]) -> None:
    """All that compare, the report and the live page do with a log."""
    try:
        logs = [open_run(path) for path in paths]
        comparison = compare_runs(logs)
    except GptfitError as error:
        assert "\n" not in str(error)
        return
    explanation = explain(comparison)
    json.dumps(comparison_json(comparison, explanation), allow_nan=False)
    data_block(page_data(logs, comparison))
    body(comparison, explanation, page_samples(logs, comparison))


@st.composite
def events(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["header", "step", "eval", "event", "end"]))
    keys = HEADER_KEYS if kind == "header" else EVENT_KEYS
    found = draw(st.dictionaries(st.sampled_from(keys.split()), ODD, max_size=6))
    if kind == "header" and draw(st.booleans()):
        found["config"] = draw(st.dictionaries(st.sampled_from(CONFIG_KEYS.split()), ODD, max_size=6))
    if kind in ("step", "eval") and draw(st.integers(0, 9)):
        found["step"] = draw(st.integers(0, 50))
    return {"event": kind, **found}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(events(), min_size=1, max_size=12), min_size=1, max_size=2))
def test_any_json_lines_are_read_or_refused(runs: list[list[dict[str, Any]]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for i, lines in enumerate(runs):
            paths.append(Path(folder, f"{i}.jsonl"))
            paths[-1].write_text("".join(json.dumps(line) + "\n" for line in lines))
        everything(paths)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=20)), max_size=25))
def test_any_text_is_read_or_refused(lines: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log_12x768_b8x64.txt")
        path.write_text("\n".join(lines), encoding="utf-8", errors="surrogateescape")
        everything([path])
