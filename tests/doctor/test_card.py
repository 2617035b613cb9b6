"""`gptfit doctor --card`: real checks in processes of their own, what is skipped and why, and the file to send."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gptfit import measured
from gptfit.cli import main
from gptfit.config.keys import TrainConfig
from gptfit.data.token_files import open_split
from gptfit.dataset import read_dataset
from gptfit.device.device import Device, find_device
from gptfit.device.processes import ALONE
from gptfit.doctor import card, card_checks, card_memory, card_numbers, card_runs, card_speed, checks
from gptfit.doctor.calibrate import measure_costs
from gptfit.doctor.card import CardReport, examine_card
from gptfit.doctor.kept_bytes import saved_bytes
from gptfit.doctor.verdict import Verdict
from gptfit.errors import DeviceError
from gptfit.plan.calibration import newest, step_parts
from gptfit.shape import ModelShape
from gptfit.train.evaluation import Evaluator
from gptfit.tune.trial_process import Ended
from gptfit.tune.trials import Machine
from gptfit.verbs import doctor
from tests import cuda_stand_in
from tests.cuda_stand_in import Card, install
from tests.forking import fork

CPU = TrainConfig(device="cpu", dtype="float32", compile=False)


@pytest.fixture
def cpu() -> Device:
    return find_device(CPU)


def some_checks(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def refuse(*_: object) -> None:
        raise DeviceError("not calibrated here")

    monkeypatch.setattr(card, "ALL", tuple(check for check in card_checks.ALL if check.name in names))
    monkeypatch.setattr(card, "calibrate", refuse)


def test_each_check_runs_in_a_process_of_its_own_and_the_rest_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    some_checks(monkeypatch, "muon", "spilling", "float16 scale")
    report = examine_card(CPU)
    found = {line.check: line.verdict for line in report.lines}
    assert found["muon"].level == "ok"
    assert found["spilling"].level == found["float16 scale"].level == "skipped"
    assert "CPU" in found["spilling"].text
    assert found["calibration"].level == "error"
    assert report.has_error
    assert json.loads(json.dumps(report.as_json()))["checks"][0]["check"] in found


def test_a_check_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = card_checks.Check("growth", card_memory.growth, limit_s=0.5)
    monkeypatch.setattr(card, "ALL", (slow,))
    monkeypatch.setattr(card, "calibrate", lambda *_: (_ for _ in ()).throw(DeviceError("no")))
    line = next(line for line in examine_card(CPU).lines if line.check == "growth")
    assert line.verdict.level == "error"
    assert "time limit" in line.verdict.text


def test_on_a_cpu_checks_beside_others_have_one_thread_and_the_longest_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two with two threads each wait for each other's: 200 small steps took 80 s of processor time instead of 10."""
    asked: list[tuple[str, int]] = []

    def run(request: dict[str, object], *_: object, **__: object) -> Ended:
        asked.append((str(request["check"]), int(str(request["threads"]))))
        return Ended("ok", 0.1, values={"level": "ok", "text": "", "remedy": "", "values": {}})

    some_checks(monkeypatch, "copies", "muon", "growth", "compiled gpt2")
    monkeypatch.setattr(card, "run_process", run)
    told = [line.check for line in examine_card(CPU).lines]
    assert [name for name, _ in asked][:2] == ["copies", "compiled gpt2"]
    assert dict(asked) == {"copies": 0, "compiled gpt2": 0, "muon": 1, "growth": 1}
    assert told[:4] == ["copies", "compiled gpt2", "muon", "growth"], "in the order of the list"


@pytest.mark.parametrize("problem", [None, "there is no C++ compiler"])
def test_where_the_check_of_compiled_models_finds_no_compiler_nothing_compiled_is_calibrated(
    monkeypatch: pytest.MonkeyPatch, problem: str | None
) -> None:
    calibrated: list[Machine] = []

    def calibrate(config: TrainConfig, on_stage: object, machine: Machine, *_: object) -> None:
        calibrated.append(machine)
        raise DeviceError("no")

    def run_here(request: dict[str, str], *_: object, **__: object) -> Ended:
        return Ended("ok", 0.1, values=asdict(card_checks.run_check(request["check"], CPU)))

    some_checks(monkeypatch, "compiled gpt2", "compiled modern")
    monkeypatch.setattr(card_runs, "find_compile_problem", lambda device: problem)
    monkeypatch.setattr(card_runs, "_compile_and_compare", lambda device, changes: (0, 0.0, 0.0))
    monkeypatch.setattr(card, "run_process", run_here)
    monkeypatch.setattr(card, "calibrate", calibrate)
    examine_card(CPU)
    assert [machine.compile_problem for machine in calibrated] == [problem]


