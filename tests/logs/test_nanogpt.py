"""What nanoGPT prints, in the states it is found in."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptfit.errors import RunError
from gptfit.logs.open_run import open_run
from gptfit.logs.runlog import RunLog

HEADER = """\
$ python train.py config/train_fineweb.py --batch_size=8
Overriding config with config/train_fineweb.py:
# comments stay comments
out_dir = 'out-fineweb'
gradient_accumulation_steps = 8 * 8     # Effective batch size
batch_size = 16
block_size = 1024
n_layer = 12
n_head = 12
n_embd = 768
dropout = 0.0
learning_rate = 3e-4
max_iters = 12000

Overriding: batch_size = 8
Overriding: dataset = fine-web
tokens per iteration will be: 524,288
Initializing a new model from scratch
defaulting to vocab_size of GPT-2 to 50304 (50257 rounded up for efficiency)
number of parameters: 123.59M
num decayed parameter tensors: 50, with 124,354,560 parameters
num non-decayed parameter tensors: 25, with 19,200 parameters
using fused AdamW: True
compiling the model... (takes a ~minute)
"""
BODY = """\
step 0: train loss 10.9974, val loss 10.9913
iter 0: loss 10.9934, time 29250.35ms, mfu -100.00%
iter 200: loss 6.4844, time 9344.08ms, mfu 15.37%
iter 400: loss 5.7705, time 9346.00ms, mfu 15.37%
step 500: train loss 5.4505, val loss 5.5194
saving checkpoint to out-fineweb
iter 600: loss 5.1851, time 9343.73ms, mfu 15.37%
step 800: train loss 4.9000, val loss 4.8000
iter 800: loss 4.6773, time 29303.57ms, mfu 14.33%
"""


def read(tmp_path: Path, text: str, name: str = "run.txt", encoding: str = "utf-8") -> RunLog:
    path = tmp_path / name
    path.write_bytes(text.encode(encoding))
    return open_run(path)


def losses(run: RunLog) -> list[tuple[int, float]]:
    return [(event.step, event.loss) for event in run.steps]


def test_steps_and_evals_are_read(tmp_path: Path) -> None:
    run = read(tmp_path, HEADER + BODY)
    assert losses(run) == [(0, 10.9934), (200, 6.4844), (400, 5.7705), (600, 5.1851), (800, 4.6773)]
    assert [(event.step, event.val_loss) for event in run.evals] == [(0, 10.9913), (500, 5.5194), (800, 4.8)]


def test_a_time_that_holds_an_eval_or_the_compile_is_no_step_time(tmp_path: Path) -> None:
    run = read(tmp_path, HEADER + BODY)
    assert [event.ms for event in run.steps] == [None, 9344.08, 9346.0, 9343.73, None]


def test_eval_time_is_what_the_step_after_it_took_too_long(tmp_path: Path) -> None:
    evals = {event.step: event for event in read(tmp_path, HEADER + BODY).evals}
    assert evals[800].ms == pytest.approx(29303.57 - 9344.08)
    assert evals[0].ms is None  # its line holds the compile


def test_a_log_whose_every_line_holds_an_eval_says_so(tmp_path: Path) -> None:
    lines = [
        f"step {i}: train loss 3.0000, val loss 3.0000\niter {i}: loss 3.0, time 900.00ms, mfu 1.00%\n"
        for i in range(3)
    ]
    run = read(tmp_path, "".join(lines))
    assert any("include them" in note for note in run.notes)
    assert all(event.ms is None for event in run.steps)


def test_training_seconds_leave_evals_out(tmp_path: Path) -> None:
    run = read(tmp_path, HEADER + BODY)
    assert run.evals[-1].seconds == pytest.approx(800 * 9.344, rel=1e-3)


def test_the_echoed_config_is_read_with_overrides_on_top(tmp_path: Path) -> None:
    config = read(tmp_path, HEADER + BODY).config
    assert (config["batch_size"], config["gradient_accumulation_steps"], config["dataset"]) == (8, 64, "fine-web")
    assert config["learning_rate"] == 3e-4
    assert config["beta2"] == 0.95  # nanoGPT's default, since the header shows the rest is at its defaults


def test_the_models_own_figures_agree_with_the_config(tmp_path: Path) -> None:
    header = read(tmp_path, HEADER + BODY).header
    assert header.tokens_per_step == 524288
    assert header.parameters == 123_587_328
    assert header.processes == 1


def test_a_config_that_cannot_explain_the_mfu_is_doubted(tmp_path: Path) -> None:
    text = (HEADER + BODY).replace("n_embd = 768", "n_embd = 384").replace("123.59M", "40.56M")
    assert any("is it the config of this log?" in note for note in read(tmp_path, text).notes)


def test_a_model_that_is_not_the_configs_has_its_figures_from_the_log_alone(tmp_path: Path) -> None:
    text = (HEADER + BODY).replace("number of parameters: 123.59M", "number of parameters: 10.65M")
    header = read(tmp_path, text).header
    assert header.parameters == 10_650_000
    assert header.shape is None
    assert header.flops_per_token is None, "those of the config are another model's"
    assert header.flops_per_step == pytest.approx(854_770_176 * 524_288, rel=1e-3), "by the log's MFU and time"


def test_several_cards_are_found_from_the_mfu(tmp_path: Path) -> None:
    """nanoGPT's MFU is of one process: four cards do a step in a quarter of the time at the same MFU."""
    text = HEADER + "iter 0: loss 10.9, time 9000.00ms, mfu -100.00%\niter 10: loss 9.0, time 2336.02ms, mfu 15.37%\n"
    run = read(tmp_path, text)
    assert run.header.processes == 4


