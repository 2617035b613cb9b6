"""A plan on one screen: a label, the answer, its range, and how it is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from gptfit.estimate import Estimate
from gptfit.plan.evaluation import eval_tokens
from gptfit.plan.host import host_words
from gptfit.plan.loss import perplexity
from gptfit.plan.matmul_rate import peak_tflops
from gptfit.plan.memory import host_bytes
from gptfit.plan.result import Plan
from gptfit.units import GIB, count, gib, percent, plural, si, times
from gptfit.verbs.common import console

if TYPE_CHECKING:
    from rich.table import Table

    from gptfit.plan.ladder import Ladder

LEAST_SHARE = 0.02  # causes below this share of the time are not worth a word


def show(plan: Plan, remarks: Iterable[str] = (), then: str = "") -> None:
    from rich.padding import Padding

    out = console()
    for remark in remarks:
        out.print(remark, markup=False, style="dim")
    out.print(plan_title(plan), style="bold", markup=False)
    out.print(Padding(_table(plan_rows(plan)), (0, 0, 0, 1)))
    if plan.ladder and plan.ladder.steps:
        out.print()
        out.print(Padding(_ladder(plan.ladder), (0, 0, 0, 1)))
    if plan.problems or plan.notes:
        out.print()
        out.print(Padding(_problems(plan), (0, 0, 0, 1)))
    if then:
        out.print(f"\n{then}", markup=False, soft_wrap=True)


def _ladder(ladder: Ladder) -> Table:
    """Each rung alone, at the micro-batch asked for; the rungs of the cheapest way that fits are marked."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="cyan")
    table.add_column("memory ladder", no_wrap=True)
    for name in ("saves", "time", "fits alone", "needed"):
        table.add_column(name, justify="right", no_wrap=True)
    chosen = ladder.way.rungs if ladder.way else ()
    for step in ladder.steps:
        cost = "" if step.costs_share is None else f"{100 * step.costs_share:+.1f} %"
        fits, needed = "yes" if step.fits else "no", "yes" if step.rung in chosen else ""
        saves = gib(step.saves_bytes) if step.saves_bytes > 0 else "nothing"
        table.add_row(step.rung.words, saves, cost, fits, needed)
    return table


def _problems(plan: Plan) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for problem in plan.problems:
        text = Text(f"{problem.where}: {problem.message}\n")
        text.append(f"fix: {problem.fix}", style="dim")
        table.add_row(Text(problem.level, style="red" if problem.level == "error" else "yellow"), text)
    for note in plan.notes:
        table.add_row("note", Text(note))
    return table


def plan_title(plan: Plan) -> str:
    shape = plan.shape
    card = plan.gpu.name if plan.gpu else "this machine's CPU"
    if plan.processes > 1 and not (plan.several and plan.several.shares):
        card = f"{plan.processes} x {card}"
    elif plan.processes > 1:
        card = f"{plan.processes} unlike cards, {card} the smallest"
    model = f"{shape.n_layer} layers x {shape.n_embd}, {plural(shape.n_head, 'head')}, block {shape.block_size}"
    by = ", run by nanoGPT" if plan.setting and plan.setting.logits == "returned" else ""
    return f"{model}, vocab {count(shape.vocab_size)} on {card}{by}"


