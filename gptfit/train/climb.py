"""memory = 'auto': up the memory ladder by prediction before a run, and rung by rung when memory runs out in it."""

from __future__ import annotations

from collections.abc import Sequence

from gptfit.config.keys import TrainConfig, find_problems
from gptfit.device.device import Device
from gptfit.device.host_memory import free_host_bytes
from gptfit.device.processes import Processes
from gptfit.errors import RunError
from gptfit.gpus import GPU
from gptfit.plan import ladder, memory
from gptfit.plan.host import host_problem
from gptfit.plan.resolve import setting_of
from gptfit.plan.setting import Spread
from gptfit.shape import ModelShape
from gptfit.train.engine import Engine
from gptfit.train.place import place_of

# Below this many tokens in a micro-step a card waits for its launches: published curves fall from 82 % of peak at 8
# rows of 1,024 to 77 % at 4. Until there a smaller micro-batch costs less than computing blocks twice.
BUSY_TOKENS = 4096


def config_that_fits_all(
    config: TrainConfig, shape: ModelShape, device: Device, processes: Processes
) -> tuple[TrainConfig, str | None]:
    """What the process with the least room would do, in all of them: they could not work together on unlike batches."""
    fitting, told, problem = config, None, None
    cards = processes.gather(device.gpu)
    try:
        fitting, told = config_that_fits(config, shape, device, processes.count, processes.machines, cards)
    except RunError as error:
        problem = error
    everyone = processes.gather((place_of(device).free_bytes or 0.0, fitting, told, problem))
    for *_, one in everyone:
        if one is not None:
            raise one
    _, fitting, told, _ = min(everyone, key=lambda one: one[0])
    return fitting, told


def config_that_fits(
    config: TrainConfig,
    shape: ModelShape,
    device: Device,
    processes: int = 1,
    machines: int = 1,
    cards: Sequence[GPU | None] = (),
) -> tuple[TrainConfig, str | None]:
    """The config with the cheapest measures that fit what is free, and a sentence that says which."""
    place = place_of(device)
    setting = setting_of(config, shape, place, processes, Spread(machines))
    # A CPU's host memory is its device memory: what is kept there is part of what is planned.
    host_free = None if device.kind == "cpu" else float(free_host_bytes())
    if problem := host_problem(setting, host_free):
        raise RunError(problem.message, fix=problem.fix)
    if config.memory != "auto":
        return config, None
    if place.free_bytes is None or memory.predict(setting).allocated.value <= place.free_bytes:
        return config, None
    known = [card for card in cards if card is not None]
    usable_bytes = place.free_bytes + memory.FITTED.context_bytes
    found = ladder.climb(
        setting,
        device.gpu,
        usable_bytes,
        host_free,
        known if len(known) == processes else (),
        loss_is_open=config.chunked_loss == "auto" and device.kind != "cpu",  # whose logits are whole up to a size
    )
    if found.way is None:
        raise RunError(f"memory = 'auto': {found.missing}", fix="use a smaller model")
    changed = {**found.way.keys, "gradient_accumulation_steps": found.way.setting.accumulation * processes}
    words = ", ".join(f"{key} = {value!r}" for key, value in changed.items() if getattr(config, key) != value)
    fitting = config.replace(**changed)
    if problems := find_problems(fitting.as_dict(), processes):
        raise RunError(f"memory = 'auto' would use {words}, but {problems[0].message}", fix=problems[0].fix)
    return fitting, f"memory = 'auto': {words}, by prediction"


def next_rung(engine: Engine, micro_tokens: int) -> str | None:
    """Take the next measure that changes no number; None when it is the micro-batch's turn."""
    model, config = engine.model, engine.config
    if engine.chunk_loss(micro_tokens):
        return "chunked_loss = True"
    if config.memory != "auto":
        return None
    if not model.checkpoint_activations:
        engine.checkpoint("wide")
        return "checkpoint_activations = 'wide'"
    if micro_tokens // 2 >= BUSY_TOKENS:
        return None
    if model.checkpoint_activations == "wide":
        engine.checkpoint(True)
        return "checkpoint_activations = True"
    if engine.move_state_to_host():
        return "optimizer_device = 'cpu'"
    return "embedding_device = 'cpu'" if engine.move_tables_to_host() else None
