"""The question that started this: two real logs, and every number about them right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gptfit import measured
from gptfit.cli import main
from gptfit.compare.comparison import compare_runs
from gptfit.compare.comparison_json import comparison_json
from gptfit.compare.sentences import explain
from gptfit.logs.open_run import open_run
from gptfit.logs.runlog import RunLog
from gptfit.plan.calibration import record_of, step_parts
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape
from gptfit.shell import command
from tests.made_logs import LARGE_LOG, SMALL_LOG, MakeRun
from tests.plan.test_calibration import made as calibrated


def as_json(runs: list[RunLog], gpu: str | None = None) -> dict[str, object]:
    comparison = compare_runs(runs, gpu)
    return json.loads(json.dumps(comparison_json(comparison, explain(comparison)), allow_nan=False))


@pytest.fixture
def answer(real_runs: list[RunLog]):  # type: ignore[no-untyped-def]
    return as_json(real_runs, "RTX 4070")


def test_tokens_per_step_are_the_same(answer) -> None:  # type: ignore[no-untyped-def]
    assert [run["tokens_per_step"] for run in answer["runs"]] == [524288, 524288]
    assert answer["same"]["tokens per step"] == 524288


def test_the_small_model_has_41m_parameters_not_33m(answer) -> None:  # type: ignore[no-untyped-def]
    assert [run["parameters"] for run in answer["runs"]] == [40_560_000, 123_587_328]


def test_the_small_one_is_2_4x_faster_per_token(answer) -> None:  # type: ignore[no-untyped-def]
    small, large = (run["tokens_per_s"] for run in answer["runs"])
    assert small == pytest.approx(134_100, rel=2e-3)
    assert large == pytest.approx(56_100, rel=2e-3)
    assert small / large == pytest.approx(2.39, abs=0.005)


def test_the_large_one_does_2_85x_the_work_per_token(answer) -> None:  # type: ignore[no-untyped-def]
    small, large = (run["flops_per_token"] for run in answer["runs"])
    assert (small, large) == (299_983_104, 854_770_176)
    assert large / small == pytest.approx(2.85, abs=0.005)


def test_step_times_leave_evals_out(answer) -> None:  # type: ignore[no-untyped-def]
    assert [run["ms_per_step"] for run in answer["runs"]] == [pytest.approx(3910, abs=2), pytest.approx(9346, abs=2)]
    micro = [run["ms_per_micro_step"] for run in answer["runs"]]
    assert micro == [pytest.approx(3910 / 32, abs=0.1), pytest.approx(9346 / 64, abs=0.1)]


def test_mfu_is_69_and_82_percent_of_the_cards_own_peak(answer) -> None:  # type: ignore[no-untyped-def]
    assert [run["mfu"] for run in answer["runs"]] == [pytest.approx(0.69, abs=0.005), pytest.approx(0.82, abs=0.005)]
    assert [run["tflops"] for run in answer["runs"]] == [pytest.approx(40.2, abs=0.1), pytest.approx(47.9, abs=0.1)]


def test_against_an_a100_it_is_what_nanogpt_printed_before_evals_dragged_it_down(answer) -> None:  # type: ignore[no-untyped-def]
    assert [run["mfu_a100"] for run in answer["runs"]] == [
        pytest.approx(0.129, abs=5e-4),
        pytest.approx(0.1537, abs=5e-4),
    ]


def test_at_step_500_the_large_one_is_lower_by_0_013_inside_the_noise(answer) -> None:  # type: ignore[no-untyped-def]
    steps = answer["at_equal"]["step"]
    at_500 = next(point for point in steps["points"] if point["at"] == 500)
    assert at_500["difference"] == pytest.approx(-0.0134, abs=1e-6)
    assert abs(at_500["difference"]) < steps["noise"] < 0.05
    small, large = answer["runs"]
    assert large["ms_per_step"] / small["ms_per_step"] == pytest.approx(2.4, abs=0.05)


def test_the_large_one_is_ahead_from_step_1000(answer) -> None:  # type: ignore[no-untyped-def]
    steps = answer["at_equal"]["step"]
    assert (steps["ahead"], steps["ahead_from"], steps["at"]) == (1, 1000, 4500)
    assert steps["losses"] == [3.7954, 3.5636]


def test_on_the_clock_it_is_ahead_only_after_nine_hours(answer) -> None:  # type: ignore[no-untyped-def]
    clock = answer["at_equal"]["seconds"]
    assert clock["ahead"] == 1
    assert clock["crossings"][-1] / 3600 == pytest.approx(9.3, abs=0.2)
    assert 9.3 < clock["ahead_from"] / 3600 < 10.5
    first = clock["points"][0]
    assert first["difference"] > 1  # the small one was far ahead early on


def test_what_changed_is_named_and_the_micro_batch_is_confounded(answer) -> None:  # type: ignore[no-untyped-def]
    changed = {change["key"]: change["values"] for change in answer["changed"]}
    assert changed["n_embd"] == [384, 768]
    assert changed["micro-batch"] == ["16 x 32", "8 x 64"]
    assert changed["learning_rate"] == [1e-3, 3e-4]
    assert changed["dropout"] == [0.1, 0.0]  # the fifth change nobody named
    assert answer["confounded"] is True
    assert answer["settle"].startswith("gptfit tune ")


def test_plan_is_asked_about_every_combination(answer) -> None:  # type: ignore[no-untyped-def]
    rows = {tuple(sorted(row["changes"])): row for row in answer["what_if"]}
    assert set(rows) == {(), ("micro-batch",), ("n_embd",), ("micro-batch", "n_embd")}
    for row in rows.values():
        speed = row["tokens_per_s"]
        assert speed["low"] < speed["value"] < speed["high"]
    assert rows[()]["measured_tokens_per_s"] == answer["runs"][0]["tokens_per_s"]


def test_the_sentences_carry_the_numbers(answer) -> None:  # type: ignore[no-untyped-def]
    text = " ".join(answer["sentences"])
    for number in (
        "524,288",
        "40.6M",
        "123.6M",
        "134.1k",
        "56.1k",
        "2.39x",
        "2.85x",
        "69 %",
        "82 %",
        "0.013",
        "step 500",
    ):
        assert number in text, number


def test_projections_of_a_cut_log_hold_what_the_whole_log_reached(real_configs, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The first 6,000 steps of the 12x384 run must not exclude its real end at 20,000."""
    text = SMALL_LOG.read_text()
    cut = tmp_path / "cut.txt"
    cut.write_text(text[: text.index("step 6500")])
    comparison = compare_runs([open_run(cut, real_configs[0])])
    (end,) = [found for found in comparison.projections if found.target == "its own end"]
    assert end.loss.low < 3.5228 < end.loss.high
    assert end.loss.high - end.loss.low < 0.3


