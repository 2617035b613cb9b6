"""CheckpointStore: ckpt.pt, best.pt and the last few, written so that no moment is without a good one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from gptfit.errors import RunError
from gptfit.run.checkpoint import BEFORE_DECAY, BEST, LAST, Checkpoint, newest_readable
from gptfit.run.files import check_free_space
from gptfit.wholefile import TEMPORARY, write_whole

SLACK_BYTES = 16 * 1024**2  # names, headers and the log beside the tensors


class CheckpointStore:
    """Owns the checkpoint files of one run folder."""

    def __init__(self, folder: Path, keep: int, is_writer: bool = True) -> None:
        self.folder = folder
        self.keep = keep
        self.last_step: int | None = None  # of ckpt.pt
        for leftover in folder.glob(f"*.pt*{TEMPORARY}") if is_writer else ():
            leftover.unlink()

    def save_last(self, checkpoint: Checkpoint) -> None:
        """Replace ckpt.pt; the one it replaces lives on as ckpt-STEP.pt until `keep` newer ones exist."""
        last = self.folder / LAST
        self._check_space(checkpoint)
        if last.is_file() and self.last_step is not None and self.last_step != checkpoint.iter_num:
            _link(last, self.folder / f"ckpt-{self.last_step:08d}.pt")
        self._write(last, checkpoint)
        self.last_step = checkpoint.iter_num
        for old in sorted(self.folder.glob("ckpt-*.pt"), reverse=True)[self.keep :]:
            old.unlink()

    def save_best(self, checkpoint: Checkpoint) -> None:
        self._check_space(checkpoint)
        self._write(self.folder / BEST, checkpoint)

    def save_before_decay(self, checkpoint: Checkpoint) -> None:
        self._check_space(checkpoint)
        self._write(self.folder / BEFORE_DECAY, checkpoint)

    def go_back_to(self, earlier: Path, step: int, last_step: int) -> None:
        """`earlier` becomes ckpt.pt; the finished model keeps living as finished-STEP.pt."""
        _link(self.folder / LAST, self.folder / f"finished-{last_step:08d}.pt")
        new = self.folder / f"{LAST}.{os.getpid()}{TEMPORARY}"
        _link(earlier, new)
        os.replace(new, self.folder / LAST)
        for later in self.folder.glob("ckpt-*.pt"):
            if later.name > f"ckpt-{step:08d}.pt":
                later.unlink()
        self.last_step = step

    def load_last(self) -> Checkpoint | None:
        """The newest good checkpoint, or None before the first."""
        if not (self.folder / LAST).is_file():
            return None
        return newest_readable(self.folder)[0]

    def set_aside_earlier_run(self) -> Path | None:
        """A run that starts from scratch must not overwrite another's work: its files move into a folder."""
        patterns = ("ckpt-*.pt", "finished-*.pt")
        names = [LAST, BEST, BEFORE_DECAY, *(p.name for pattern in patterns for p in self.folder.glob(pattern))]
        files = [self.folder / name for name in names if (self.folder / name).is_file()]
        if not files:
            return None
        number = 1
        while (self.folder / f"earlier-{number}").exists():
            number += 1
        aside = self.folder / f"earlier-{number}"
        aside.mkdir()
        for file in [*files, self.folder / "run.jsonl"]:
            if file.is_file():
                os.replace(file, aside / file.name)
        return aside

    def _check_space(self, checkpoint: Checkpoint) -> None:
        check_free_space(self.folder, checkpoint.size_bytes + SLACK_BYTES, "a checkpoint")

    def _write(self, path: Path, checkpoint: Checkpoint) -> None:
        try:
            write_whole(path, lambda file: torch.save(checkpoint.as_saved(), file))
        # torch reports a failed write of its zip archive as RuntimeError, the disk itself as OSError.
        except (OSError, RuntimeError) as error:
            reason = str(error).splitlines()[0][:120]
            raise RunError(f"{path}: could not be written ({reason}); the previous checkpoint is untouched") from None


def _link(source: Path, target: Path) -> None:
    """A second name for the same bytes where the disk can, a copy where it cannot."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