def test_without_echo_and_without_a_telling_name_the_model_stays_unknown(tmp_path: Path) -> None:
    run = read(tmp_path, BODY)
    assert run.config == {}
    assert run.header.parameters is None
    assert run.header.tokens_per_step is None
    assert run.header.flops_per_step == pytest.approx(854_770_176 * 524_288, rel=1e-3)


def test_a_file_name_is_believed_only_when_it_explains_the_mfu(tmp_path: Path) -> None:
    assert read(tmp_path, BODY, "mine_12x768_b8x64.txt").header.parameters == 123_587_328
    assert read(tmp_path, BODY, "mine_12x512_b8x64.txt").header.parameters is None


def test_a_given_config_supplies_what_the_log_does_not_echo(tmp_path: Path) -> None:
    (tmp_path / "run.txt").write_text(BODY)
    (tmp_path / "b.py").write_text("batch_size = 8\ngradient_accumulation_steps = 64\nlearning_rate = 3e-4\n")
    run = open_run(tmp_path / "run.txt", tmp_path / "b.py")
    assert run.header.parameters == 123_587_328
    assert run.config["learning_rate"] == 3e-4


@pytest.mark.parametrize(
    "prefix",
    ["2023-03-22 09:30:39 ", "> ", "[rank0]: ", "[default0]:", "worker-0 | ", "\x1b[32m", "^[[A^[[A", "   "],
)
def test_what_terminals_and_schedulers_put_before_a_line_does_not_matter(tmp_path: Path, prefix: str) -> None:
    text = "".join(prefix + line + "\n" for line in BODY.splitlines())
    assert losses(read(tmp_path, text)) == losses(read(tmp_path, BODY))


def test_progress_bars_and_tracker_lines_between_are_skipped(tmp_path: Path) -> None:
    noise = "  3%|▎         | 3/100 [00:01<00:40,  2.4it/s]\rwandb: Run data is saved locally\r\n"
    text = "".join(noise + line + "\r\n" for line in BODY.splitlines())
    run = read(tmp_path, text)
    assert len(run.steps) == 5
    assert len(run.evals) == 3