def test_the_numbers_of_this_cpu_are_right(cpu: Device) -> None:
    for check in (card_numbers.loss_and_gradients, card_numbers.sampling, card_numbers.attention, card_runs.batches):
        assert check(cpu).level == "ok", check(cpu)


def test_a_wrong_gradient_is_a_problem(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    real = card_numbers.token_loss
    monkeypatch.setattr(card_numbers, "token_loss", lambda *a, **k: real(*a, **k) * (1.01 if a[3] else 1.0))
    assert card_numbers.loss_and_gradients(cpu).level == "error"


def test_batches_that_are_overwritten_before_they_are_read_are_a_problem(
    cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "put", lambda self, tensor: tensor + 1)
    assert card_runs.batches(cpu).level == "error"


def test_a_resumed_run_that_differs_is_a_problem(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert card_runs.resume(cpu).level == "ok"
    original = card_runs.load_checkpoint

    def nudged(folder: Path) -> object:
        found = original(folder)
        if folder.name == "halves":
            next(iter(found.model.values())).add_(1e-3)
        return found

    monkeypatch.setattr(card_runs, "load_checkpoint", nudged)
    assert card_runs.resume(cpu).level == "error"


def test_what_is_kept_for_backward_is_counted_once_and_without_the_weights() -> None:
    weight = torch.nn.Parameter(torch.randn(32, 16))
    x = torch.randn(8, 16, requires_grad=True)
    y = torch.nn.functional.gelu(x @ weight.t())  # keeps x, the weight, and the product
    assert saved_bytes(y, [weight]) == 4 * (8 * 16 + 8 * 32)


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch) -> Card:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    return install(monkeypatch, Card())


def on_card() -> Device:
    return find_device(TrainConfig(device="cuda", dtype="bfloat16"))


@pytest.mark.parametrize(
    ("capability", "built_for", "remedy"),
    [
        ((8, 9), ["sm_80", "sm_86", "sm_90"], None),
        ((12, 0), ["sm_90", "compute_90"], None),  # which the driver compiles
        ((9, 0), ["sm_90a"], None),
        ((12, 0), ["sm_80", "sm_86", "sm_90"], "pytorch.org/get-started/locally has a build"),
        ((6, 1), ["sm_75", "sm_80"], "an older torch build has code for compute capability 6.1"),
    ],
)
def test_a_build_without_code_for_the_card_is_a_problem_for_both_doctors(
    nvidia: Card, capability: tuple[int, int], built_for: list[str], remedy: str | None
) -> None:
    """A new card with an old build was ready to train by `doctor` alone."""
    nvidia.capability, nvidia.built_for = capability, built_for
    verdict, problem = card_speed.build(on_card()), checks._card(on_card())
    assert verdict.level == problem.level == ("error" if remedy else "ok")
    assert remedy is None or (verdict.remedy == problem.fix and verdict.remedy.startswith(remedy))


def test_a_context_is_what_this_process_takes_and_not_all_that_is_in_use(
    nvidia: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program has a GiB of this card."""
    nvidia.has_context = False
    monkeypatch.setattr(card_memory.torch, "ones", lambda *_, **__: None)
    monkeypatch.setattr(card_memory.torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(Device, "synchronize", lambda self: None)
    verdict = card_checks.run_check("memory counts", TrainConfig(device="cuda", dtype="bfloat16"))
    assert verdict.values["context"] == nvidia.context
    assert "a process without a model takes 512 MiB" in verdict.text


def test_the_last_batch_of_a_compiled_models_evaluation_is_smaller(
    cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[TrainConfig] = []
    windows: list[int] = []

    def look(config: TrainConfig, reporter: object) -> None:
        file = open_split(read_dataset(Path(config.dataset)), "val", config.block_size, card_runs.VOCAB_SIZE)
        evaluator = Evaluator(config, {}, {"val": file}, SimpleNamespace(processes=ALONE))  # type: ignore[arg-type]
        windows.append(len(evaluator._fixed_starts("val")))
        configs.append(config)
        raise StopIteration

    monkeypatch.setattr(card_runs, "train", look)
    monkeypatch.setattr(card_runs, "find_compile_problem", lambda device: None)
    for check in (card_runs.compiled_gpt2, card_runs.compiled_modern):
        with pytest.raises(StopIteration):
            check(cpu)
    assert all(count % config.batch_size for count, config in zip(windows, configs, strict=True)), windows


@pytest.mark.skipif(sys.platform != "linux", reason="a CPU's memory is limited as Linux does it")
def test_a_step_of_this_cpu_runs_out_at_the_cap_and_the_next_goes_on() -> None:
    program = (
        "from gptfit.config.keys import TrainConfig\n"
        "from gptfit.doctor import card_checks, card_memory\n"
        "card_memory.PROBE_BYTES = 2**27\n"
        "print(card_checks.run_check('out of memory', TrainConfig(device='cpu', dtype='float32')))\n"
    )
    output, errors = fork(program).communicate()
    assert output.startswith("Verdict(level='ok', text='at a cap of 128 MiB more a step ran out"), output + errors


def test_a_card_that_nvml_does_not_know_by_its_identity_is_a_warning(
    nvidia: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "driver 570.86.15" in card_speed.build(on_card()).text
    monkeypatch.setitem(sys.modules, "pynvml", cuda_stand_in.nvml([Card(uuid="another")]))
    verdict = card_speed.build(on_card())
    assert verdict.level == "warning"
    assert "UUID" in verdict.remedy


def test_one_card_has_nothing_to_exchange_and_a_system_that_says_when_it_is_full_nothing_to_cap(nvidia: Card) -> None:
    assert card_runs.two_processes(on_card()).level == "skipped"
    assert card_memory.spilling(on_card()).level == "ok"


def test_every_check_says_why_it_is_skipped_and_what_to_do_where_it_fails(cpu: Device) -> None:
    for check in card_checks.ALL:
        assert set(check.kinds) >= {"cuda"}, check.name
        assert check.why_not or "cpu" in check.kinds, check.name
    with pytest.raises(AssertionError, match="what to do"):
        Verdict("warning", "memory grows")


def test_the_screen_is_80_columns_wide_and_no_word_is_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text, remedy = "0.50 GiB asked for, 0.75 GiB shown: shown differs", f"close other programs, see {'a/' * 20}log.txt"
    doctor._show_line(card.CardLine("memory counts", Verdict("warning", text, remedy), 1.0))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines).split()) == f"warning memory counts {text}; {remedy}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_of_it_on_this_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes what applies, leaves card.json and a calibration that `plan --gpu here` finds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPTFIT_CACHE", str(tmp_path / "cache"))
    reports: list[CardReport] = []
    real = card.examine_card
    monkeypatch.setattr(card, "examine_card", lambda *a: reports.append(real(*a)) or reports[-1])
    main(["doctor", "--card", "--device=cpu"])
    levels = {line.check: line.verdict.level for line in reports[0].lines}
    assert set(levels) == {check.name for check in card_checks.ALL} | {card.CALIBRATION, card.PLAN}
    assert [name for name, level in levels.items() if level == "error"] == []
    assert json.loads((tmp_path / "card.json").read_text())["calibration"]["kind"] == "cpu"
    assert newest(measured.read(), None) is not None


def test_a_calibration_knows_what_trains_here() -> None:
    """Of three models it is a bad one, but a whole record."""
    told: list[str] = []
    found = measure_costs(CPU, False, 0.0, told.append, least=3)
    setting = card.Setting(ModelShape(2, 2, 128, 64, 256), 1, dtype="float32", compile=False)
    whole = replace(found, context_bytes={"eager": 1.0})
    assert whole.knows(setting), "all but what a process of its own tells"
    assert not whole.knows(replace(setting, compile=True))
    assert 1e-5 < sum(step_parts(setting, whole).values()) < 10
    assert found.saved_bytes["gpt2 float32 eager"] == pytest.approx(64, rel=0.05)
    assert told
