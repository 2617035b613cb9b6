"""A longer horizon for a wsd run: it goes on from before the decay, where every update had the full rate."""

from __future__ import annotations

from gptfit.checkpoint.format import BEFORE_DECAY, Checkpoint, load_checkpoint
from gptfit.checkpoint.store import CheckpointStore
from gptfit.config.keys import TrainConfig
from gptfit.schedule import decay_start


def is_decay_start(config: TrainConfig, step: int) -> bool:
    """Whether the checkpoint to keep for a longer run is due."""
    return step > 0 and step == decay_start(config)


def before_decay_of(store: CheckpointStore, last: Checkpoint, config: TrainConfig) -> Checkpoint | None:
    """The checkpoint kept before the decay, where `last` has decayed and the config's decay begins later.

    The caller lets the store go back to it: ckpt.pt is then this one, and the decayed model has a name of its own.
    """
    kept = store.folder / BEFORE_DECAY
    began, begins = decay_start(TrainConfig.unchecked(**{**config.as_dict(), **last.config})), decay_start(config)
    if began is None or begins is None or not kept.is_file() or last.iter_num <= began or begins <= began:
        return None
    return load_checkpoint(kept)