@pytest.mark.parametrize("width", range(24, 60, 3))
def test_a_wrapped_log_reads_as_the_whole_one(tmp_path: Path, width: int) -> None:
    wrapped = [line[i : i + width] for line in BODY.splitlines() for i in range(0, len(line), width)]
    run, whole = read(tmp_path, "\n".join(wrapped)), read(tmp_path, BODY)
    assert losses(run) == losses(whole)
    assert [e.val_loss for e in run.evals] == [e.val_loss for e in whole.evals]


def test_keys_pressed_while_training_do_not_cost_a_line(tmp_path: Path) -> None:
    text = "iter 50: loss 3.1716, time 451.90ms, mfu 113.03%\n^[[A^[[A^[[\nA^[[Aiter 100: loss 3\n.2751, time 452.62ms, mfu 113.32%\n"
    assert losses(read(tmp_path, text)) == [(50, 3.1716), (100, 3.2751)]


def test_a_fork_with_more_columns_is_read(tmp_path: Path) -> None:
    text = "iter 5: loss 5.9597, time 26.80ms, mfu 3.30%, cuda memory 0.499G, lr 6.00e-04, total time 1.43s\n"
    step = read(tmp_path, text + text.replace("iter 5", "iter 6")).steps[1]
    assert (step.lr, step.memory_gib) == (6e-4, 0.499)


def test_nan_losses_are_kept_as_what_they_are(tmp_path: Path) -> None:
    run = read(
        tmp_path, BODY + "iter 1000: loss nan, time 1019.95ms, mfu 14.12%\nstep 1000: train loss nan, val loss nan\n"
    )
    assert run.steps[-1].loss is None


def test_a_resume_replaces_the_steps_it_repeats(tmp_path: Path) -> None:
    again = "Resuming training from out-fineweb\nstep 500: train loss 5.4505, val loss 5.5000\n"
    again += "iter 500: loss 5.3000, time 31000.00ms, mfu -100.00%\niter 600: loss 5.0000, time 9340.00ms, mfu 15.37%\n"
    run = read(tmp_path, BODY + again)
    assert losses(run) == [(0, 10.9934), (200, 6.4844), (400, 5.7705), (500, 5.3), (600, 5.0)]
    assert [(e.step, e.val_loss) for e in run.evals] == [(0, 10.9913), (500, 5.5)]
    seconds = [event.seconds for event in run.steps]
    assert seconds == sorted(seconds)
    assert any(event.kind == "resume" for event in run.messages)


def test_what_is_printed_after_the_last_step_belongs_to_a_run_that_never_began(tmp_path: Path) -> None:
    run = read(tmp_path, HEADER + BODY + HEADER.replace("n_embd = 768", "n_embd = 1600"))
    assert run.config["n_embd"] == 768


def test_a_powershell_redirect_is_read(tmp_path: Path) -> None:
    assert losses(read(tmp_path, BODY, encoding="utf-16")) == losses(read(tmp_path, BODY))


def test_the_first_real_log(shared: Path) -> None:
    run = open_run(shared / "data/logs/nanogpt_4070_12x384_b16x32.txt")
    assert len(run.steps) == 101
    assert len(run.evals) == 41
    assert run.header.parameters == 40_560_000
    assert run.evals[-1].seconds == pytest.approx(20000 * 3.91, rel=1e-3)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"  \n \n", "empty"),
        (b"\x7fELF\x00\x00\x00", "binary"),
        (b"hello\nworld\n", "looked for nanoGPT's `iter"),
        (b"iter 5: loss ", "none is whole"),
        (b'{"event": "weather"}\n', "looked for JSON lines"),
    ],
)
def test_a_file_that_is_no_log_is_refused_in_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(content)
    with pytest.raises(RunError, match=says) as error:
        open_run(path)
    assert "\n" not in str(error.value)


def test_a_folder_without_a_log_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no run\.jsonl in this folder"):
        open_run(tmp_path)
    with pytest.raises(RunError, match="no such file"):
        open_run(tmp_path / "nowhere.txt")
