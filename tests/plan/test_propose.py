"""Proposals fit the card, the time and the data, and say so in files both programs read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from gptfit.config import recipe
from gptfit.config.keys import DEFAULTS, GPTFIT_KEYS
from gptfit.config.read import load_config
from gptfit.errors import DataError, DeviceError
from gptfit.estimate import Estimate
from gptfit.gpus import GPU, find
from gptfit.measured import MeasuredSpeed, Measurements
from gptfit.plan import nearby, speed
from gptfit.plan import propose as search
from gptfit.plan.calibration import Calibration, place_for
from gptfit.plan.candidates import Pace, Wish, candidates
from gptfit.plan.many_epochs import keys_for_epochs
from gptfit.plan.propose import TIE, WEIGHTS, Proposal
from gptfit.plan.proposed_config import config_of
from gptfit.plan.resolve import setting_of
from gptfit.plan.result import DataFacts
from gptfit.plan.setting import Setting, speed_key
from gptfit.shape import ModelShape

WEB = DataFacts("fineweb", Estimate.exact(3e9), tokenizer="gpt2")
WISH = Wish(find("4070"), hours=12, data=WEB, vocab_size=50304)
_answers: dict[str, search.Proposals] = {}


def propose(wish: Wish, measurements: Measurements | None = None) -> search.Proposals:
    """Many tests look at the same answer."""
    asked = repr((wish, measurements))
    if asked not in _answers:
        _answers[asked] = search.propose(wish, measurements)
    return _answers[asked]


@pytest.mark.parametrize("gpu", ["RTX 3050", "4070", "4090", "T4", "GTX 1080 Ti", "A100 80GB"])
@pytest.mark.parametrize("hours", [1, 24])
def test_a_proposal_starts_fits_and_ends_in_time(gpu: str, hours: float) -> None:
    answer = propose(replace(WISH, gpu=find(gpu), hours=hours))
    chosen = answer.choice.plan
    assert chosen.runs
    assert chosen.fits
    assert chosen.hours is not None
    assert 0.9 * hours <= chosen.hours.high <= 1.01 * hours, "the slow end fits, and the time is used"
    assert chosen.config.max_hours == hours
    assert not chosen.errors


def test_twelve_hours_of_nanogpt_on_a_4070_is_gpt2_small_at_8() -> None:
    """What its owner arrived at after six attempts."""
    chosen = propose(replace(WISH, recipes=("gpt2",), only_nanogpt_keys=True)).choice.plan
    assert 90e6 < chosen.shape.parameters < 160e6
    assert chosen.config.batch_size == 8
    assert chosen.tokens_per_step == 524_288


def bits(proposal: Proposal) -> float:
    loss = proposal.plan.loss
    assert loss is not None
    assert loss.bits_per_byte is not None
    return loss.bits_per_byte.value


@pytest.mark.parametrize("hours", [1, 12, 72])
def test_the_choice_has_the_lowest_expected_loss_of_what_the_hours_allow(hours: float) -> None:
    answer = propose(replace(WISH, hours=hours))
    assert answer.choice.plan.shape.arch == "modern"
    for other in answer.alternatives:
        if other.title not in ("larger, longer", "longer", "GPT-2's weights"):
            assert bits(other) >= bits(answer.choice) * (1 - 2 * TIE), other.title


def test_smaller_and_faster_is_both() -> None:
    answer = propose(WISH)
    (quick,) = [other for other in answer.alternatives if other.title == "smaller, faster"]
    assert quick.plan.shape.parameters < answer.choice.plan.shape.parameters
    assert quick.plan.seconds is not None
    assert answer.choice.plan.seconds is not None
    assert quick.plan.seconds.value < 0.5 * answer.choice.plan.seconds.value


@pytest.mark.parametrize("tokens", [0.75e9, 3e9])
def test_larger_is_said_of_larger_models_only(tokens: float) -> None:
    """Three times the hours over little data are more epochs, not always more parameters."""
    answer = propose(replace(WISH, data=replace(WEB, tokens=Estimate.exact(tokens)), hours=24))
    (long,) = [other for other in answer.alternatives if other.title.endswith("longer")]
    is_larger = long.plan.shape.parameters > answer.choice.plan.shape.parameters
    assert long.title == ("larger, longer" if is_larger else "longer")
    assert long.plan.seconds is not None
    assert answer.choice.plan.seconds is not None
    assert long.plan.seconds.value > 1.5 * answer.choice.plan.seconds.value


def test_only_nanogpt_keys_leave_nothing_that_stock_nanogpt_does_not_know() -> None:
    chosen = propose(replace(WISH, recipes=("gpt2",), only_nanogpt_keys=True)).choice.plan.config
    changed = {key for key, value in chosen.as_dict().items() if value != DEFAULTS[key]}
    assert not changed & GPTFIT_KEYS


def test_more_hours_make_a_larger_model_and_a_lower_loss() -> None:
    short, long = (propose(replace(WISH, hours=hours)).choice.plan for hours in (3, 100))
    assert long.shape.parameters > short.shape.parameters
    assert short.loss is not None
    assert long.loss is not None
    assert long.loss.loss.value < short.loss.loss.value


@pytest.mark.parametrize(("block_size", "has_our_keys"), [(8192, False), (16384, True)])
def test_a_long_context_on_a_small_card_offers_one_that_nanogpt_can_run(block_size: int, has_our_keys: bool) -> None:
    """The choice has keys of ours, or would need more memory in nanoGPT, which returns its logits."""
    answer = propose(replace(WISH, gpu=find("RTX 3050"), hours=200, block_size=block_size, recipes=("gpt2",)))
    config = answer.choice.plan.config
    assert (config.chunked_loss is True or bool(config.checkpoint_activations)) is has_our_keys
    (plain,) = [other for other in answer.alternatives if other.title == "plain nanoGPT"]
    assert plain.plan.config.chunked_loss == "auto"
    assert not plain.plan.config.checkpoint_activations
    assert plain.plan.fits
    assert not [problem for problem in plain.plan.problems if problem.where == "chunked_loss"]


def test_where_modern_is_the_choice_plain_nanogpt_is_beside_it() -> None:
    answer = propose(WISH)
    assert answer.choice.plan.config.optimizer == "muon"
    (plain,) = [other for other in answer.alternatives if other.title == "plain nanoGPT"]
    assert plain.plan.config.arch == "gpt2"
    assert any("GGUF" in note for note in answer.choice.plan.notes)


def test_several_gpus_share_the_accumulation() -> None:
    chosen = propose(replace(WISH, gpu=find("4090"), processes=2)).choice.plan
    assert chosen.config.gradient_accumulation_steps % 2 == 0
    assert chosen.runs


@pytest.mark.parametrize("changes", [{"hours": 0.0001}, {"gpu": replace(find("4070"), vram_gib=0.0)}])
def test_where_nothing_fits_one_line_says_so(changes: dict[str, object]) -> None:
    with pytest.raises(DeviceError, match="no model fits"):
        propose(replace(WISH, **changes))  # type: ignore[arg-type]


def test_a_card_without_a_known_rate_cannot_be_planned_in_hours() -> None:
    unknown = replace(find("4070"), name="RTX 9999", bf16_tflops=None, fp32_tflops=None, measured_low_tflops=None)
    with pytest.raises(DeviceError, match="no arithmetic rate"):
        propose(replace(WISH, gpu=unknown))


def test_a_written_proposal_reads_back_equal(tmp_path: object) -> None:
    from pathlib import Path

    from gptfit.config.write import render

    assert isinstance(tmp_path, Path)
    config = propose(WISH).choice.plan.config
    path = tmp_path / "mine.py"
    path.write_text(render(config, "title"), encoding="utf-8")
    assert load_config([path]).config == config


MDN = DataFacts("web_mdn", Estimate.exact(14.7e6), tokenizer="gpt2", bytes_per_token=3.34)
SHAKESPEARE = DataFacts("shakespeare_char", Estimate.exact(1_003_854), 65, "chars", 1.0)


def test_hours_are_used_on_little_data_until_they_help_no_more() -> None:
    """14.7M tokens: it was 6x192 for eight minutes, whatever the hours."""
    plans = [propose(replace(WISH, data=MDN, hours=hours)).choice.plan for hours in (0.05, 0.5, 12, 72)]
    for plan in plans:
        assert plan.loss is not None
        assert plan.epochs is not None
    losses = [plan.loss.loss.value for plan in plans if plan.loss]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1] + 0.1
    assert plans[2].shape.tied_parameters > 4 * plans[0].shape.tied_parameters
    assert plans[2].seconds is not None
    assert plans[2].seconds.value > 1200


@pytest.mark.parametrize("data", [MDN, SHAKESPEARE])
def test_repeated_data_gets_dropout_decay_and_an_early_stop(data: DataFacts) -> None:
    wish = replace(WISH, data=data, vocab_size=data.vocab_size or 50304, block_size=256)
    chosen = propose(wish).choice.plan
    assert chosen.epochs is not None
    assert 4 < chosen.epochs.value <= 30
    assert chosen.config.dropout > 0
    assert chosen.config.weight_decay > recipe.WEIGHT_DECAY
    assert chosen.config.early_stop_evals > 0
    assert not chosen.problems


def test_characters_get_a_loss_that_holds_what_nanogpt_reaches() -> None:
    """6x384 for 5,000 steps: 1.47 (nanoGPT's README). It was 4x128 for 7.6 seconds, loss unknown."""
    wish = replace(WISH, data=SHAKESPEARE, vocab_size=65, block_size=256, hours=1)
    chosen = propose(wish).choice.plan
    assert chosen.shape.parameters > 2e6
    assert chosen.loss is not None
    assert chosen.loss.loss.basis == "fit"
    assert chosen.loss.loss.low < 1.47 < chosen.loss.loss.high
    assert chosen.loss.loss.high > 1.4 * chosen.loss.loss.low, "a wide range"


def test_a_vocabulary_that_would_be_most_of_the_model_is_replaced_by_an_own_one() -> None:
    wish = replace(WISH, data=MDN, hours=0.02, source="pages.parquet")
    answer = propose(wish)
    assert answer.choice.vocabulary in (2048, 4096, 8192)
    assert answer.choice.plan.config.dataset == f"web_mdn-{answer.choice.vocabulary}"
    shape = answer.choice.plan.shape
    assert shape.vocab_size * shape.n_embd < 0.5 * shape.parameters
    (usual,) = [other for other in answer.alternatives if other.title == "GPT-2 vocabulary"]
    assert bits(answer.choice) < bits(usual)
    prepared = propose(replace(wish, source=""))
    assert prepared.choice.vocabulary is None, "what is prepared already is not prepared again"
    assert "own vocabulary" in [other.title for other in prepared.alternatives]


TOKENS = DataFacts("shakespeare", Estimate.exact(301_966), tokenizer="gpt2", bytes_per_token=3.32)


@pytest.mark.parametrize("tokens", [301_966, 33_249])
def test_where_data_is_what_is_short_gpt2s_vocabulary_is_too_large(tokens: float) -> None:
    """A fast card and a megabyte: it was 6x192 with 19.3M of 22.1M weights in embedding and head, and no other way."""
    wish = replace(WISH, data=replace(TOKENS, tokens=Estimate.exact(tokens)), hours=1)
    prepared = propose(wish)
    (own,) = [other for other in prepared.alternatives if other.title == "own vocabulary"]
    assert bits(own) < 0.99 * bits(prepared.choice)
    assert (
        f"gptfit tokenizer train TEXT --vocab-size {own.vocabulary} --out data/{own.plan.config.dataset}" in own.remark
    )
    chosen = propose(replace(wish, source="text.parquet", shares={512: 0.6, 2048: 0.9})).choice
    shape = chosen.plan.shape
    assert chosen.vocabulary == shape.vocab_size
    assert 2 * shape.vocab_size * shape.n_embd < 0.5 * shape.parameters


def test_one_document_is_not_shuffled() -> None:
    """A text file is one: training refused what was proposed for it."""
    answer = propose(replace(WISH, data=replace(TOKENS, rows=1), hours=1))
    assert not answer.choice.plan.config.shuffle_documents
    assert propose(replace(WISH, data=replace(TOKENS, rows=2), hours=1)).choice.plan.config.shuffle_documents


@pytest.mark.parametrize(("data", "vocab_size"), [(MDN, 50304), (SHAKESPEARE, 65)])
def test_little_data_may_start_from_gpt2(data: DataFacts, vocab_size: int) -> None:
    answer = propose(replace(WISH, data=data, vocab_size=vocab_size))
    (tuned,) = [other for other in answer.alternatives if other.title == "GPT-2's weights"]
    assert tuned.plan.config.init_from == "gpt2"
    assert tuned.plan.runs
    assert tuned.plan.loss is not None
    assert tuned.plan.loss.loss.basis == "published"
    assert bool(tuned.remark) == (data is SHAKESPEARE), "characters have to be prepared again"
    assert "GPT-2's weights" not in [other.title for other in propose(WISH).alternatives], "nor on 3B tokens"
    only = propose(replace(WISH, data=data, vocab_size=vocab_size, recipes=(WEIGHTS,)))
    assert only.choice.plan.config == tuned.plan.config, "what the table shows can be had"
    assert "gradient_accumulation_steps" not in [problem.where for problem in only.choice.plan.problems]
    with pytest.raises(DataError, match="leave --only out"):
        propose(replace(WISH, recipes=(WEIGHTS,)))


def test_this_machines_cpu_is_proposed_for_by_what_was_timed_on_it() -> None:
    shape = ModelShape(4, 2, 128, 256, 65, arch="modern")
    key = speed_key(Setting(shape, 16, dtype="bfloat16", compile=False, optimizer="muon"), "cpu (2 threads)")
    timed = Measurements((MeasuredSpeed(key, "2.0", tokens_per_s=12_000.0, ms_per_micro_step=341.0),))
    wish = replace(WISH, gpu=None, data=SHAKESPEARE, vocab_size=65, block_size=256, hours=0.1)
    chosen = propose(wish, timed).choice.plan
    assert chosen.config.device == "cpu"
    assert chosen.config.compile is False
    assert chosen.seconds is not None
    assert chosen.seconds.high <= 1.05 * 360
    assert chosen.shape.parameters < 1e6
    with pytest.raises(DeviceError, match="no speed of this machine's CPU is known yet"):
        propose(wish)


def test_a_minute_of_nanogpts_recipe_on_a_cpu_has_updates_enough_to_learn() -> None:
    """174 steps of 16,384 characters left Shakespeare at 4.17 bits per byte; nanoGPT's README has 2,000 of 768."""
    wish = replace(WISH, gpu=None, data=SHAKESPEARE, vocab_size=65, block_size=256, hours=60 / 3600)
    key = speed_key(Setting(ModelShape(2, 1, 32, 256, 65), 16, compile=False), "cpu (1 thread)")
    timed = Measurements((MeasuredSpeed(key, "", tokens_per_s=100_000.0, ms_per_micro_step=41.0),))
    config = propose(replace(wish, recipes=("gpt2",)), timed).choice.plan.config
    assert config.max_iters >= 1000
    assert config.tokens_per_iter() <= 2048


def test_names_of_devices_are_compared_with_the_table_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proposal asks for thousands of speeds, and a tuning session leaves dozens of timings."""
    asked: list[str] = []
    monkeypatch.setattr(nearby, "find_or_none", lambda name: asked.append(name))
    shape = ModelShape(2, 2, 64, 256, 65)
    keys = [speed_key(Setting(shape, rows), "cpu nobody has heard of") for rows in (1, 2, 4, 8)]
    timed = Measurements(tuple(MeasuredSpeed(key, "", 1e4, 100.0) for key in keys))
    propose(replace(WISH, gpu=None, data=SHAKESPEARE, vocab_size=65, block_size=256, hours=0.1), timed)
    assert len(asked) <= 2


def known_speed(gpu: GPU, setting: Setting) -> speed.Speed:
    found = speed.predict(setting, gpu)
    assert found is not None
    return found


CPU = Calibration("cpu", "2.9", {}, {}, kind="cpu", context_bytes={"eager": 1.0})


@pytest.mark.parametrize(
    "wish",
    [
        WISH,
        replace(WISH, gpu=find("T4"), processes=2),
        replace(WISH, gpu=find("RTX 3050"), hours=200, block_size=4096),
        replace(WISH, gpu=None, calibrated=CPU, data=MDN, hours=0.2, block_size=256),
        replace(WISH, gpu=None, calibrated=CPU, data=SHAKESPEARE, vocab_size=65, block_size=256, hours=0.1),
    ],
    ids=["4070", "two T4", "long context on a 3050", "a CPU", "characters on a CPU"],
)
def test_what_is_written_means_the_setting_that_was_searched(wish: Wish) -> None:
    """The config of a candidate, read as `plan` and training read it, is the candidate's setting again."""
    pace = Pace(wish, partial(known_speed, wish.gpu or find("RTX 3050")))  # any speed will do
    place = place_for(wish.gpu, wish.used_bytes, wish.calibrated)
    found = candidates(wish, pace)
    assert found
    for candidate in found[:: max(1, len(found) // 20)]:
        config = config_of(wish, candidate, pace.speed(candidate.setting))
        assert setting_of(config, candidate.setting.shape, place, wish.processes) == candidate.setting


# Bytes per token beside GPT-2's, of FineWeb.
SHARES = {2048: 0.70, 4096: 0.80, 8192: 0.88, 16384: 0.95, 32768: 0.99, 50304: 1.0}


def test_the_vocabulary_is_searched_and_larger_models_get_larger_ones() -> None:
    """Published fits: 8k saves FLOPs at 6 x 384, 16k at 12 x 768, nothing does from 350M on."""
    data = replace(WEB, tokens=Estimate.exact(50e9), bytes_per_token=4.65)
    wish = replace(WISH, data=data, source="web.parquet", shares=SHARES, recipes=("modern",))
    answers = [propose(replace(wish, hours=hours)).choice for hours in (0.2, 24, 2000)]
    sizes = [answer.plan.shape.vocab_size for answer in answers]
    assert sizes == sorted(sizes)
    assert sizes[0] in (2048, 4096, 8192)
    assert answers[0].plan.data is not None
    assert answers[0].plan.data.tokens.basis == "measured"
    assert answers[-1].plan.shape.tied_parameters > 350e6
    assert answers[-1].vocabulary is None


def test_a_proposal_is_the_second_edition_for_its_epochs() -> None:
    few, many = (propose(replace(WISH, data=data, hours=1)).choice.plan for data in (WEB, MDN))
    for plan in (few, many):
        assert plan.epochs is not None
        wanted = recipe.second_edition(plan.shape, plan.epochs.value, max_iters=plan.config.max_iters)
        assert {key: getattr(plan.config, key) for key in wanted} == wanted
        often = recipe.many_epochs_keys(plan.epochs.value, has_documents=True)
        assert {key: getattr(plan.config, key) for key in often} == often
    assert (few.config.value_embeddings, many.config.value_embeddings) != ("projections", "tables")
    assert many.config.value_embeddings == "projections"


@pytest.mark.parametrize("epochs", [1.0, 3.5, 8.0, 30.0])
def test_what_repeats_bring_to_a_proposal_is_what_they_bring_to_the_recipe(epochs: float) -> None:
    """Three and a half epochs had the recipe's weight decay and no dropout, thirty had twice its dropout."""
    found = keys_for_epochs(epochs, "modern", 20, has_documents=True)
    wanted = {"weight_decay": recipe.WEIGHT_DECAY, "dropout": 0.0} | recipe.many_epochs_keys(epochs, True)
    assert {key: value for key, value in found.items() if key != "early_stop_evals"} == wanted
    assert ("early_stop_evals" in found) == (epochs > recipe.MANY_EPOCHS)


def test_a_proposal_is_not_contradicted_by_a_rule_of_thumb() -> None:
    """The law weighed smaller models too; `a smaller model would reach a lower loss` stood above the reasons against it."""
    data = DataFacts("pages", Estimate.exact(14.7e6), tokenizer="gpt2", bytes_per_token=3.34)
    choice = propose(replace(WISH, data=data, hours=0.05)).choice.plan
    assert choice.tokens < 10 * choice.shape.parameters, "few enough that the rule would speak"
    assert not [problem for problem in choice.problems if "smaller model" in problem.message]
