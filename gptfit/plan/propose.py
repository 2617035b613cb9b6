"""The config with the lowest expected loss within hours, memory and data, and alternatives worth a look."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from gptfit.config.keys import NANOGPT_VOCAB_SIZE, TrainConfig
from gptfit.config.start_model import known_shape
from gptfit.errors import DataError, DeviceError
from gptfit.measured import Measurements
from gptfit.plan.candidates import Pace, PlannedRun, Wish, candidates, fits_surely, runs_of
from gptfit.plan.check import SMALLER_IS_BETTER
from gptfit.plan.loss import GPT2_BYTES_PER_TOKEN
from gptfit.plan.plan import find_speed, plan
from gptfit.plan.proposed_config import config_of, tuning_config
from gptfit.plan.resolve import in_nanogpt
from gptfit.plan.result import DataFacts, Plan
from gptfit.plan.setting import Setting
from gptfit.plan.speed import Speed
from gptfit.plan.vocabulary import own_vocabularies
from gptfit.units import si

OWN_GAIN = 0.01  # of the loss, that a vocabulary of one's own must bring: nobody else's model and data share it
TIE = 0.003  # of the lowest loss: closer ones cannot be told apart, and the quicker run is the better one
LITTLE_TOKENS = 100e6  # GPT-2's weights, which have read 40 GB, are worth a look below
TUNING_EPOCHS, TUNING_ITERS = 3.0, 20  # at most, at least: nanoGPT tunes on Shakespeare for 20
MUCH_FASTER, MUCH_LONGER = 1 / 3, 3.0
WEIGHTS = "weights"  # in the place of a recipe: GPT-2's own, tuned


@dataclass(frozen=True)
class Proposal:
    """One answer, and why it is in the list."""

    title: str
    plan: Plan
    vocabulary: int | None = None  # entries of the vocabulary to train for it first
    remark: str = ""


@dataclass(frozen=True)
class Proposals:
    choice: Proposal
    alternatives: tuple[Proposal, ...]
    searched: int

    @property
    def one_vocabulary(self) -> bool:
        """Whether losses per token can be compared."""
        return len({row.plan.shape.vocab_size for row in (self.choice, *self.alternatives)}) == 1


def propose(wish: Wish, measurements: Measurements | None = None) -> Proposals:
    """The lowest expected loss first; alternatives that cost less, give more, or run elsewhere."""
    pace = Pace(wish, partial(_speed, wish=wish, measurements=measurements))
    if wish.recipes == (WEIGHTS,):
        return _only_weights(wish, pace, measurements)
    finish = partial(_finish, pace=pace, measurements=measurements)
    found = candidates(wish, pace)
    if not found:
        card = f"{wish.gpu.name} ({wish.gpu.vram_gib:g} GiB)" if wish.gpu else "this machine's CPU"
        raise DeviceError(
            f"no model fits {card} in {wish.hours:g} hours",
            fix="give more hours, a smaller --block_size or another --gpu",
        )
    best = _best(found)
    own = _own_vocabulary(wish, pace)
    searched, others = len(found) + len(own), []
    if own and (better := _best(own)).loss < (1 - OWN_GAIN) * best.loss:
        if wish.source:
            better, best = best, better
        others.append(finish(wish, better, "GPT-2 vocabulary" if wish.source else "own vocabulary"))
    best_wish = replace(wish, data=best.data, vocab_size=best.setting.shape.vocab_size)
    quick = _other_time(best_wish, best, MUCH_FASTER, pace)
    if quick is not None and quick.seconds < best.seconds and quick.parameters < best.parameters:
        others.append(finish(best_wish, quick, "smaller, faster"))
    long = _other_time(best_wish, best, MUCH_LONGER, pace)
    if long is not None and long.loss < (1 - TIE) * best.loss:
        title = "larger, longer" if long.parameters > best.parameters else "longer"
        others.append(finish(replace(best_wish, hours=MUCH_LONGER * wish.hours), long, title))
    plain = _plain(wish, best, pace)
    if plain is not None:
        others.append(finish(replace(wish, only_nanogpt_keys=True), plain, "plain nanoGPT"))
    tuned = _tuned(wish, pace, measurements)
    if tuned is not None:
        others.append(tuned)
    return Proposals(finish(wish, best, "choice"), tuple(others), searched)


def _speed(setting: Setting, wish: Wish, measurements: Measurements | None) -> Speed:
    found = find_speed(setting, wish.gpu, None, measurements, wish.calibrated, wish.cpu_rate)
    if found is None:
        raise _no_speed(wish)
    return found


def _no_speed(wish: Wish) -> DeviceError:
    if wish.gpu is None:
        return cpu_not_timed()
    return DeviceError(
        f"{wish.gpu.name}: no arithmetic rate is known, so hours mean nothing",
        fix="measure with `gptfit tune CONFIG.py`",
    )


def cpu_not_timed() -> DeviceError:
    return DeviceError(
        "no speed of this machine's CPU is known yet, so hours mean nothing",
        fix="let `gptfit doctor --card` time it, or name a card with --gpu",
    )


def _best(found: list[PlannedRun]) -> PlannedRun:
    """The quickest of those that cannot be told from the lowest loss."""
    lowest = min(candidate.loss for candidate in found)
    return min((c for c in found if c.loss <= (1 + TIE) * lowest), key=lambda c: c.seconds)


def _own_vocabulary(wish: Wish, pace: Pace) -> list[PlannedRun]:
    """Everything the wish allows in vocabularies of the text's own."""
    return [
        candidate
        for data in own_vocabularies(wish.data, wish.shares)
        for candidate in candidates(replace(wish, data=data, vocab_size=data.vocab_size or 0), pace)
    ]


