"""Whatever goes away while a run trains (its screen, its folder, its log, its data), the work does not."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from gptfit.checkpoint.format import BEST, LAST, load_checkpoint
from gptfit.cli import main
from gptfit.config.keys import TrainConfig
from gptfit.errors import DataError, RunError
from gptfit.logs.events import End, Event, Step
from gptfit.logs.runlog import RunLogWriter, read_run
from gptfit.train.clock import BEAT_SECONDS, RunClock
from gptfit.train.courier import Courier
from gptfit.train.faults import SignalWatch
from gptfit.train.sinks import Report
from gptfit.train.train import train
from tests.small_runs import fork_gptfit, start_gptfit, told

MakeConfig = Callable[..., TrainConfig]
posix_only = pytest.mark.skipif(os.name != "posix", reason="signals and devices as POSIX has them")


def test_a_value_with_a_blank_is_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpu", "4070", "--out_dir=a b"]) == 0
    assert main(["plan", "--out_dir=a b", "--gpu=4070", "nosuch.py"]) == 1
    assert "nosuch.py" in capsys.readouterr().err
    for verb in ("train", "tune"):
        assert main([verb, "--out_dir=a b", "--batchsize=3"]) == 1
        assert "batchsize" in capsys.readouterr().err


@posix_only
def test_a_reader_of_the_output_that_goes_away_ends_nothing(small_config: MakeConfig, tmp_path: Path) -> None:
    process = start_gptfit(small_config(max_iters=30, lr_decay_iters=30, log_interval=1))
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()  # as `head -1` does
    assert process.stderr is not None
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), errors) == (0, "")
    assert load_checkpoint(tmp_path / "out").iter_num == 30


@posix_only
def test_a_terminal_that_is_gone_ends_nothing(small_config: MakeConfig, tmp_path: Path) -> None:
    """Every write to it is an I/O error from then on, on stdout and stderr alike."""
    import pty

    ours, theirs = pty.openpty()
    shown = f"import os\nfor stream in (0, 1, 2): os.dup2(os.open({os.ttyname(theirs)!r}, os.O_RDWR | os.O_NOCTTY), stream)\n"
    process = fork_gptfit(small_config(max_iters=30, lr_decay_iters=30, log_interval=1), before=shown)
    seen = b""
    while b"iter 2" not in seen:
        seen += os.read(ours, 1000)
    os.close(theirs)
    os.close(ours)
    process.communicate()
    assert process.returncode == 0
    assert load_checkpoint(tmp_path / "out").iter_num == 30


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_behind_the_output_ends_nothing(small_config: MakeConfig, tmp_path: Path) -> None:
    config = small_config()
    words = [f"--{key}={value}" for key, value in config.as_dict().items() if value != TrainConfig().as_dict()[key]]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gptfit", "train", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert load_checkpoint(tmp_path / "out").iter_num == 8


@posix_only
def test_a_second_hang_up_does_not_hurry_and_nohup_stays_in_force() -> None:
    with SignalWatch() as watch:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        assert watch.received == "SIGHUP"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalWatch() as watch:
            os.kill(os.getpid(), signal.SIGHUP)
            assert watch.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


@posix_only
def test_the_first_ctrl_c_is_answered_at_once_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step or a compilation may take minutes, in which nothing was said and a person would press it again."""
    screen, terminal = os.openpty()
    with os.fdopen(terminal, "w") as stderr, SignalWatch() as watch:
        monkeypatch.setattr(sys, "stderr", stderr)
        os.kill(os.getpid(), signal.SIGINT)
        assert watch.received == "SIGINT"
        assert b"stopping after this step, and saving; Ctrl-C again" in os.read(screen, 1000)
    os.close(screen)


