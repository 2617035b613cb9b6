"""Several GPUs: what they exchange, how a step scales with their number, and what shares unlike cards should have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gptfit.estimate import Basis, Estimate
from gptfit.gpus import GPU
from gptfit.plan import link, speed
from gptfit.plan.link import Traffic
from gptfit.plan.setting import Setting
from gptfit.plan.speed import Speed
from gptfit.shares import share_out, slowest

LINK_FACTOR = 2.0  # how far a link may be from its figure either way: boards, root ports and switches differ that much
NETWORK_FACTOR = 3.0  # between machines nothing published was measured


@dataclass(frozen=True)
class Several:
    """What only a plan for more than one GPU has to say."""

    processes: int
    nodes: int
    traffic: Traffic
    scaling: Estimate  # tokens/s against as many times one GPU's
    shares: tuple[int, ...] = ()  # micro-steps of each card, where cards are unlike
    gain: float | None = None  # steps per second against equal shares

    def as_json(self) -> dict[str, Any]:
        return {
            "processes": self.processes,
            "nodes": self.nodes,
            "bytes_per_step": self.traffic.bytes_sent,
            "link_gbs": self.traffic.link_gbs,
            "link_ms": self.traffic.seconds * 1e3,
            "exposed_ms": self.traffic.exposed_seconds * 1e3,
            "scaling": self.scaling.as_json(),
            "shares": list(self.shares) or None,
            "gain_over_equal_shares": self.gain,
        }


def describe(setting: Setting, gpu: GPU, predicted: Speed) -> Several:
    """Traffic and scaling of like cards; `predicted` is the whole step with the exchange in it."""
    sent = link.traffic(setting, gpu, predicted.ms_per_micro_step.value / 1e3)
    step_s = predicted.ms_per_step.value / 1e3
    alone_s = step_s - sent.exposed_seconds  # one GPU's part without the others
    factor = LINK_FACTOR if setting.nodes == 1 else NETWORK_FACTOR
    value, low, high = (
        alone_s / (alone_s + _exposed(setting, gpu, predicted, slower)) for slower in (1.0, factor, 1 / factor)
    )
    basis: Basis = "fit" if setting.nodes == 1 else "spec"
    return Several(setting.processes, setting.nodes, sent, Estimate(value, low, high, basis))


def _exposed(setting: Setting, gpu: GPU, predicted: Speed, slower: float) -> float:
    """Seconds a step waits for the exchange when the link is `slower` times slower than its figure."""
    gbs = link.slowest_gbs(setting, gpu) / slower
    changed = link.LinkConstants(*[gbs] * 6)
    return link.traffic(
        replace(setting, network_gbs=None), gpu, predicted.ms_per_micro_step.value / 1e3, changed
    ).exposed_seconds


def with_uncertain_link(predicted: Speed, scaling: Estimate) -> Speed:
    """The range of a speed, wider by what is not known about the link."""
    rate, step = predicted.tokens_per_s, predicted.ms_per_step
    low, high = scaling.low / scaling.value, scaling.high / scaling.value
    basis = scaling.basis if scaling.basis == "spec" else rate.basis
    return replace(
        predicted,
        tokens_per_s=Estimate(rate.value, rate.low * low, rate.high * high, basis),
        ms_per_step=Estimate(step.value, step.low / high, step.high / low, basis),
    )


def unlike(setting: Setting, cards: Sequence[GPU]) -> tuple[Speed, Several] | None:
    """Cards that differ, each with the share of the micro-steps it can do in the time of the others.

    A divided model needs every card for every micro-step, so that shares are equal.
    """
    slow = min(cards, key=lambda card: link.slowest_gbs(setting, card))
    alone = [speed.predict(replace(setting, processes=1, accumulation=1), card) for card in cards]
    if any(one is None for one in alone):
        return None
    seconds = [one.ms_per_micro_step.value / 1e3 for one in alone if one]
    equal = [setting.accumulation] * len(cards)
    shares = equal if setting.is_sharded else share_out(seconds, sum(equal))
    sent = link.traffic(setting, slow, max(seconds))
    update_s = max(one.ms_per_step.value / 1e3 - micro for one, micro in zip(alone, seconds, strict=True) if one)
    step_s, equal_s = (slowest(seconds, s) + update_s + sent.exposed_seconds for s in (shares, equal))
    weakest = alone[seconds.index(max(seconds))]
    assert weakest is not None
    rate = setting.tokens_per_step / step_s
    best = sum(setting.micro_tokens / one for one in seconds)
    several = Several(
        len(cards),
        setting.nodes,
        sent,
        Estimate.within(min(1.0, rate / best), 0.1, "fit"),
        tuple(shares),
        None if setting.is_sharded else equal_s / step_s,
    )
    return _of_all(weakest, setting, rate, step_s, max(seconds)), several


def _of_all(one: Speed, setting: Setting, rate: float, step_s: float, micro_s: float) -> Speed:
    """The whole group's speed with the range of its slowest card; shares of time would be another for each card."""
    return replace(
        one,
        tokens_per_s=one.tokens_per_s.map(rate / one.tokens_per_s.value),
        ms_per_step=one.ms_per_step.map(step_s * 1e3 / one.ms_per_step.value),
        ms_per_micro_step=one.ms_per_micro_step.map(micro_s * 1e3 / one.ms_per_micro_step.value),
        tflops=setting.shape.flops_per_token * rate / setting.processes / 1e12,
        mfu=None,
        mfu_a100=setting.shape.flops_per_token * rate / setting.processes / 1e12 / speed.A100_TFLOPS,
        shares={},
    )
