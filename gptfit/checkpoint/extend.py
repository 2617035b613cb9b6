"""A longer horizon for a wsd run: it goes on from before the decay, where every update had the full rate."""

from __future__ import annotations

from dataclasses import replace

from gptfit.checkpoint.format import BEFORE_DECAY, Checkpoint, load_checkpoint
from gptfit.checkpoint.store import CheckpointStore
from gptfit.config.keys import TrainConfig
from gptfit.schedule import decay_start


def is_decay_start(config: TrainConfig, step: int) -> bool:
    """Whether the checkpoint to keep for a longer run is due."""
    return step > 0 and step == decay_start(config)


def checkpoint_for_horizon(
    store: CheckpointStore, last: Checkpoint, config: TrainConfig, is_writer: bool
) -> Checkpoint:
    """`last`, unless it has decayed and the config's decay begins later: then the one kept before the decay.

    The decayed model stays in the folder under a name of its own. The best loss is still that of the whole run, so
    that best.pt is replaced by a better model only.
    """
    kept = store.folder / BEFORE_DECAY
    began, begins = decay_start(TrainConfig.unchecked(**{**config.as_dict(), **last.config})), decay_start(config)
    if began is None or begins is None or not kept.is_file() or last.iter_num <= began or begins <= began:
        return last
    earlier = load_checkpoint(kept)
    if is_writer:
        store.go_back_to(kept, earlier.iter_num, last.iter_num)
    return replace(earlier, best_val_loss=min(earlier.best_val_loss, last.best_val_loss))