def test_lines_the_disk_did_not_take_are_written_when_it_does(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    log = RunLogWriter(folder / "run.jsonl")
    for step in range(3):
        with pytest.raises(RunError, match=r"run\.jsonl: cannot be written"):
            log.append(Step(step))
    folder.mkdir()
    log.append(Step(3))
    log.close()
    assert [event.step for event in read_run(folder).steps] == [0, 1, 2, 3]


def test_a_log_in_trouble_is_said_once_and_stays_on(tmp_path: Path) -> None:
    said: list[Event] = []
    report = Report(said.append, is_master=True)
    report.open_sinks(tmp_path / "gone", TrainConfig())
    for step in range(3):
        report.emit(Step(step))
    (tmp_path / "gone").mkdir()
    report.emit(Step(3))
    report.close()
    assert len(told(said, "sink")) == 1
    assert len(read_run(tmp_path / "gone").steps) == 4


def test_half_a_line_of_a_killed_writer_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"event": "step", "step": 0}\n{"event": "st')
    with RunLogWriter(path) as log:
        log.append(Step(1))
    found = read_run(path)
    assert [event.step for event in found.steps] == [0, 1]
    assert found.notes == ()


def test_a_folder_deleted_while_training_is_made_again(small_config: MakeConfig, tmp_path: Path) -> None:
    def delete(event: Event) -> None:
        if isinstance(event, Step) and event.step == 5:
            shutil.rmtree(tmp_path / "out")

    assert train(small_config(), delete).step == 8
    assert load_checkpoint(tmp_path / "out").iter_num == 8
    assert read_run(tmp_path / "out").steps[-1].step == 7


def test_data_cut_while_training_is_one_line_and_the_steps_are_kept(
    small_config: MakeConfig, token_folder: Path, tmp_path: Path
) -> None:
    def cut(event: Event) -> None:
        if isinstance(event, Step) and event.step == 2:
            os.truncate(token_folder / "train.bin", 10)

    with pytest.raises(DataError, match=r"train\.bin: became shorter while it was read"):
        train(small_config(), cut)
    assert load_checkpoint(tmp_path / "out").iter_num >= 3


def test_only_our_own_temporary_files_are_removed(small_config: MakeConfig, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    mine = [out / name for name in ("mine.pt.tmp", "ckpt.pt.tmp", "best.pt.7.tmp", "x.pt.0bbfd16a-1.tmp")]
    for path in mine:
        path.write_text("a person's")
    left = out / "ckpt.pt.0bbfd16a-99999999.tmp"
    left.write_text("of a killed run")
    train(small_config(max_iters=2))
    assert all(path.read_text() == "a person's" for path in mine)
    assert not left.exists()


@pytest.mark.parametrize("seed", range(6))
def test_a_flipped_bit_is_noticed_and_the_previous_checkpoint_taken(
    small_config: MakeConfig, tmp_path: Path, seed: int
) -> None:
    train(small_config(max_iters=5))
    last = tmp_path / "out" / LAST
    good = load_checkpoint(last)
    whole = bytearray(last.read_bytes())
    weights = good.model["transformer.wte.weight"].numpy().tobytes()
    place = whole.find(weights[:64]) + 4 * (seed * 97 % 500) + 3  # an exponent's byte
    whole[place] ^= 1 << (seed % 8)
    last.write_bytes(whole)
    with pytest.raises(RunError, match="checksum"):
        load_checkpoint(last)
    events: list[Event] = []
    result = train(small_config(init_from="resume"), events.append)
    assert result.step == 8
    damaged = [event.message for event in told(events, "damaged")]
    assert len(damaged) == 1
    assert "checksum" in damaged[0]


def test_no_flipped_bit_gives_other_weights(small_config: MakeConfig, tmp_path: Path) -> None:
    """Anywhere in the file: it loads equal, or not at all."""
    train(small_config(max_iters=2))
    last = tmp_path / "out" / LAST
    good, whole = load_checkpoint(last), last.read_bytes()
    refused = 0
    for i in range(120):
        place = (i * 2_654_435_761) % len(whole)
        flipped = bytearray(whole)
        flipped[place] ^= 1 << (i % 8)
        last.write_bytes(flipped)
        try:
            found = load_checkpoint(last)
        except RunError:
            refused += 1
            continue
        assert all(torch.equal(tensor, good.model[name]) for name, tensor in found.model.items())
        assert found.iter_num == good.iter_num
    assert refused > 60


def test_a_checkpoint_whose_optimizer_has_other_shapes_is_refused(small_config: MakeConfig, tmp_path: Path) -> None:
    train(small_config(max_iters=2))
    for damage in (lambda t: t[:1], lambda t: t.t() if t.dim() == 2 else t[:1]):
        saved = torch.load(tmp_path / "out" / LAST, weights_only=True)
        entry = saved["optimizer"]["state"][0]
        entry["exp_avg"] = damage(entry["exp_avg"]).clone()
        torch.save(saved, tmp_path / "out" / LAST)
        for other in (tmp_path / "out").glob("ckpt-*.pt"):
            other.unlink()
        with pytest.raises(RunError, match="optimizer state is damaged"):
            train(small_config(init_from="resume"))


class Tracker:
    """A tracker as bad as other people's code can be."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action, self.seen = action, 0

    def append(self, event: Event) -> None:
        self.seen += 1
        self.action()

    def close(self) -> None:
        pass


def test_a_tracker_that_exits_or_hangs_does_not_touch_the_run() -> None:
    said: list[Event] = []
    report = Report(said.append, is_master=True)
    hanging = threading.Event()
    report._sinks = {
        "exits": Courier(Tracker(lambda: sys.exit("no more quota"))),
        "hangs": Courier(Tracker(lambda: hanging.wait() and None), last_seconds=0.1),
    }
    for step in range(50):
        report.emit(Step(step))
        time.sleep(0.001)
    report.close()
    hanging.set()
    messages = [event.message for event in told(said, "sink")]
    assert any("exits failed and is off: no more quota" in message for message in messages)
    assert any("hangs failed" in message for message in messages)
    assert len([event for event in said if isinstance(event, Step)]) == 50


def test_an_hour_of_standing_still_is_not_counted_and_a_slow_step_is() -> None:
    now = [1000.0]
    clock = RunClock(lambda: now[0])
    began = clock.now()
    now[0] += 20  # a step of 20 s, the beat late for once
    assert clock.now() - began == pytest.approx(20)
    for _ in range(100):  # a step of 100 s with its beats
        now[0] += BEAT_SECONDS
        clock.beat()
    assert clock.now() - began == pytest.approx(120)
    now[0] += 3600  # SIGSTOP, or the lid closed
    assert clock.now() - began == pytest.approx(121, abs=1.1)
    clock.beat()
    now[0] += 5
    assert clock.now() - began == pytest.approx(126, abs=1.1)


STOPS_ITSELF = """
import os, signal
from gptfit.train import clock, loop
clock.STOOD_STILL_SECONDS, clock.BEAT_SECONDS = 0.5, 0.05
micro_steps = loop.Loop._micro_steps
def stopping(self):
    if self.progress.step == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    return micro_steps(self)
loop.Loop._micro_steps = stopping
"""


@posix_only
def test_a_process_that_was_stopped_does_not_count_that_time(small_config: MakeConfig, tmp_path: Path) -> None:
    """SIGSTOP for real, inside a step; half a minute of standing still is made half a second here."""
    process = fork_gptfit(small_config(log_interval=1), before=STOPS_ITSELF)
    child = psutil.Process(process.pid)
    while child.status() != psutil.STATUS_STOPPED:
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(2.0)
    process.send_signal(signal.SIGCONT)
    process.communicate()
    assert process.returncode == 0
    steps = {step.step: step for step in read_run(tmp_path / "out").steps}
    wall = (steps[3].time or 0.0) - (steps[2].time or 0.0)
    assert wall > 2
    assert (steps[3].seconds or 0.0) - (steps[2].seconds or 0.0) < wall - 1.5


def test_max_hours_counts_the_hours_in_which_the_run_ran(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hours of SIGSTOP, or of sleep, after the third step; then steps of twenty seconds each."""
    slept = [0.0]
    clock = RunClock(lambda: time.perf_counter() + slept[0])
    monkeypatch.setattr(sys.modules["gptfit.train.train"], "RunClock", lambda: clock)

    def run(pause: float, hours: float, at: Callable[[int], bool]) -> tuple[str, list[Step]]:
        steps: list[Step] = []

        def sleep(event: Event) -> None:
            if isinstance(event, Step):
                steps.append(event)
                slept[0] += pause * at(event.step)
                clock.beat()

        return train(small_config(max_hours=hours), sleep).reason, steps

    reason, steps = run(7200.0, 1.0, lambda step: step == 3)
    assert (reason, len(steps)) == ("max_iters", 8)
    assert all(step.ms is not None and step.ms < 60_000 for step in steps)
    assert (steps[-1].seconds or 0.0) < 60
    reason, steps = run(20.0, 60 / 3600, lambda step: True)
    assert reason == "max_hours"
    assert len(steps) in (3, 4)


def test_a_time_of_day_set_back_changes_no_step_time(small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.time()
    moments = iter(start - 3600 * i for i in range(10_000))
    monkeypatch.setattr(time, "time", lambda: next(moments))
    events: list[Event] = []
    train(small_config(), events.append)
    steps = [event for event in events if isinstance(event, Step)]
    assert all(step.ms is not None and 0 < step.ms < 3.6e6 for step in steps)
    seconds = [step.seconds or 0.0 for step in steps]
    assert seconds == sorted(seconds)


def test_a_clock_set_back_does_not_end_a_resumed_run(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with RunLogWriter(path) as log:
        log.append(Step(0, time=1000.0))
        log.append(End("SIGINT", time=1001.0))
        log.append(Step(1, time=500.0))
    assert read_run(path).end is None


def test_a_model_too_large_to_allocate_is_one_line(small_config: MakeConfig) -> None:
    with pytest.raises(RunError, match=r"weights do not fit in this machine's memory"):
        train(small_config(vocab_size=90_000_000_000))


def test_folders_where_files_should_be_are_one_line(small_config: MakeConfig, tmp_path: Path) -> None:
    """Before the first step: a checkpoint that cannot be written at the end of a day is too late."""
    said = {".lock": "cannot be locked", "run.jsonl": "is no file", LAST: "is a folder", BEST: "is a folder"}
    for name, message in said.items():
        out = tmp_path / name
        (out / name).mkdir(parents=True)
        with pytest.raises(RunError, match=message):
            train(small_config(out_dir=str(out)))


def test_best_is_what_the_disk_holds_after_a_resume(small_config: MakeConfig, tmp_path: Path) -> None:
    """A run that died with its best model unwritten must not take the number for the model."""
    train(small_config(max_iters=4))
    (tmp_path / "out" / BEST).unlink()
    train(small_config(init_from="resume"))
    assert load_checkpoint(tmp_path / "out" / BEST).iter_num == 8
