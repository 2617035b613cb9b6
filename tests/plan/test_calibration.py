"""A plan from this device's own costs: added up, kept in the cache, and used before a data sheet."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from gptfit import measured
from gptfit.cli import main
from gptfit.config.keys import TrainConfig
from gptfit.estimate import Estimate
from gptfit.gpus import find
from gptfit.plan import memory, speed
from gptfit.plan.calibration import (
    HEAP,
    Calibration,
    as_gpu,
    calibration_from_json,
    memory_of,
    newest,
    place_of,
    process_bytes,
    record_of,
    step_parts,
)
from gptfit.plan.propose import Wish, propose
from gptfit.plan.result import DataFacts
from gptfit.plan.setting import Setting
from gptfit.plan.step_work import joined, kinds_of_work, micro_work
from gptfit.shape import ModelShape
from gptfit.tune.space import make_space
from gptfit.tune.trials import Machine
from gptfit.units import GIB

SHAPE = ModelShape(n_layer=4, n_head=4, n_embd=256, block_size=256, vocab_size=1024)
FREE = int(1.55 * GIB)
SETTING = Setting(SHAPE, micro_batch=8, accumulation=4, dtype="float32", compile=False)


def made(device: str = "AMD EPYC, 2 threads", kind: str = "cpu", rate: float = 1e-11, time: float = 1.0) -> Calibration:
    """A device whose costs are round numbers, so that sums can be checked by hand; all of them go with the rate."""
    micro_kinds, update_kinds = kinds_of_work()
    costs = dict.fromkeys(micro_kinds, 0.0) | {
        "blocks: token x weight": 6e-11,
        "attention: token x channel x position": 1e-10,
        "attention: token x channel x near position": 1e-10,
        "loss: token x weight": 1e-10,
        "stream: token x channel, modern": 1e-8,
        "tables: weight": 1e-9,
        "tables: weight, dense": 1e-9,
        "micro-step": 0.001,
    }
    updates = dict.fromkeys(update_kinds, 0.0) | {
        "adamw: weight": 2e-9,
        "muon: weight x channel": 1e-8,
        "update": 0.002,
    }
    ways = itertools.product(("gpt2", "modern"), ("float32", "bfloat16"), ("eager", "compiled"))
    return Calibration(
        device,
        "2.13",
        {dtype: _times(rate / 1e-11, costs) for dtype in ("float32", "bfloat16")},
        {dtype: _times(rate / 1e-11, updates) for dtype in ("float32", "bfloat16")},
        {"gpt2": [(128.0, 0.0)], "modern": [(128.0, 0.0), (256.0, 1e-9)]},
        kind=kind,
        saved_bytes={" ".join(way): 64.0 for way in ways},
        context_bytes={"eager": 2.5e8, "compiled": 7e8},
        total_bytes=2.0e10,
        time=time,
    )


def _times(scale: float, costs: dict[str, float]) -> dict[str, float]:
    return {kind: scale * cost for kind, cost in costs.items()}


def test_a_step_is_the_sum_of_its_work() -> None:
    n, c, layers = 2048, 256, 4
    parts = step_parts(SETTING, made())
    assert parts["blocks"] == pytest.approx(4 * 72 * n * c**2 * layers * 1e-11)
    assert parts["attention"] == pytest.approx(4 * n * c * 256 * layers * 2e-10)
    assert parts["head and loss"] == pytest.approx(4 * n * c * 1024 * 1e-10)
    assert parts["outside"] == pytest.approx(4 * 1024 * c * 1e-9)
    assert parts["launches"] == pytest.approx(4 * 0.001)
    assert parts["update"] == pytest.approx(SHAPE.n_weights * 2e-9 + 0.002)
    again = step_parts(replace(SETTING, checkpoint_activations=True), made())
    assert again["blocks"] == pytest.approx(parts["blocks"] * 4 / 3)
    assert again["attention"] == pytest.approx(parts["attention"] * 4 / 3)
    matrices = 12 * c**2 * layers
    muon = step_parts(replace(SETTING, optimizer="muon"), made())
    assert muon["update"] == pytest.approx(0.002 + (SHAPE.n_weights - matrices) * 2e-9 + matrices * c * 1e-8)


def test_a_position_far_away_costs_at_least_half_of_what_all_cost() -> None:
    """An attention kernel that works on 512 positions at a time skips what comes after a token only beyond them; a fit in
    which near ones cost nothing by themselves must not make far ones free."""
    near, far = (replace(SHAPE, block_size=positions) for positions in (512, 2048))
    seconds = [step_parts(replace(SETTING, shape=shape, micro_batch=1), made())["attention"] for shape in (near, far)]
    assert seconds[0] == pytest.approx(4 * 512 * 256 * 4 * 512 * 2e-10)
    assert seconds[1] == pytest.approx(4 * 2048 * 256 * 4 * (512 * 2e-10 + 1536 * 0.5e-10))


def test_in_chunks_the_heads_gradient_is_added_up_once_per_chunk() -> None:
    chunked = replace(SETTING, chunked_loss=True)
    whole, pieces = (joined(micro_work(setting)) for setting in (SETTING, chunked))
    assert pieces["loss: chunk x weight"] == 2048 / memory.FITTED.chunk_tokens * 1024 * 256
    assert (pieces["loss: token x entry"], pieces["loss: token x entry, in chunks"]) == (0, 2048 * 1024)
    assert (whole["loss: token x entry"], whole["loss: token x entry, in chunks"]) == (2048 * 1024, 0)
    assert pieces["loss: token x weight"] == whole["loss: token x weight"], "products are the same"


@pytest.mark.parametrize(
    "broken",
    [
        {"costs": {"float32": {"blocks: layer": 1.0}}},
        {"costs": {"float64x": {}}},
        {"update_costs": {"float32": {**dict.fromkeys(kinds_of_work()[1], 1.0), "update": -1.0}}},
        {"update_costs": {"float32": {**dict.fromkeys(kinds_of_work()[1], 1.0), "update": "x"}}},
        {"saved_by_compiling": {"gpt2": [[256, 1e-9], [128, 1e-9]]}},
        {"saved_by_compiling": {"gpt2": []}},
        {"saved_by_compiling": {"gpt2": [[256]]}},
    ],
)
def test_what_is_no_calibration_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises((ValueError, KeyError)):
        calibration_from_json({**made().as_json(), **broken})


def test_auto_is_the_format_the_device_would_train_in() -> None:
    """bfloat16 is timed on every CPU, also where it is no faster and nobody should use it."""
    assert place_of(made()).dtype == "float32"
    assert not as_gpu(made()).has_bf16
    assert place_of(replace(made(), dtype="bfloat16")).dtype == "bfloat16"


def test_memory_of_a_cpu_is_the_process_and_what_lives_at_the_loss() -> None:
    parts = memory_of(SETTING, made()).parts
    assert parts["workspace"] == 2.5e8
    assert parts["activations"] == pytest.approx((64 * 4 * HEAP.eager_activations + 4 * HEAP.passing) * 2048 * 256)
    assert parts["logits"] == pytest.approx(4 * 2048 * 1024 * HEAP.logits_tied)
    assert process_bytes(SETTING, made()) == pytest.approx(sum(parts.values()))
    compiled = memory_of(replace(SETTING, compile=True), made()).parts
    assert compiled["workspace"] == 7e8
    assert compiled["activations"] < parts["activations"], "compiled blocks have fewer passing tensors"
    modern = replace(SETTING, shape=replace(SHAPE, arch="modern"), compile=True)
    in_16_bits = replace(modern, dtype="bfloat16")
    passing = memory_of(modern, made()).parts["activations"] - memory_of(in_16_bits, made()).parts["activations"]
    assert passing == pytest.approx(4 * HEAP.passing_compiled * 2048 * 256)


def test_a_head_of_its_own_leaves_fewer_holes_than_one_that_is_the_embedding() -> None:
    """Whose gradient waits for the end of backward, between what the logits were; few tokens: the gradient itself counts."""
    apart = replace(SETTING, shape=replace(SHAPE, arch="modern"))
    few = {"tied": replace(SETTING, micro_batch=1), "apart": replace(apart, micro_batch=1)}
    assert memory_of(apart, made()).parts["logits"] == pytest.approx(4 * 2048 * 1024 * HEAP.logits)
    logits, head = 4 * 256 * 1024, 4 * 1024 * 256
    assert memory_of(few["tied"], made()).parts["logits"] == pytest.approx(3 * logits + HEAP.head_tied * head)
    assert memory_of(few["apart"], made()).parts["logits"] == pytest.approx(3 * logits + HEAP.head * head)


def test_a_cards_memory_takes_its_own_context_and_keeps_the_rest() -> None:
    card = made("NVIDIA GeForce RTX 4070", "cuda")
    setting = replace(SETTING, dtype="bfloat16", compile=True)
    difference = memory_of(setting, card).device.value - memory.predict(setting).device.value
    assert difference == pytest.approx(7e8 - memory.FITTED.context_bytes)


def test_a_calibrated_card_is_planned_by_its_own_costs_and_in_a_narrower_range() -> None:
    gpu = find("RTX 4070")
    by_sheet, own = speed.predict(SETTING, gpu), speed.predict(SETTING, gpu, calibrated=made("x", "cuda"))
    assert by_sheet is not None
    assert own is not None
    assert own.tokens_per_s.basis == "calibrated"
    width = own.tokens_per_s.high / own.tokens_per_s.low
    assert width < by_sheet.tokens_per_s.high / by_sheet.tokens_per_s.low
    odd = replace(SETTING, shape=replace(SHAPE, arch="modern", norm="layer"))
    fallen_back = speed.predict(odd, gpu, calibrated=made("x", "cuda"))
    assert fallen_back is not None
    assert fallen_back.tokens_per_s.basis == "fit", "an ingredient that was not timed"
    elsewhere = replace(SETTING, optimizer_device="cpu")
    on_host = speed.predict(elsewhere, gpu, calibrated=made("x", "cuda"))
    assert on_host is not None
    assert on_host.tokens_per_s.basis == "fit", "what goes over the bus was not timed"


def test_the_newest_calibration_of_a_device_is_found_and_a_broken_one_skipped(tmp_path: Path) -> None:
    path = tmp_path / "measured.jsonl"
    slow, fast = made(rate=2e-11, time=1.0), made(rate=1e-11, time=2.0)
    other = made("NVIDIA GeForce RTX 4070", "cuda", time=9.0)
    measured.append([record_of(fast), record_of(slow), record_of(other)], path)
    broken = record_of(fast)
    broken.values["costs"] = {"float32": {"micro-step": -1}}
    of_before = {name: value for name, value in record_of(fast).values.items() if "cost" not in name} | {"grids": {}}
    measured.append([replace(broken, time=99.0), replace(broken, values=of_before, time=98.0)], path)
    known = measured.read(path)
    assert newest(known, None) == fast
    assert newest(known, "NVIDIA GeForce RTX 4070") == other
    assert newest(known, "another card") is None
    assert calibration_from_json(json.loads(json.dumps(fast.as_json()))) == fast


def test_plan_gpu_here_uses_the_calibration_of_this_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPTFIT_CACHE", str(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    words = ["plan", "--gpu=here", "--n_layer=4", "--n_head=4", "--n_embd=256", "--block_size=256", "--vocab_size=1024"]
    words += ["--batch_size=8", "--gradient_accumulation_steps=4", "--dtype=float32", "--compile=False", "--json"]
    measured.append([record_of(made())])
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    seconds = sum(step_parts(SETTING, made()).values())
    assert answer["tokens_per_s"]["basis"] == "calibrated"
    assert answer["tokens_per_s"]["value"] == pytest.approx(SETTING.tokens_per_step / seconds)
    assert answer["memory"]["device_gib"]["basis"] == "calibrated"


def test_a_proposal_for_a_calibrated_cpu_is_what_its_own_costs_allow() -> None:
    data = DataFacts("mine", Estimate.exact(2e9), vocab_size=1024, tokenizer="gpt2")
    wishes = []
    for rate in (1e-11, 1e-12):
        own = made(rate=rate)
        wishes.append(Wish(as_gpu(own), 2.0, data, 1024, block_size=256, calibrated=own))
    known = [measured.Measurements(devices=(record_of(wish.calibrated),)) for wish in wishes if wish.calibrated]
    slow, fast = (propose(wish, here).choice.plan for wish, here in zip(wishes, known, strict=True))
    assert slow.speed is not None
    assert slow.speed.tokens_per_s.basis == "calibrated"
    assert fast.shape.parameters > slow.shape.parameters, "a faster machine trains a larger model in the same time"


@pytest.mark.parametrize("epochs", [1.0, 16.0])
def test_a_calibrated_cpu_is_proposed_the_second_edition_in_its_own_vocabulary(epochs: float) -> None:
    """Tables, projections and gates were never timed by themselves, but are products and look-ups of a known size."""
    own = made()
    here = measured.Measurements(devices=(record_of(own),))
    data = DataFacts("web", Estimate.exact(2e7 / epochs), tokenizer="gpt2", bytes_per_token=4.5)
    wish = Wish(None, 1.0, data, 50304, block_size=256, calibrated=own, source="web.parquet", shares={4096: 0.9})
    chosen = propose(wish, here).choice
    assert chosen.vocabulary == 4096
    assert chosen.plan.config.backout
    assert chosen.plan.speed is not None
    assert chosen.plan.speed.tokens_per_s.basis == "calibrated"


def test_what_the_second_edition_adds_costs_what_its_parts_cost() -> None:
    plain = replace(SETTING, shape=replace(SHAPE, arch="modern"), optimizer="muon")
    parts = {}
    for values in ("none", "tables", "projections"):
        parts[values] = step_parts(replace(plain, shape=replace(plain.shape, value_embeddings=values)), made())
    layers, tokens, width = 2, SETTING.micro_tokens * SETTING.accumulation, SHAPE.n_embd
    products = parts["projections"]["blocks"] - parts["none"]["blocks"]
    assert products == pytest.approx(layers * 6 * width**2 * tokens * 1e-11)
    looked_up = layers * SHAPE.vocab_size * width * 1e-9 * SETTING.accumulation
    assert parts["tables"]["outside"] - parts["none"]["outside"] >= looked_up * (1 - 1e-9)
    assert parts["tables"]["blocks"] == parts["none"]["blocks"]


def test_tune_begins_where_the_calibration_puts_the_largest_that_fits() -> None:
    """A process holds more than what lives in it, which the plan of a card does not count."""
    machine = Machine("AMD EPYC, 2 threads", "cpu", "float32", True, "2.13", 2, 2, FREE, FREE)
    config = TrainConfig(n_layer=4, n_head=4, n_embd=256, block_size=256, batch_size=64, compile=False, dtype="float32")
    own = made()
    by_plan = make_space(config, SHAPE, machine).start
    by_calibration = make_space(config, SHAPE, machine, calibrated=own).start
    setting = replace(SETTING, micro_batch=by_calibration)
    assert process_bytes(setting, own) <= 0.92 * FREE < process_bytes(replace(setting, micro_batch=by_plan), own)
