"""Makes the ready configs of configs/: GPT-2's sizes for cards of 8 to 32 GB, each with its plan in the comments.

python tools/ready_configs.py     writes those that are not as they should be

Learning rate, step, horizon and evaluations are propose's; the rungs are those of the memory ladder that cost least.
"""

from __future__ import annotations

from pathlib import Path

from gptfit import gpus
from gptfit.config.keys import NANOGPT_VOCAB_SIZE, TrainConfig
from gptfit.config.write import render
from gptfit.gpus import GPU
from gptfit.plan import ladder, memory, speed, usual_values
from gptfit.plan.candidates import PlannedRun, Wish
from gptfit.plan.known_data import KNOWN_DATA
from gptfit.plan.plan import plan
from gptfit.plan.proposed_config import config_of
from gptfit.plan.setting import Setting
from gptfit.shape import ModelShape
from gptfit.units import GIB, duration, gib, si

FOLDER = Path(__file__).resolve().parent.parent / "configs"
SIZES = {
    "30m": (6, 6, 384),
    "124m": (12, 12, 768),
    "350m": (24, 16, 1024),
    "774m": (36, 20, 1280),
    "1.5b": (48, 25, 1600),
}
# By memory in GB: the card it is planned for, and the models worth training on it.
CARDS = {
    8: ("RTX 4060 8GB", ("30m", "124m", "350m")),
    12: ("RTX 4070 12GB", ("124m", "350m", "774m")),
    16: ("RTX 4070 Ti SUPER 16GB", ("124m", "350m", "774m")),
    24: ("RTX 4090 24GB", ("350m", "774m", "1.5b")),
    32: ("RTX 5090 32GB", ("774m", "1.5b")),
}
DATA = "openwebtext"
BLOCK_SIZE, MOST_ROWS = 1024, 16


def main() -> None:
    for name, text in ready_texts().items():
        path = FOLDER / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8", newline="\n")
            print(f"wrote {path.name}")  # noqa: T201


def ready_texts() -> dict[str, str]:
    """File name -> text."""
    return {
        f"gpt2_{size.replace('.', '_')}_{memory_gb}gb.py": ready_text(gpus.find(card), size)
        for memory_gb, (card, sizes) in CARDS.items()
        for size in sizes
    }


def ready_text(gpu: GPU, size: str) -> str:
    config = ready_config(gpu, size)
    answer = plan(config, config.shape(NANOGPT_VOCAB_SIZE), gpu)
    setting, seconds, rate = answer.setting, answer.seconds, answer.speed.tokens_per_s if answer.speed else None
    assert setting is not None
    assert seconds is not None
    assert rate is not None
    assert answer.loss is not None
    streamed, loss = memory.host_bytes(setting), answer.loss.loss
    host = f" and {gib(streamed)} of main memory" if streamed else ""
    pace = f"{si(rate.value)} tokens/s ({si(rate.low)} to {si(rate.high)})"
    device = memory.predict(setting).device.value / GIB
    notes = [
        f"prepare the data first: gptfit prepare SOURCE --out data/{DATA}; before you start: gptfit plan THIS_FILE --gpu NAME",
        f"plan for {gpu.name}: {device:.1f} GiB{host}, {pace}, {duration(seconds.value)}",
        f"expected validation loss {loss.value:.2f} ({loss.low:.2f} to {loss.high:.2f})",
    ]
    title = f"GPT-2 {size.upper()} on a card of {gpu.vram_gib:g} GB"
    return render(config, title, notes)


def ready_config(gpu: GPU, size: str) -> TrainConfig:
    layers, heads, width = SIZES[size]
    shape = ModelShape(layers, heads, width, BLOCK_SIZE, NANOGPT_VOCAB_SIZE)
    tokens = usual_values.optimal_tokens(shape)
    rows = usual_values.tokens_per_step(shape.parameters, tokens) // BLOCK_SIZE
    way = ladder.climb(Setting(shape, MOST_ROWS, rows // MOST_ROWS), gpu, memory.usable_bytes(gpu)).way
    assert way is not None, f"{size} on {gpu.name} fits with no rungs at all"
    found = speed.predict(way.setting, gpu)
    assert found is not None
    seconds = tokens / found.tokens_per_s.value
    wish = Wish(gpu, seconds / 3600, KNOWN_DATA[DATA], NANOGPT_VOCAB_SIZE, only_nanogpt_keys=True)
    config = config_of(wish, PlannedRun(way.setting, wish.data, tokens, seconds, 0.0), found)
    name = f"gpt2-{size}"
    return config.replace(**way.keys, out_dir=f"out-{name}", wandb_run_name=name)


if __name__ == "__main__":
    main()
