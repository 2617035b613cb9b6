"""What a tuning session leaves: the answer in words, JSON, a page, a tuned config, a row for the measurement table."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptfit.config.write import render, set_keys
from gptfit.errors import RunError
from gptfit.files import write_whole
from gptfit.tune.rank import Score
from gptfit.tune.session import TuneResult
from gptfit.tune.space import candidate_config
from gptfit.tune.trials import trial_as_json
from gptfit.units import GIB, count, gib, percent, si
from gptfit.verbs.tune_view import table_head, table_rows, variant_words

# The columns of tests/measured.csv, in its order.
ROW_COLUMNS = [
    "id",
    "source_url",
    "date",
    "gpu",
    "n_gpus",
    "codebase",
    "params_m",
    "n_layer",
    "n_head",
    "n_embd",
    "vocab_size",
    "block_size",
    "micro_batch",
    "grad_accum",
    "dtype",
    "compile",
    "attention",
    "activation_checkpointing",
    "optimizer",
    "tokens_per_s",
    "ms_per_iter",
    "reported_mfu_pct",
    "mfu_reference_peak_tflops",
    "peak_vram_mib",
    "notes",
    "quality",
]


def answer_lines(result: TuneResult) -> list[str]:
    """The winner, the curve in a sentence, and what to know about the measurement."""
    best = result.best
    assert best is not None
    lines = [f"best: {settings_words(result, best)}", f"      {speed_words(result, best)}"]
    own = next((s for s in result.scores if _is_own(result, s)), None)
    if own is not None and own.candidate != best.candidate:
        gain = 100 * (best.tokens_per_s / own.tokens_per_s - 1)
        lines.append(f"      {gain:+.1f} % against the config as it is (batch_size {own.candidate.micro_batch})")
    lines.append(f"curve: {result.explanation()}")
    lines += [f"note: {note}" for note in result.notes]
    if result.session.reason == "interrupted":
        lines.append(f"stopped early: {_trials(len(result.session.trials))} finished and kept")
    return lines


def settings_words(result: TuneResult, score: Score) -> str:
    keys = changed_keys(result, score)
    words = ", ".join(f"{key} = {value!r}" for key, value in keys.items())
    threads = score.candidate.variant.threads
    with_threads = f", run with OMP_NUM_THREADS={threads}" if threads != result.session.space.base.threads else ""
    tokens = count(result.session.space.workload.tokens_per_step)
    return f"{words}{with_threads} ({tokens} tokens per step, as before)"


def speed_words(result: TuneResult, score: Score) -> str:
    mfu, peak = result.mfu(score), result.peak
    words = f"{si(score.tokens_per_s)} tokens/s +-{percent(score.spread, 1)} over {_trials(score.trials)}"
    if mfu is not None and peak is not None:
        words += f", MFU {percent(mfu)} of {peak[0]:.3g} TFLOPS ({peak[1]})"
    if score.memory_gib is not None:
        words += f", {gib(score.memory_gib * GIB)}"
        limit = result.session.space.limit_gib
        words += f" of {gib(limit * GIB)} after head-room" if limit is not None else ""
    return words


def changed_keys(result: TuneResult, score: Score) -> dict[str, object]:
    """What a config must say for this candidate: the two sizes, and what else differs from the config."""
    keys: dict[str, object] = {"batch_size": score.candidate.micro_batch}
    if not result.config.tokens_per_step:  # which would derive the accumulation by itself
        keys["gradient_accumulation_steps"] = result.session.space.workload.accumulation(score.candidate.micro_batch)
    base, variant = result.session.space.base, score.candidate.variant
    return keys | {name: value for name, value in variant.keys if value != base[name]}


def write_config(result: TuneResult, path: Path, texts: Sequence[str]) -> Path:
    """A copy of the last config file with the keys set; without a file, the whole config as a lab note."""
    best = result.best
    assert best is not None
    remark = f"tuned on {result.machine.device}: {si(best.tokens_per_s)} tokens/s"
    if texts:
        text = set_keys(texts[-1], changed_keys(result, best), remark)
    else:
        text = render(candidate_config(result.config, best.candidate), notes=[remark])
    _write(path, text)
    return path


def write_page(result: TuneResult, path: Path) -> Path:
    from gptfit.pages.tune_page import TunedCurve, tune_page

    best = result.best
    assert best is not None
    base = result.session.space.base
    curves = []
    for variant in dict.fromkeys(score.candidate.variant for score in result.scores):
        scores = sorted(
            (s for s in result.scores if s.candidate.variant == variant), key=lambda s: s.candidate.micro_batch
        )
        curves.append(
            TunedCurve(
                name=variant_words(variant, base).strip() or "as configured",
                sizes=tuple(s.candidate.micro_batch for s in scores),
                tokens_per_s=tuple(s.tokens_per_s for s in scores),
                spread=tuple(s.tokens_per_s * s.spread for s in scores),
                memory_gib=tuple(s.memory_gib for s in scores),
            )
        )
    text = tune_page(
        title=f"tune {result.shape.n_layer} x {result.shape.n_embd}",
        sentences=[settings_words(result, best), speed_words(result, best), result.explanation(), *result.notes],
        curves=curves,
        best=(best.candidate.micro_batch, best.tokens_per_s),
        limit_gib=result.session.space.limit_gib,
        head=table_head(result.session),
        rows=table_rows(result.session, result),
    )
    _write(path, text)
    return path


def as_json(result: TuneResult) -> dict[str, Any]:
    best = result.best
    assert best is not None
    return {
        "device": result.machine.device,
        "torch": result.machine.torch,
        "tokens_per_step": result.session.space.workload.tokens_per_step,
        "reason": result.session.reason,
        "seconds": result.session.elapsed_s,
        "limit_gib": result.session.space.limit_gib,
        "best": {**changed_keys(result, best), **_score_json(result, best)},
        "scores": [_score_json(result, score) for score in result.scores],
        "trials": [trial_as_json(trial) for trial in result.session.trials],
        "explanation": result.explanation(),
        "notes": list(result.notes),
        "row": measurement_row(result, best),
    }


def measurement_row(result: TuneResult, score: Score) -> dict[str, str]:
    """The candidate in the columns of the table of published measurements."""
    shape, timing, work = result.shape, score.timing, result.session.space.workload
    variant, micro_batch = score.candidate.variant, score.candidate.micro_batch
    accumulation = work.accumulation(micro_batch)
    mfu, peak = result.mfu(score), result.peak
    values = {
        "id": f"gptfit-{shape.n_layer}x{shape.n_embd}-b{micro_batch}-{time.strftime('%Y%m%d', time.gmtime())}",
        "source_url": "gptfit tune",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "gpu": result.machine.gpu or timing.device,
        "n_gpus": 1,
        "codebase": "gptfit",
        "params_m": f"{shape.parameters / 1e6:.2f}",
        "n_layer": shape.n_layer,
        "n_head": shape.n_head,
        "n_embd": shape.n_embd,
        "vocab_size": shape.vocab_size,
        "block_size": shape.block_size,
        "micro_batch": micro_batch,
        "grad_accum": accumulation,
        "dtype": "float32" if variant["dtype"] == "float32" else f"{variant['dtype']} autocast",
        "compile": "yes" if timing.compiled else "no",
        "attention": "sdpa" if variant["attention"] == "auto" else f"sdpa/{variant['attention']}",
        "activation_checkpointing": "yes" if variant["checkpoint_activations"] else "no",
        "optimizer": result.config.optimizer,
        "tokens_per_s": f"{score.tokens_per_s:.0f}",
        "ms_per_iter": f"{1e3 * work.tokens_per_step / score.tokens_per_s:.2f}",
        "reported_mfu_pct": f"{100 * mfu:.2f}" if mfu is not None else "",
        "mfu_reference_peak_tflops": f"{peak[0]:.4g}" if peak else "",
        "peak_vram_mib": f"{1024 * score.memory_gib:.0f}" if score.memory_gib is not None else "",
        "notes": f"median of {_trials(score.trials)}; torch {result.machine.torch}; chunked_loss {timing.chunked_loss}",
        "quality": "A",
    }
    return {column: str(values[column]) for column in ROW_COLUMNS}


def append_row(result: TuneResult, path: Path) -> Path:
    """The winner at the end of a table that grows by one row per session; a new file begins with the columns' names."""
    best = result.best
    assert best is not None
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path}: cannot be read ({error})", fix="name another file") from None
    text = io.StringIO()
    writer = csv.DictWriter(text, ROW_COLUMNS, lineterminator="\n")
    if not before:
        writer.writeheader()
    elif before.splitlines()[0].split(",") != ROW_COLUMNS:
        raise RunError(f"{path}: has other columns than this table", fix="name another file")
    writer.writerow(measurement_row(result, best))
    _write(path, before + text.getvalue())
    return path


def _score_json(result: TuneResult, score: Score) -> dict[str, Any]:
    work, micro_batch = result.session.space.workload, score.candidate.micro_batch
    return {
        "micro_batch": micro_batch,
        "accumulation": work.accumulation(micro_batch),
        **score.candidate.variant.as_dict(),
        "tokens_per_s": score.tokens_per_s,
        "ms_per_micro_step": score.ms_per_micro_step,
        "ms_per_update": score.timing.ms_per_update,
        "spread": score.spread,
        "mfu": result.mfu(score),
        "memory_gib": score.memory_gib,
        "fits": score.fits(result.session.space.limit_gib),
        "trials": score.trials,
    }


def _trials(number: int) -> str:
    return "1 trial" if number == 1 else f"{number} trials"


def _is_own(result: TuneResult, score: Score) -> bool:
    candidate = score.candidate
    return candidate.micro_batch == result.config.batch_size and candidate.variant == result.session.space.base


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror})", fix="choose another place") from None
