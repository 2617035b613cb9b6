"""Plans for several GPUs: what is sent, what is hidden, what one process holds, and shares of unlike cards."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gptfit.cli import main
from gptfit.config.keys import TrainConfig
from gptfit.gpus import find
from gptfit.plan import link, memory
from gptfit.plan.check import way_up
from gptfit.plan.setting import Setting, Spread
from gptfit.shape import ModelShape
from gptfit.shares import share_out, slowest

GPT2 = ModelShape(12, 12, 768, 1024, 50304)
EIGHT = Setting(GPT2, micro_batch=8, accumulation=8, processes=8)


def test_a_ring_sends_each_gradient_almost_twice_whatever_the_accumulation() -> None:
    assert link.exchanged_bytes(EIGHT) == pytest.approx(2 * 7 / 8 * 4 * GPT2.n_weights)
    assert link.exchanged_bytes(replace(EIGHT, accumulation=1)) == link.exchanged_bytes(EIGHT)


def test_sharded_blocks_are_gathered_twice_in_every_micro_step_and_gradients_summed_in_the_last() -> None:
    sharded = replace(EIGHT, parallel="fsdp")
    outside = (50304 + 1024 + 2) * 768
    gathered = 2 * 2 * (GPT2.n_weights - outside) + 4 * outside
    assert link.exchanged_bytes(sharded) == pytest.approx(7 / 8 * (8 * gathered + 4 * GPT2.n_weights))
    early = replace(sharded, sums_late=False)
    assert link.exchanged_bytes(early) - link.exchanged_bytes(sharded) == pytest.approx(7 / 8 * 7 * 4 * GPT2.n_weights)


def test_what_compute_cannot_hide_is_at_least_the_embeddings_part() -> None:
    card = find("H100")
    slow, fast = link.traffic(EIGHT, card, micro_step_s=0.0), link.traffic(EIGHT, card, micro_step_s=10.0)
    assert slow.exposed_seconds == pytest.approx(slow.seconds)
    embeddings = (50304 + 1024) * 768 / GPT2.n_weights
    assert fast.exposed_seconds == pytest.approx(fast.seconds * embeddings)
    assert link.traffic(replace(EIGHT, processes=1), card, 0.1).bytes_sent == 0


def test_the_network_between_machines_is_the_slowest_link() -> None:
    two_machines = replace(EIGHT, nodes=2, network_gbs=0.5)
    assert link.slowest_gbs(two_machines, find("4090")) == 0.5
    assert link.slowest_gbs(replace(two_machines, network_gbs=50.0), find("4090")) == link.FITTED.geforce_gbs


def test_ddp_holds_the_gradients_through_the_whole_step_and_fsdp_an_nth_of_the_state() -> None:
    one = Setting(GPT2, micro_batch=8)
    two = replace(one, processes=2)
    assert memory.predict(two).allocated.value - memory.predict(one).allocated.value == 4 * GPT2.n_weights
    large = ModelShape(48, 25, 1600, 1024, 50304)
    whole, sharded = (Setting(large, 1, 8, processes=8, parallel=how) for how in ("ddp", "fsdp"))
    parts = [memory.predict(setting).parts for setting in (whole, sharded)]
    assert parts[1]["optimizer"] == pytest.approx(parts[0]["optimizer"] / 8)
    assert memory.predict(sharded).device.value < memory.predict(whole).device.value / 2


def test_shares_end_sooner_than_any_other_and_leave_nobody_out() -> None:
    seconds = [1.0, 1.7, 3.1]
    best = min(slowest(seconds, (a, b, 20 - a - b)) for a in range(1, 19) for b in range(1, 20 - a) if 20 - a - b >= 1)
    shares = share_out(seconds, 20)
    assert sum(shares) == 20
    assert slowest(seconds, shares) == pytest.approx(best)
    assert share_out([1.0, 1000.0], 4) == [3, 1]


def plan_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    main(["plan", "--json", "--batch_size=8", "--gradient_accumulation_steps=64", *words])
    answer: dict[str, object] = json.loads(capsys.readouterr().out)
    return answer


def test_plan_of_two_machines_says_what_is_sent_and_that_it_is_no_measurement(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = plan_json(capsys, "--gpu", "H100", "--gpus", "8", "--nodes", "2")
    several = answer["several"]
    assert isinstance(several, dict)
    assert (answer["gpus"], several["nodes"]) == (16, 2)
    assert several["bytes_per_step"] == pytest.approx(2 * 15 / 16 * 4 * 124_373_760)
    assert several["scaling"]["basis"] == "spec"
    assert several["scaling"]["low"] < several["scaling"]["value"] < several["scaling"]["high"] <= 1
    assert several["exposed_ms"] <= several["link_ms"]


def test_plan_of_unlike_cards_gives_shares_and_their_gain(capsys: pytest.CaptureFixture[str]) -> None:
    several = plan_json(capsys, "--gpu", "4090+3090")["several"]
    assert isinstance(several, dict)
    fast, slow = several["shares"]
    assert fast + slow == 64
    assert fast > slow
    assert 1.2 < several["gain_over_equal_shares"] < 2
    assert main(["plan", "--gpu", "4090+3090", "--gpus", "2"]) == 1
    assert "leave --gpus" in capsys.readouterr().err


def test_a_divided_model_has_equal_shares_of_unlike_cards_as_training_gives_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    divided = plan_json(capsys, "--gpu", "4090+3060", "--parallel=fsdp")
    several = divided["several"]
    assert isinstance(several, dict)
    assert several["shares"] == [32, 32]
    assert several["gain_over_equal_shares"] is None
    rates = divided["tokens_per_s"], plan_json(capsys, "--gpu", "4090+3060")["tokens_per_s"]
    equal, by_speed = (rate["value"] for rate in rates if isinstance(rate, dict))
    assert by_speed > 2 * equal


def test_the_ladder_ranks_unlike_cards_by_what_all_of_them_do() -> None:
    from gptfit.plan.plan import plan

    cards = (find("4090"), find("3060"))
    config = TrainConfig(n_layer=24, n_head=16, n_embd=1024)
    answer = plan(config, config.shape(), cards[1], processes=2, spread=Spread(cards=cards))
    assert answer.ladder is not None
    way = answer.ladder.way
    assert way is not None
    assert "parallel" not in way.keys
    fitting = plan(config.replace(**way_up(answer)), config.shape(), cards[1], processes=2, spread=Spread(cards=cards))
    assert fitting.fits
    assert fitting.speed is not None
    assert fitting.speed.tokens_per_s.value > 2 * 17_900  # of the divided model, whose shares are equal


def test_a_nonsense_number_of_machines_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpu", "4090", "--nodes", "0"]) == 1
    assert "--nodes 0 makes no sense" in capsys.readouterr().err


def test_a_single_gpu_has_nothing_to_say_about_several() -> None:
    from gptfit.plan.plan import plan

    config = TrainConfig(batch_size=8)
    assert plan(config, config.shape(), find("4070")).several is None