def test_without_configs_the_file_names_and_the_mfu_suffice() -> None:
    answer = as_json([open_run(SMALL_LOG), open_run(LARGE_LOG)])
    assert [run["parameters"] for run in answer["runs"]] == [40_560_000, 123_587_328]  # type: ignore[index,union-attr]
    assert [round(run["mfu"], 2) for run in answer["runs"]] == [0.69, 0.82]  # type: ignore[index,union-attr]


def test_the_verb_prints_the_answer_when_piped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(SMALL_LOG), str(LARGE_LOG), "--gpu", "4070"]) == 0
    text = capsys.readouterr().out
    assert "134.1k" in text
    assert "\x1b" not in text
    named = command(["gptfit", "compare", SMALL_LOG, LARGE_LOG, "--gpu", "4070", "--html", "comparison.html"])
    assert text.splitlines()[-1] == f"as a page: {named}"


def test_the_verb_prints_json_that_parses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(SMALL_LOG), str(LARGE_LOG), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    wanted = "name parameters flops_per_token tokens_per_step ms_per_step ms_per_micro_step tokens_per_s tflops mfu mfu_a100 evals"
    for run in answer["runs"]:
        assert set(wanted.split()) <= set(run)
    assert {"runs", "changed", "confounded", "at_equal", "sentences"} <= set(answer)
    assert set(answer["at_equal"]) == {"step", "tokens", "seconds", "flops"}


def test_bad_input_is_one_line_and_exit_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("")
    assert main(["compare", str(tmp_path / "empty.txt")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("gptfit: ")
    assert error.count("\n") == 1


def test_two_configs_for_three_runs_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "a", "b", "c", "--config", "x.py", "y.py"]) == 1
    assert "one per run" in capsys.readouterr().err


def test_an_unknown_card_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(SMALL_LOG), "--gpu", "RTX 4071"]) == 1
    assert "not in the table" in capsys.readouterr().err


def test_our_own_runs_compare_and_one_change_is_given_the_credit(make_run: MakeRun) -> None:
    a = open_run(make_run("a"))
    b = open_run(make_run("b", ms=25.0, config={"compile": False}, level=0.0))
    a.header.config["compile"] = True
    answer = as_json([a, b])
    assert answer["confounded"] is False
    assert any("Only compile changed" in sentence for sentence in answer["sentences"])  # type: ignore[union-attr]


def test_equal_runs_have_no_winner(make_run: MakeRun) -> None:
    answer = as_json([open_run(make_run("a")), open_run(make_run("b"))])
    assert answer["at_equal"]["step"]["ahead"] is None  # type: ignore[index]
    assert "neither is ahead" in answer["verdict"]  # type: ignore[operator]


def test_three_runs_are_held_against_the_first(make_run: MakeRun) -> None:
    runs = [open_run(make_run(name, level=level)) for name, level in (("a", 0.0), ("b", -0.5), ("c", 0.5))]
    answer = as_json(runs)
    pairs = answer["at_equal"]["step"]["pairs"]  # type: ignore[index]
    assert [(pair["runs"], pair["ahead"]) for pair in pairs] == [([0, 1], 1), ([0, 2], 0)]
    assert "B leads A" in answer["verdict"]  # type: ignore[operator]


