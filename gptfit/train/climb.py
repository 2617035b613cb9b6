"""memory = 'auto': up the memory ladder by prediction before a run, and rung by rung when memory runs out in it."""

from __future__ import annotations

from gptfit.config.keys import TrainConfig
from gptfit.device.device import Device
from gptfit.device.host_memory import free_host_bytes
from gptfit.errors import RunError
from gptfit.plan import ladder, memory
from gptfit.plan.host import host_problem
from gptfit.plan.resolve import setting_of
from gptfit.shape import ModelShape
from gptfit.train.engine import Engine
from gptfit.train.place import place_of

# Below this many tokens in a micro-step a card waits for its launches: published curves fall from 82 % of peak at 8
# rows of 1,024 to 77 % at 4. Until there a smaller micro-batch costs less than computing blocks twice.
BUSY_TOKENS = 4096


def config_that_fits(
    config: TrainConfig, shape: ModelShape, device: Device, processes: int = 1
) -> tuple[TrainConfig, str | None]:
    """The config with the cheapest measures that fit what is free, and a sentence that says which."""
    place = place_of(device)
    setting = setting_of(config, shape, place, processes)
    # A CPU's host memory is its device memory: what is kept there is part of what is planned.
    host_free = None if device.kind == "cpu" else float(free_host_bytes())
    if problem := host_problem(setting, host_free):
        raise RunError(problem.message, fix=problem.fix)
    if config.memory != "auto":
        return config, None
    if place.free_bytes is None or memory.predict(setting).allocated.value <= place.free_bytes:
        return config, None
    found = ladder.climb(setting, device.gpu, place.free_bytes + memory.FITTED.context_bytes, host_free)
    if found.way is None:
        raise RunError(f"memory = 'auto': {found.missing}", fix="use a smaller model")
    changed = {**found.way.keys, "gradient_accumulation_steps": found.way.setting.accumulation * processes}
    words = ", ".join(f"{key} = {value!r}" for key, value in changed.items() if getattr(config, key) != value)
    return config.replace(**changed), f"memory = 'auto': {words}, by prediction"


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
