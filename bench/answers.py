"""docs/answers.md: for common cards and some hours, the model worth training, from `gptfit propose` itself.

python bench/answers.py            # writes docs/answers.md
"""

from __future__ import annotations

import sys
from pathlib import Path

import gptfit
from gptfit.units import duration, si

PAGE = Path(__file__).resolve().parent.parent / "docs" / "answers.md"
DATA = "openwebtext"
HOURS = (3, 12, 48)
CARDS = (
    "GTX 1080 Ti", "RTX 2060", "RTX 2080 Ti", "T4", "RTX 3060 12GB", "RTX 3070", "RTX 3080 10GB", "RTX 3090", "RTX 4060 8GB",
    "RTX 4060 Ti 16GB", "RTX 4070 12GB", "RTX 4070 SUPER 12GB", "RTX 4070 Ti SUPER 16GB", "RTX 4080 16GB", "RTX 4090 24GB",
    "RTX 5060 Ti 16GB", "RTX 5070 12GB", "RTX 5070 Ti 16GB", "RTX 5080 16GB", "RTX 5090 32GB",
)  # fmt: skip

HEAD = f"""# Answers

For each card and time, the config with the lowest expected loss on {DATA} (fresh text, GPT-2's vocabulary), as
`gptfit propose --gpu CARD --data {DATA} --hours H` gives it. Made by `python bench/answers.py`; every figure is a fit to
published runs with the range that the command shows, none was measured here. Your own data and card: run the command.

| card | hours | model | parameters | recipe | micro-batch | memory | tokens | takes | expected loss |
|---|---|---|---|---|---|---|---|---|---|
"""


def row(card: str, hours: float) -> str:
    plan = gptfit.propose(DATA, hours, gpu=card).choice.plan
    assert plan.memory is not None
    assert plan.seconds is not None
    assert plan.loss is not None
    shape, config, loss = plan.shape, plan.config, plan.loss.loss
    return (
        f"| {card} | {hours:g} | {shape.n_layer} x {shape.n_embd} | {si(shape.parameters)} | {shape.arch} | "
        f"{config.batch_size} | {plan.memory.device.value / 2**30:.1f} GiB | {si(plan.tokens)} | "
        f"{duration(plan.seconds.value)} | {loss.value:.2f} ({loss.low:.2f} to {loss.high:.2f}) |"
    )


def main() -> int:
    rows = [row(card, hours) for card in CARDS for hours in HOURS]
    PAGE.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")
    print(f"{len(rows)} answers in {PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
