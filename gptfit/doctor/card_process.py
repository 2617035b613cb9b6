"""One check of the card in a process of its own: `python -m gptfit.doctor.card_process`, spoken to as a trial is."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import torch

from gptfit.config.keys import TrainConfig
from gptfit.doctor.calibrate import measure_costs
from gptfit.doctor.calibration import CHECK
from gptfit.doctor.card_checks import run_check
from gptfit.tune.trial import Tell, serve


def answer(request: dict[str, Any], tell: Tell) -> None:
    config = TrainConfig(**request["config"])
    if request.get("threads"):  # a fork has what its parent was started with
        torch.set_num_threads(request["threads"])
    if request["check"] == CHECK:
        found = measure_costs(config, request["compiled"], request["most_s"], lambda name: tell("stage", name=name))
        tell("done", **found.as_json())
        return
    tell("done", **asdict(run_check(request["check"], config)))


def main() -> int:
    return serve(answer)


if __name__ == "__main__":
    sys.exit(main())