def _other_time(wish: Wish, best: PlannedRun, factor: float, pace: Pace) -> PlannedRun | None:
    """The best of the same recipe in another time."""
    other = replace(wish, hours=factor * wish.hours, recipes=(best.setting.shape.arch,))
    found = candidates(other, pace)
    return _best(found) if found else None


def _plain(wish: Wish, best: PlannedRun, pace: Pace) -> PlannedRun | None:
    """What stock nanoGPT can train, where the choice is more than that."""
    setting = best.setting
    if wish.only_nanogpt_keys or "gpt2" not in wish.recipes:
        return None
    is_plain = setting.shape.arch == "gpt2" and not setting.chunked_loss and not setting.checkpoint_activations
    if is_plain and fits_surely(wish, in_nanogpt(setting)):
        return None
    found = candidates(replace(wish, only_nanogpt_keys=True, recipes=("gpt2",)), pace)
    return _best(found) if found else None


def _only_weights(wish: Wish, pace: Pace, measurements: Measurements | None) -> Proposals:
    tuned = _tuned(wish, pace, measurements)
    if tuned is None:
        raise DataError(
            f"GPT-2's weights are for less than {si(LITTLE_TOKENS)} tokens of text that can be read in the time",
            fix="leave --only out: a model of this text's own is better",
        )
    return Proposals(replace(tuned, title="choice"), (), 1)


def _tuned(wish: Wish, pace: Pace, measurements: Measurements | None) -> Proposal | None:
    """GPT-2's own weights, tuned: on little data they know more than it can teach."""
    data = _as_gpt2(wish.data)
    shape = known_shape("gpt2")
    assert shape is not None
    if wish.only_nanogpt_keys or data.tokens.value > LITTLE_TOKENS:
        return None
    shape = replace(shape, block_size=min(shape.block_size, wish.block_size))
    candidate = next(runs_of(replace(wish, data=data), shape, pace, [TUNING_EPOCHS], TUNING_ITERS), None)
    if candidate is None:
        return None
    config = tuning_config(wish, candidate, "gpt2", pace.speed(candidate.setting))
    remark = (
        "" if wish.data.is_gpt2 else f"needs the text in GPT-2's tokens: `gptfit prepare TEXT --out data/{data.name}`"
    )
    return Proposal("GPT-2's weights", _planned(wish, config, shape.vocab_size, data, measurements), remark=remark)


def _as_gpt2(data: DataFacts) -> DataFacts:
    """The same text in GPT-2's tokens; characters and bytes are about 4.65 to one of them."""
    if data.is_gpt2:
        return data
    scale = (data.bytes_per_token or 1.0) / (data.gpt2_bytes_per_token or GPT2_BYTES_PER_TOKEN)
    tokens = replace(data.tokens.map(scale), basis="fit")
    return DataFacts(f"{data.name}-gpt2", tokens, NANOGPT_VOCAB_SIZE, "gpt2", (data.bytes_per_token or 1.0) / scale)


def _finish(wish: Wish, candidate: PlannedRun, title: str, pace: Pace, measurements: Measurements | None) -> Proposal:
    config = config_of(wish, candidate, pace.speed(candidate.setting))
    vocab_size = candidate.setting.shape.vocab_size
    is_own = candidate.data.name != wish.data.name and candidate.data.gpt2_bytes_per_token is not None
    remark = "" if wish.source or not is_own else _again(candidate.data, vocab_size)
    planned = _planned(wish, config, vocab_size, candidate.data, measurements)
    # Smaller models were weighed by the law, whose word this is: the rule of thumb would only contradict it.
    problems = tuple(problem for problem in planned.problems if SMALLER_IS_BETTER not in problem.message)
    return Proposal(
        title,
        replace(planned, problems=problems),
        vocab_size if is_own else None,
        remark,
    )


def _again(data: DataFacts, vocab_size: int) -> str:
    """What is prepared in another vocabulary has to be prepared in this one; the text itself is not at hand."""
    tokenizer = f"data/{data.name}.json"
    return (
        f"needs the text again: `gptfit tokenizer train TEXT --vocab-size {vocab_size} --out {tokenizer}`, then "
        f"`gptfit prepare TEXT --tokenizer {tokenizer} --out data/{data.name}`"
    )


def _planned(
    wish: Wish, config: TrainConfig, vocab_size: int, data: DataFacts, measurements: Measurements | None
) -> Plan:
    return plan(
        config,
        config.shape(vocab_size),
        wish.gpu,
        data=data,
        processes=wish.processes,
        measurements=measurements,
        device_name=wish.calibrated.device if wish.calibrated else None,
        used_bytes=wish.used_bytes,
        host_free_bytes=wish.host_free_bytes,
        cpu_rate=wish.cpu_rate,
    )