def test_different_tokenizers_are_not_compared_by_loss(make_run: MakeRun) -> None:
    other = {"folder": "data/y", "tokenizer": "gpt2"}
    answer = as_json([open_run(make_run("a")), open_run(make_run("b", level=-1.0, dataset=other))])
    assert answer["not_comparable"]
    assert answer["at_equal"]["step"] is None  # type: ignore[index]
    assert "No winner" in answer["verdict"]  # type: ignore[operator]


def test_different_tokenizers_are_compared_in_bits_per_byte_where_known(make_run: MakeRun) -> None:
    """The same loss per token is worth more bits per byte when tokens are shorter."""
    bytes_level = {"folder": "data/x", "tokenizer": "bytes", "bytes_per_token": 1.0}
    pieces = {"folder": "data/x", "tokenizer": "gpt2", "bytes_per_token": 4.5}
    answer = as_json([open_run(make_run("a", dataset=bytes_level)), open_run(make_run("b", dataset=pieces))])
    assert answer["unit"] == "bits per byte"
    assert answer["at_equal"]["step"]["ahead"] == 1  # type: ignore[index]


def test_nan_losses_do_not_reach_the_json(make_run: MakeRun) -> None:
    path = make_run("a")
    with open(path / "run.jsonl", "a") as file:
        file.write('{"event": "step", "step": 100, "loss": null, "ms": 50, "seconds": 5.1}\n')
        file.write('{"event": "eval", "step": 101, "train_loss": NaN, "val_loss": NaN, "seconds": 5.1}\n')
    answer = as_json([open_run(path)])
    assert answer["runs"][0]["evals"][-1]["val_loss"] is None  # type: ignore[index]


def test_a_run_cut_in_mid_line_by_a_crash_is_read(make_run: MakeRun) -> None:
    path = make_run("a") / "run.jsonl"
    path.write_bytes(path.read_bytes()[:-25])
    run = open_run(path)
    assert len(run.steps) >= 99
    assert any("torn" in note for note in run.notes)


def test_a_resumed_run_of_ours_drops_what_the_crash_undid(make_run: MakeRun) -> None:
    path = make_run("a") / "run.jsonl"
    with open(path, "a") as file:
        file.write('{"event": "step", "step": 60, "loss": 1.5, "ms": 50, "seconds": 3.05, "time": 900}\n')
        file.write('{"event": "step", "step": 61, "loss": 1.4, "ms": 50, "seconds": 3.10, "time": 901}\n')
    run = open_run(path)
    assert [event.step for event in run.steps] == list(range(62))
    assert run.steps[-1].loss == 1.4
    assert max(event.step for event in run.evals) == 60  # taken before update 60, which the resumed run made
    seconds = [event.seconds for event in run.steps]
    assert seconds == sorted(seconds)


def test_a_resumed_run_is_no_other_kind_of_run(make_run: MakeRun) -> None:
    resumed = make_run("b", config={"init_from": "resume"})
    answer = compare_runs([open_run(make_run("a")), open_run(resumed)])
    assert "init_from" not in [change.key for change in answer.differences.changed]


def test_a_run_that_answers_is_not_ahead_of_one_that_reads(make_run: MakeRun) -> None:
    """A loss over a few short answers is lower; `compare` had called that a win."""
    data = {"folder": "data/x", "tokenizer": "bytes"}
    runs = [make_run("reads"), make_run("answers", level=-1.0, dataset={**data, "chat": "gptfit-1"})]
    found = compare_runs([open_run(run) for run in runs])
    assert found.duels == ()
    assert explain(found).verdict == (
        "No winner can be named: the losses of answers are over the assistant's words alone, those of reads over all of a text."
    )


@pytest.mark.parametrize("is_calibrated", [True, False])
def test_on_a_calibrated_machine_every_combination_is_planned_by_its_own_costs(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_calibrated: bool
) -> None:
    """A CPU has no data sheet: without a calibration nothing can be said of what one change alone would have done."""
    monkeypatch.setenv("GPTFIT_CACHE", str(tmp_path / "cache"))
    own = calibrated()
    if is_calibrated:
        measured.append([record_of(own)])
    keys = {"dtype": "float32", "compile": False}
    runs = [
        open_run(make_run(name, device={"name": own.device, "dtype": "float32"}, config={**keys, **more}))
        for name, more in (("a", {}), ("b", {"n_layer": 4, "batch_size": 8}))
    ]
    rows = {tuple(sorted(row["changes"])): row["tokens_per_s"] for row in as_json(runs)["what_if"]}  # type: ignore[attr-defined]
    if not is_calibrated:
        assert rows == {}
        return
    assert set(rows) == {(), ("micro-batch",), ("n_layer",), ("micro-batch", "n_layer")}
    assert {speed["basis"] for speed in rows.values()} == {"calibrated"}
    shape = ModelShape(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=256)
    setting = Setting(shape, 4, dtype="float32", compile=False)
    seconds = sum(step_parts(setting, own).values())
    assert rows[()]["value"] == pytest.approx(setting.tokens_per_step / seconds)
