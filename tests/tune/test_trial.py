"""A trial's process: it measures, it runs out of memory, it hangs, it crashes, and it never outlives its parent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gptfit.config.keys import TrainConfig
from gptfit.errors import DeviceError
from gptfit.tune.measuring import find_machine
from gptfit.tune.trial_process import COMMAND, run_process
from gptfit.tune.trials import timing_from_json

TINY = TrainConfig(
    n_layer=1, n_head=2, n_embd=32, block_size=32, vocab_size=128, batch_size=2, gradient_accumulation_steps=2,
    device="cpu", dtype="float32", compile=False,
)  # fmt: skip


def request(config: TrainConfig = TINY, **changes: Any) -> dict[str, Any]:
    plain = {"purpose": "trial", "used_bytes": None, "threads": 1, "limit_bytes": 0, "timed_s": 0.1, "has_eval": True}
    return {**plain, "config": config.as_dict(), "vocab_size": config.vocab_size, **changes}


def python(program: str) -> tuple[str, ...]:
    return (sys.executable, "-c", program)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_trial_measures_time_and_memory() -> None:
    stages: list[str] = []
    ended = run_process(request(), 120, stages.append)
    assert ended.outcome == "ok", ended.message
    assert stages == ["building", "warming up", "timing", "evaluating"]
    timing = timing_from_json(ended.values)
    assert 0 < timing.ms_low <= timing.ms_per_micro_step <= timing.ms_high
    assert timing.samples >= 4
    assert timing.cpu_ms is not None
    assert timing.cpu_share is not None
    assert 0 < timing.cpu_share < 1.05, "one thread cannot use more processor time than passes"
    assert timing.ms_per_update > 0
    assert timing.ms_per_eval is not None
    assert timing.device.endswith(", 1 threads"), "the trial really ran with the threads it was given"
    assert timing.memory_gib is not None
    assert 0.1 < timing.memory_gib < 5
    assert timing.peak_tflops is not None
    assert timing.peak_tflops > 0
    assert not timing.compiled


def test_a_hard_memory_limit_is_reported_as_out_of_memory() -> None:
    # 256 x 512 x 4096 float32 logits are 2 GiB; the process may have 1.
    large = TINY.replace(batch_size=256, block_size=512, vocab_size=4096, chunked_loss=False)
    ended = run_process(request(large, limit_bytes=2**30), 120)
    assert (ended.outcome, ended.message) == ("oom", "out of memory")


def test_a_trial_that_hangs_is_ended_at_its_limit_with_everything_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = (
        "import os, subprocess, time\n"
        f"child = subprocess.Popen(['sleep', '600'])\nopen({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(600)"
    )
    ended = run_process({}, 3.0, command=python(program))
    assert ended.outcome == "timeout"
    assert ended.message == "ended at its time limit of 3 s"
    deadline = time.monotonic() + 10
    while any(is_running(int(pid)) for pid in pids.read_text().split()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(int(pid)) for pid in pids.read_text().split())


@pytest.mark.parametrize(
    ("program", "outcome", "message"),
    [
        ("import os; os.abort()", "crash", "signal SIGABRT"),
        ("import sys; print('first\\nno such kernel', file=sys.stderr); sys.exit(3)", "crash", "exit code 3: no such kernel"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "oom", "killed by the system, as it does when memory runs out"),
        ("import os, sys; print('what():  std::bad_alloc', file=sys.stderr, flush=True); os.abort()", "oom", "out of memory in native code"),
        ("import json; print(json.dumps({'event': 'error', 'message': 'needs a card'}))", "crash", "needs a card"),
    ],
)  # fmt: skip
def test_how_a_process_ended_is_told_apart(program: str, outcome: str, message: str) -> None:
    ended = run_process({}, 60, command=python(program))
    assert (ended.outcome, ended.message) == (outcome, message)


def test_a_trial_ends_when_its_parent_is_gone() -> None:
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        process.stdin.write(json.dumps(request(timed_s=600.0)) + "\n")
        process.stdin.flush()
        while json.loads(process.stdout.readline()).get("name") != "timing":
            pass
        process.stdin.close()
        assert process.wait(timeout=60) == 0
        assert "done" not in process.stdout.read()


def test_what_libraries_print_does_not_disturb_the_answers() -> None:
    program = (
        "import os, sys\nfrom gptfit.tune import trial\n"
        "answers = trial._own_stdout()\nprint('noise'); os.system('echo more noise')\n"
        'answers.write(\'{"event": "machine", "n": 1}\\n\'); answers.flush()'
    )
    ended = run_process({}, 60, command=python(program))
    assert (ended.outcome, ended.values["n"]) == ("ok", 1)


def test_the_machine_is_asked_without_touching_the_device_here() -> None:
    machine = find_machine(TINY)
    assert machine.kind == "cpu"
    assert machine.dtype == "float32"
    assert machine.threads == int(os.environ["OMP_NUM_THREADS"])
    assert machine.free_bytes > 0
    assert machine.compile_problem is None, "not asked for when compile is off"


def test_a_device_that_is_not_there_is_one_line() -> None:
    with pytest.raises(DeviceError, match="device = 'cuda' but torch"):
        find_machine(TINY.replace(device="cuda"))
