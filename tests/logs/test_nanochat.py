"""What nanochat prints, whole, wrapped by a terminal, and from its relatives."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptfit.logs.open_run import open_run
from gptfit.logs.runlog import RunLog

HEADER = """\
GPU: NVIDIA GeForce RTX 4070 | Peak FLOPS (BF16): inf
Vocab size: 32,768
Model config:
{
  "sequence_len": 2048,
  "vocab_size": 32768,
  "n_layer": 12,
  "n_head": 6,
  "n_kv_head": 6,
  "n_embd": 768,
  "window_pattern": "L"
}
Parameter counts:
wte                     : 25,165,824
lm_head                 : 25,165,824
transformer_matrices    : 84,935,808
total                   : 286,261,730
Estimated FLOPs per token: 8.870000e+08
Total batch size 65,536 => gradient accumulation steps: 4
"""
SPEEDS = [("1177.85", "55,640"), ("1176.37", "55,710"), ("1177.93", "55,636"), ("1177.30", "55,666")]
STEPS = [
    f"step {86019 + i}/87000 (98.87%) | loss: 2.{800943 - i} | lrm: 0.07 | dt: {dt}ms | tok/sec: {speed} | bf16_mfu: 0.00 "
    f"| epoch: 1 pq: 9 rg: 772 | total time: 1686.{95 + i}m | eta: 19.2m"
    for i, (dt, speed) in enumerate(SPEEDS)
]
TAIL = """\
Step 86023 | Validation bpb: 0.865752
Step 86023 | CORE metric: 0.1724
<|bos|>The capital of France is Paris.
Peak memory usage: 9436.49MiB
Minimum validation bpb: 0.865752
"""


def read(tmp_path: Path, text: str) -> RunLog:
    path = tmp_path / "nanochat.txt"
    path.write_text(text, encoding="utf-8")
    return open_run(path)


def figures(run: RunLog) -> list[tuple[int, float, float | None]]:
    return [(event.step, event.loss, event.ms) for event in run.steps]


WHOLE = HEADER + "\n".join(STEPS) + "\n" + TAIL


def test_steps_and_validation_are_read(tmp_path: Path) -> None:
    run = read(tmp_path, WHOLE)
    assert figures(run)[1:] == [(86020, 2.800942, 1176.37), (86021, 2.800941, 1177.93), (86022, 2.800940, 1177.30)]
    assert run.evals[-1].val_bpb == 0.865752
    assert run.config["max_iters"] == 87000
    assert run.header.memory_gib == pytest.approx(9436.49 / 1024)


def test_the_models_own_figures_are_used(tmp_path: Path) -> None:
    header = read(tmp_path, WHOLE).header
    assert (header.parameters, header.flops_per_token) == (286_261_730, 8.87e8)
    assert header.device.name == "NVIDIA GeForce RTX 4070"
    assert header.config["block_size"] == 2048


def test_tokens_per_step_follow_from_speed_and_time(tmp_path: Path) -> None:
    assert read(tmp_path, "\n".join(STEPS)).header.tokens_per_step == 65536


@pytest.mark.parametrize("width", [45, 57, 64, 72, 79, 80, 99, 100, 101, 120, 132, 150, 160, 170])
def test_a_wrapped_log_reads_as_the_whole_one(tmp_path: Path, width: int) -> None:
    pieces = [line[i : i + width] for line in STEPS for i in range(0, len(line), width)]
    assert figures(read(tmp_path, "\n".join(pieces) + "\n" + TAIL)) == figures(read(tmp_path, "\n".join(STEPS)))


def test_a_terminal_that_trims_the_space_it_wrapped_at_reads_the_same(tmp_path: Path) -> None:
    text = "\n".join(STEPS).replace("bf16_mfu: 0.00", "bf16_mfu:\n0.00").replace("total time", "total\ntime")
    assert figures(read(tmp_path, text)) == figures(read(tmp_path, "\n".join(STEPS)))


def test_a_capture_that_begins_in_the_middle_of_a_line_loses_only_that_line(tmp_path: Path) -> None:
    assert len(read(tmp_path, "tal time: 1686.93m | eta: 19.3m\n" + "\n".join(STEPS)).steps) == 4


def test_a_second_attempt_that_crashed_does_not_lend_its_model_to_the_first(tmp_path: Path) -> None:
    crashed = (
        HEADER.replace('"n_layer": 12', '"n_layer": 20') + "Traceback (most recent call last):\nFileNotFoundError\n"
    )
    assert read(tmp_path, WHOLE + crashed).config["n_layer"] == 12


def test_samples_become_events(tmp_path: Path) -> None:
    samples = [sample.text for sample in read(tmp_path, WHOLE).samples]
    assert samples == ["The capital of France is Paris."]


def test_a_relative_that_overwrites_its_line_is_read(tmp_path: Path) -> None:
    text = "".join(
        f"\rstep {i:05d} ({i}.0%) | loss: 9.0{i} | lrm: 1.00 | dt: {100 + i}ms | tok/sec: 225,916 | mfu: 2.7% | epoch: 1 "
        "| remaining: 300s    "
        for i in range(4)
    )
    run = read(tmp_path, text + "\n---\nval_bpb:          1.142676\npeak_vram_mb:     4096.0\n")
    assert [event.step for event in run.steps] == [0, 1, 2, 3]
    assert (run.evals[-1].step, run.evals[-1].val_bpb) == (4, 1.142676)  # after four updates
    assert run.header.memory_gib == 4.0


def test_a_relative_without_total_time_is_read(tmp_path: Path) -> None:
    text = "validation loss: 10.9500\nstep     0 | loss: 10.955029 | lr 1.0000e-04 | norm: 15.3700 | dt: 2233.10ms | tok/sec: 234780.11\n"
    text += "step     1 | loss: 10.500000 | lr 2.0000e-04 | norm: 12.0000 | dt: 2200.00ms | tok/sec: 238312.73\n"
    run = read(tmp_path, text)
    assert [event.loss for event in run.steps] == [10.955029, 10.5]
    assert (run.steps[1].lr, run.steps[1].grad_norm) == (2e-4, 12.0)
    assert run.evals[0].val_loss == 10.95
    assert run.header.tokens_per_step == 524288