def _table(rows: Iterable[tuple[str, str, str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(style="dim", no_wrap=True, justify="right")
    for label, text, basis in rows:
        table.add_row(label, Text(text), basis)
    return table


def plan_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    if plan.setting is None:
        return
    shape, setting = plan.shape, plan.setting
    yield "model", f"{si(shape.parameters)} parameters ({count(shape.n_weights)} weights)", "exact"
    yield "", f"{si(shape.flops_per_token)} FLOPs per token", "exact"
    across = f" x {plan.processes} GPUs" if plan.processes > 1 else ""
    steps = plural(setting.accumulation, "micro-step")
    micro = f"{plural(setting.micro_batch, 'row')} x {count(shape.block_size)} x {steps}{across}"
    if not plan.config.eval_only:
        yield "step", f"{count(plan.tokens_per_step)} tokens = {micro}", "exact"
    yield from _memory_rows(plan)
    yield from _speed_rows(plan)
    yield from _several_rows(plan)
    yield from _run_rows(plan)


def _memory_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    memory = plan.memory
    if memory is None:
        return
    device, allocated = memory.device, memory.allocated
    if plan.gpu is None:
        yield "memory", f"{gib(device.value)} ({_range(device.map(1 / GIB), '.1f')}), the whole process", device.basis
        if plan.usable_bytes is not None:
            yield "fits", f"{_verdict(plan)} of {gib(plan.usable_bytes)} free", ""
        return
    where = "on nvidia-smi" if plan.gpu.is_nvidia else "in the process"
    shown = f"{gib(device.value)} {where} ({_range(device.map(1 / GIB), '.1f')}), {gib(allocated.value)} allocated"
    yield "memory", shown, device.basis
    parts = [f"{name} {size / GIB:.1f}" for name, size in memory.parts.items() if size]
    yield "", " + ".join(parts), ""
    if plan.setting and plan.gpu and host_bytes(plan.setting):
        yield "", f"and {host_words(plan.setting)} of main memory, streamed", "exact"
    if plan.usable_bytes is None:
        return
    yield "fits", f"{_verdict(plan)} of {gib(max(0.0, plan.usable_bytes))} usable{_largest(plan)}", ""


def _verdict(plan: Plan) -> str:
    """'tight' with the chance of fitting where the limit is inside the range."""
    assert plan.memory is not None
    assert plan.usable_bytes is not None
    margin = plan.usable_bytes - plan.memory.device.value
    spare = f"{gib(margin)} to spare" if plan.fits else f"{gib(-margin)} too much"
    if plan.is_tight:
        return f"tight, {percent(plan.fit_chance or 0.0)} likely: {spare}"
    return f"{'yes' if plan.fits else 'no'}, {spare}"


def _largest(plan: Plan) -> str:
    if plan.config.eval_only:
        return ""
    return f"; largest micro-batch {plan.largest_micro_batch}" if plan.largest_micro_batch else "; no micro-batch fits"


def _speed_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    speed, gpu = plan.speed, plan.gpu
    if speed is None or plan.config.eval_only:
        return
    rate = speed.tokens_per_s
    yield "speed", f"{si(rate.value)} tokens/s ({si(rate.low)} to {si(rate.high)})", rate.basis
    times = f"{_milliseconds(speed.ms_per_step.value)} per step, {_milliseconds(speed.ms_per_micro_step.value)} per micro-step"
    yield "", times, rate.basis
    peak = peak_tflops(gpu) if gpu else None
    if speed.mfu is not None and peak is not None:
        own = f"mfu {percent(speed.mfu)} of its own {peak.value:g} TFLOPS"
        yield "", f"{own}; {percent(speed.mfu_a100, 1)} as nanoGPT prints it (A100)", peak.basis
    if speed.shares:
        shares = sorted(speed.shares.items(), key=lambda item: -item[1])
        yield "", ", ".join(f"{name} {percent(share)}" for name, share in shares if share >= LEAST_SHARE), rate.basis


def _several_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    several = plan.several
    if several is None:
        return
    sent, basis = several.traffic, several.scaling.basis
    where = f" on {several.nodes} machines" if several.nodes > 1 else ""
    yield (
        "gpus",
        f"{several.processes}{where}, each sends {gib(sent.bytes_sent)} per step at {sent.link_gbs:.3g} GB/s",
        basis,
    )
    hidden = f"{_milliseconds(sent.seconds * 1e3)} on the link, {percent(sent.hidden_share)} of it behind compute"
    yield "", hidden, basis
    scaling = several.scaling
    ends = f"{percent(scaling.low)} to {percent(scaling.high)}"
    yield "", f"scaling {percent(scaling.value)} ({ends}) of {several.processes} times one", basis
    if several.gain is not None:
        shares = " + ".join(map(str, several.shares))
        yield "", f"micro-steps {shares}: {several.gain:.2f} times the speed of equal shares", basis


def _run_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    seconds = plan.seconds
    if plan.config.eval_only:
        took = f" in {_time_range(seconds)}" if seconds else ""
        yield (
            "run",
            f"one evaluation, {si(eval_tokens(plan.config))} tokens{took}",
            seconds.basis if seconds else "exact",
        )
        return
    steps = f"{count(plan.config.max_iters)} steps, {si(plan.tokens)} tokens"
    if seconds is None:
        yield "run", steps, "exact"
    else:
        yield "run", f"{steps} in {_time_range(seconds)}", seconds.basis
        if plan.eval_share and plan.eval_share >= LEAST_SHARE:
            yield "", f"evaluations take {percent(plan.eval_share)} of it", seconds.basis
    if plan.kwh:
        yield "power", f"{plan.kwh.value:.1f} kWh ({_range(plan.kwh, '.1f')})", plan.kwh.basis
    if plan.data:
        yield "data", _data_line(plan), plan.data.tokens.basis
    if plan.loss:
        loss = plan.loss.loss
        ppl, bits = perplexity(loss), plan.loss.bits_per_byte
        if plan.is_in_bits and bits:
            said = f"{bits.value:.3f} bits per byte ({_range(bits, '.3f')}), {loss.value:.2f} nats per token"
        else:
            said = f"{loss.value:.2f} ({_range(loss, '.2f')}), perplexity {ppl.value:.1f} ({_range(ppl, '.1f')})"
        yield "loss", said, loss.basis
        yield "", f"at the end, validation; from {plan.loss.sentence}", ""


def _data_line(plan: Plan) -> str:
    data = plan.data
    assert data is not None
    tokens = si(data.tokens.value)
    if data.tokens.low != data.tokens.high:
        tokens += f" ({si(data.tokens.low)} to {si(data.tokens.high)})"
    words = [f"{data.name}: {tokens} tokens"]
    if data.rows and data.text_bytes:
        words.append(f"{plural(data.rows, 'document')} of {gib(data.text_bytes)}")
    if data.bytes_per_token:
        words.append(f"{data.bytes_per_token:.2f} bytes per token")
    if plan.epochs:
        words.append(f"{times(plan.epochs.value, 2)} epochs")
    return ", ".join(words)


def _range(estimate: Estimate, form: str) -> str:
    return f"{estimate.low:{form}} to {estimate.high:{form}}"


def _time_range(seconds: Estimate) -> str:
    """All three in one unit, so that they can be compared: '15.6 h (13.5 to 18.3)'."""
    unit, scale = next(
        (unit, scale)
        for unit, scale in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
        if seconds.value >= 2 * scale or scale == 1
    )
    return f"{seconds.value / scale:.1f} {unit} ({_range(seconds.map(1 / scale), '.1f')})"


def _milliseconds(value: float) -> str:
    return f"{value:.0f} ms" if value < 1000 else f"{value / 1000:.2f} s"
