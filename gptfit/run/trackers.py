"""wandb, tensorboard and trackio as sinks, each imported only when asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gptfit.config import TrainConfig
from gptfit.run.report import Sink
from gptfit.runlog import Event

# What a tracker charts, and under which name (nanoGPT's wandb names where it has one).
STEP_CHARTS = {"loss": "iter/loss", "lr": "lr", "tokens_per_s": "tokens_per_s", "grad_norm": "grad_norm"}
EVAL_CHARTS = {"train_loss": "train/loss", "val_loss": "val/loss"}


def open_tracker(name: str, config: TrainConfig, folder: Path) -> Sink:
    return TRACKERS[name](config, folder)


def charted(event: Event) -> dict[str, float]:
    """The numbers of a step or eval event that are worth a chart."""
    names = {"step": STEP_CHARTS, "eval": EVAL_CHARTS}.get(event["event"], {})
    values = {names[key]: float(event[key]) for key in names if event.get(key) is not None}
    if event["event"] == "step" and event.get("mfu") is not None:
        values["mfu"] = 100 * float(event["mfu"])  # a percentage, as nanoGPT logs it
    return values


class WandbSink:
    """Weights & Biases, or trackio, which has the same three calls. Offline mode is wandb's own WANDB_MODE=offline."""

    def __init__(self, library: Any, config: TrainConfig, **options: Any) -> None:
        self._library = library
        library.init(project=config.wandb_project, name=config.wandb_run_name, config=config.as_dict(), **options)

    def append(self, event: Event) -> None:
        values = charted(event)
        if values:
            self._library.log({"iter": event["step"], **values}, step=event["step"])

    def close(self) -> None:
        self._library.finish()


class TensorboardSink:
    """Scalars in out_dir/tensorboard."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def append(self, event: Event) -> None:
        for name, value in charted(event).items():
            self._writer.add_scalar(name, value, event["step"])

    def close(self) -> None:
        self._writer.close()


def _wandb(config: TrainConfig, folder: Path) -> Sink:
    import wandb

    return WandbSink(wandb, config, dir=str(folder))


def _trackio(config: TrainConfig, folder: Path) -> Sink:
    import trackio

    return WandbSink(trackio, config)


def _tensorboard(config: TrainConfig, folder: Path) -> Sink:
    return TensorboardSink(folder)


TRACKERS = {"wandb": _wandb, "trackio": _trackio, "tensorboard": _tensorboard}
