"""wandb, tensorboard and trackio as sinks, each imported only when asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from gptfit.config.keys import DEFAULTS, TrainConfig
from gptfit.errors import ConfigError
from gptfit.logs.events import Eval, Event, Step

# What a tracker charts, and under which name (nanoGPT's wandb names where it has one).
STEP_CHARTS = {"loss": "iter/loss", "lr": "lr", "tokens_per_s": "tokens_per_s", "grad_norm": "grad_norm"}
EVAL_CHARTS = {"train_loss": "train/loss", "val_loss": "val/loss"}


def wanted_trackers(config: TrainConfig) -> list[str]:
    return sorted({config.track, "wandb" if config.wandb_log else "none"} - {"none"})


def check_trackers(config: TrainConfig) -> None:
    """One that was asked for and is not installed is told before the run; one that fails later is only dropped."""
    for name in wanted_trackers(config):
        if not _is_installed(name):  # module, tracker and gptfit's extra have one name
            key = "track" if config.track == name else "wandb_log"
            raise ConfigError(
                f"{key} = {getattr(config, key)!r} needs {name}, which is not installed",
                fix=f"pip install 'gptfit[{name}]' or leave {key} out",
                key=key,
            )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:
        return True  # somebody put a module there that does not say where it came from


class Sink(Protocol):
    """Somewhere events go."""

    def append(self, event: Event) -> None: ...

    def close(self) -> None: ...


def open_tracker(name: str, config: TrainConfig, folder: Path) -> Sink:
    return TRACKERS[name](config, folder)


def charted(event: Event) -> dict[str, float]:
    """The numbers of a step or eval event that are worth a chart."""
    names = {Step: STEP_CHARTS, Eval: EVAL_CHARTS}.get(type(event), {})
    values = {chart: float(value) for key, chart in names.items() if (value := getattr(event, key)) is not None}
    if isinstance(event, Step) and event.mfu is not None:
        values["mfu"] = 100 * event.mfu  # a percentage, as nanoGPT logs it
    return values


class WandbSink:
    """Weights & Biases, or trackio, which has the same three calls."""

    def __init__(self, library: Any, config: TrainConfig, options: Mapping[str, str]) -> None:
        self._library = library
        library.init(config=config.as_dict(), **options)

    def append(self, event: Event) -> None:
        values = charted(event)
        if values and isinstance(event, Step | Eval):
            self._library.log({"iter": event.step, **values}, step=event.step)

    def close(self) -> None:
        self._library.finish()


class TensorboardSink:
    """Scalars in out_dir/tensorboard."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def append(self, event: Event) -> None:
        if isinstance(event, Step | Eval):
            for name, value in charted(event).items():
                self._writer.add_scalar(name, value, event.step)

    def close(self) -> None:
        self._writer.close()


# What wandb.init is given, unless wandb's own variable says it: an argument would override that without a word.
WANDB_VARIABLES = {"project": "WANDB_PROJECT", "name": "WANDB_NAME", "dir": "WANDB_DIR"}
WANDB_KEYS = {"project": "wandb_project", "name": "wandb_run_name"}


def _wandb(config: TrainConfig, folder: Path) -> Sink:
    import wandb

    options = {**_names(config), "dir": str(folder)}
    return WandbSink(wandb, config, {k: v for k, v in options.items() if not os.environ.get(WANDB_VARIABLES[k])})


def overruled(config: TrainConfig) -> list[str]:
    """A line for each key of the config that wandb's environment overrules."""
    if "wandb" not in wanted_trackers(config):
        return []
    lines = []
    for option, key in WANDB_KEYS.items():
        said, wanted = os.environ.get(WANDB_VARIABLES[option]), getattr(config, key)
        if said and wanted not in (said, DEFAULTS[key]):
            lines.append(f"wandb: {option} {said!r} from {WANDB_VARIABLES[option]}, not {key} = {wanted!r}")
    return lines


def _trackio(config: TrainConfig, folder: Path) -> Sink:
    import trackio

    return WandbSink(trackio, config, _names(config))


def _names(config: TrainConfig) -> dict[str, str]:
    return {"project": config.wandb_project, "name": config.wandb_run_name}


def _tensorboard(config: TrainConfig, folder: Path) -> Sink:
    return TensorboardSink(folder)


TRACKERS = {"wandb": _wandb, "trackio": _trackio, "tensorboard": _tensorboard}
