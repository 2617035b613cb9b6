"""What a tuning session looks like in 80 columns: whole words, whole figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gptfit.config.keys import DEFAULTS, TrainConfig
from gptfit.tune.measuring import Session
from gptfit.tune.space import Space, VariedSetting
from gptfit.tune.trials import Candidate, Machine, Timing, Trial, Variant, Workload
from gptfit.verbs.common import console
from gptfit.verbs.tune_view import TuneScreen, score_table, table_head, table_rows, trial_line

KEYS = {**DEFAULTS, "dtype": "bfloat16", "chunked_loss": False}
BASE, OTHER = Variant.of(0, KEYS), Variant.of(0, {**KEYS, "chunked_loss": True, "checkpoint_activations": True})
SPACE = Space(
    Workload(480, 1024), 8, BASE, (VariedSetting("chunked_loss", (False, True)),), sizes=(8, 12, 16), limit_gib=11.3
)
CARD = Machine(
    device="NVIDIA GeForce RTX 4070", kind="cuda", dtype="bfloat16", has_bf16=True, torch="2.13.0", threads=8, cores=16,
    total_bytes=12 * 2**30, free_bytes=int(11.3 * 2**30), gpu="RTX 4070 12GB",
)  # fmt: skip


def trial(size: int, variant: Variant) -> Trial:
    timing = Timing(
        device="card", chunked_loss=False, compiled=True, ms_per_micro_step=123.4, ms_low=120.0, ms_high=126.0,
        samples=9, ms_per_update=5.0, allocated_gib=10.12, reserved_gib=10.87, device_gib=11.21,
    )  # fmt: skip
    return Trial(Candidate(size, variant), "ok", 0.0, 10.0, timing=timing)


def test_lines_and_table_are_broken_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    config = TrainConfig()
    session = Session(SPACE, [trial(8, BASE), trial(12, OTHER)])
    failed = Trial(Candidate(16, OTHER), "oom", 0.0, 10.0, message="CUDA out of memory. Tried to allocate 1.54 GiB")
    with TuneScreen(config, config.shape(), CARD, SPACE, minutes=10) as screen:
        for done in (*session.trials, failed):
            session = replace(session, trials=[*session.trials, done])
            screen.finished(done, session)
    console().print(score_table(session))
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert "…" not in said
    words = said.split()
    for whole in ("vocabulary", "NVIDIA", "micro-step,", "allocate", "checkpoint_activations=True", "11.2", "tokens/s"):
        assert whole in words, said


def test_what_has_room_is_shown_and_the_least_is_left_out_first(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(SPACE, [trial(8, BASE), trial(12, OTHER)])
    heads = {}
    for columns in ("80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        heads[columns] = [str(column.header) for column in score_table(session).columns]
    assert heads["200"] == table_head(session)
    assert set(heads["80"]) < set(heads["200"])
    assert {"micro-batch", "settings", "tokens/s", "device", ""} <= set(heads["80"])


def test_a_trials_line_has_the_milliseconds_of_the_table() -> None:
    """Of two trials of one candidate the table has the middle, and so has the line of the second."""
    first, second = trial(8, BASE), trial(8, BASE)
    assert second.timing is not None
    second = replace(second, timing=replace(second.timing, ms_per_micro_step=133.4, ms_low=130.0, ms_high=136.0))
    session = Session(SPACE, [first, second])
    at = table_head(session).index("ms")
    (row,) = table_rows(session)
    assert f": {row[at]} ms " in trial_line(second, session)
