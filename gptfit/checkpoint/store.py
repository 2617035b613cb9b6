"""CheckpointStore: ckpt.pt, best.pt and the last few, written so that no moment is without a good one."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

import torch

from gptfit.checkpoint.divided import part_folders, remove_unnamed
from gptfit.checkpoint.format import BEFORE_DECAY, BEST, KEPT, LAST, Checkpoint, kept_copies, newest_readable
from gptfit.errors import RunError
from gptfit.files import (
    FULL,
    FolderLock,
    NoRoom,
    check_room,
    make_writable_folder,
    reason_of,
    remedy_of,
    remove_leftovers,
    remove_tree,
    second_name,
    write_whole,
)

# The names of what a run makes, as a regular expression.
OURS = r"(?:ckpt(?:-\d+)?|best|before-decay|finished-\d+)\.pt|report\.html|\.writable"
EARLIER = "earlier-{}"
MOVING = ".part"  # of a folder that an earlier run's files are being moved into
SLACK = 1.02  # names, headers and padding beside the tensors
SLACK_BYTES = 2**18


def make_run_folder(out_dir: str) -> Path:
    """The folder of a run, there and writable."""
    folder = Path(out_dir)
    try:
        make_writable_folder(folder)
    except OSError as error:
        raise RunError(f"{folder}: cannot write here ({reason_of(error)})", fix="choose another --out_dir") from None
    for name in (LAST, BEST, BEFORE_DECAY):
        if (folder / name).is_dir():  # better known now than at the first save
            raise RunError(f"{folder / name}: is a folder, and a checkpoint has this name", fix="move it away")
    return folder


def lock_run_folder(folder: Path) -> FolderLock:
    try:
        return FolderLock(folder, "training into", "wait for it, stop it, or use another --out_dir")
    except OSError as error:
        raise RunError(f"{folder}: cannot be locked ({reason_of(error)})", fix=remedy_of(error)) from None


class CheckpointStore:
    """Owns the checkpoint files of one run folder."""

    def __init__(self, folder: Path, keep: int, is_writer: bool = True) -> None:
        self.folder = folder
        self.keep = keep
        self.last_step: int | None = None  # of ckpt.pt
        if is_writer:
            remove_leftovers(folder, OURS, is_ours_alone=True)
            remove_unnamed(folder)

    def save_last(self, checkpoint: Checkpoint, is_end: bool = False) -> None:
        """Replace ckpt.pt; the one it replaces lives on as ckpt-STEP.pt until `keep` newer ones exist."""
        self._keep_last(checkpoint.iter_num)
        self._write(self.folder / LAST, checkpoint, is_end)
        self.last_step = checkpoint.iter_num
        self.remove_surplus()

    def remove_surplus(self) -> None:
        """Copies beyond `keep`. A name that ckpt.pt itself got before it was to be replaced is not counted, and one of a
        later step is somebody else's.
        """
        assert self.last_step is not None, "after a save, or when ckpt.pt was resumed"
        for old in kept_copies(self.folder, self.last_step)[self.keep :]:
            remove_tree(old)
        remove_unnamed(self.folder)

    def save_best(self, checkpoint: Checkpoint, is_end: bool = False) -> None:
        self._write(self.folder / BEST, checkpoint, is_end)

    def save_before_decay(self, checkpoint: Checkpoint, is_end: bool = False) -> None:
        self._write(self.folder / BEFORE_DECAY, checkpoint, is_end)

    def check_first_room(self, needed_bytes: int) -> None:
        """Before the first step: a disk that cannot hold one checkpoint is better known now than in an hour."""
        try:
            check_room(self.folder, _with_slack(needed_bytes), "the first checkpoint")
        except OSError:
            return  # a disk that cannot be asked

    def go_back_to(self, earlier: Path, step: int, last_step: int) -> None:
        """`earlier` becomes ckpt.pt; the finished model keeps living as finished-STEP.pt."""
        try:
            second_name(self.folder / LAST, self.folder / f"finished-{last_step:08d}.pt")
            second_name(earlier, self.folder / LAST)
        except OSError as error:
            raise RunError(f"{self.folder}: cannot go back to {earlier.name} ({reason_of(error)})") from None
        earlier_ones = kept_copies(self.folder, step + 1)
        for copy in kept_copies(self.folder, last_step + 1):
            if copy not in earlier_ones:
                remove_tree(copy)
        self.last_step = step

    def load_last(self) -> Checkpoint | None:
        """The newest good checkpoint, or None before the first."""
        if not (self.folder / LAST).is_file():
            return None
        return newest_readable(self.folder)[0]

    def set_aside_earlier_run(self) -> Path | None:
        """A run that starts from scratch must not overwrite another's work: its files move into a folder.

        The folder gets its name when all of them are in it, so that a start that was killed half-way is gone on with.
        """
        number = 1
        while (self.folder / EARLIER.format(number)).exists():
            number += 1
        aside = self.folder / EARLIER.format(number)
        moving = aside.with_name(aside.name + MOVING)
        patterns = (LAST, BEST, BEFORE_DECAY, "finished-*.pt")
        files = [path for pattern in patterns for path in sorted(self.folder.glob(pattern)) if path.is_file()]
        files += kept_copies(self.folder) + part_folders(self.folder)
        if not files and not moving.is_dir():
            return None
        try:
            moving.mkdir(exist_ok=True)
            # The log last: until it is gone the folder is plainly the earlier run's.
            for file in [*files, self.folder / "run.jsonl"]:
                if file.exists():
                    os.replace(file, moving / file.name)
            os.replace(moving, aside)
        except OSError as error:
            raise RunError(
                f"{self.folder}: the earlier run cannot be moved aside ({reason_of(error)})",
                fix="use another --out_dir",
            ) from None
        return aside

    def _keep_last(self, new_step: int) -> None:
        """A second name for the ckpt.pt that is about to be replaced. Where the disk refuses, the old file is simply not kept."""
        last = self.folder / LAST
        if self.keep > 0 and last.is_file() and self.last_step is not None and self.last_step != new_step:
            with suppress(OSError):
                second_name(last, self.folder / KEPT.format(self.last_step))

    def _write(self, path: Path, checkpoint: Checkpoint, is_end: bool) -> None:
        """All of it or an error. What failed once is tried once more: a disk may refuse a single call.

        A full disk is given room from what is ours: older kept checkpoints, oldest first. At the end of a run, where
        there is no next time, it is tried however little room there seems to be.
        """
        tries = 0
        while True:
            try:
                self.folder.mkdir(exist_ok=True)  # somebody may have deleted it; the work is still worth keeping
                if not is_end:
                    check_room(self.folder, _with_slack(checkpoint.size_bytes), "a checkpoint")
                write_whole(path, partial(_save_into, checkpoint))
                return
            except (OSError, RuntimeError, NoRoom) as error:
                tries += 1
                if _is_full(error) and self._give_up_oldest():
                    continue
                if isinstance(error, NoRoom):
                    raise
                if tries == 1:
                    continue
                raise RunError(
                    f"{path}: could not be written ({reason_of(error)})", fix="the previous checkpoint is untouched"
                ) from None

    def _give_up_oldest(self) -> bool:
        """Whether a kept checkpoint made room."""
        if self.last_step is None:  # there is no good ckpt.pt: a copy may be all there is
            return False
        kept = kept_copies(self.folder, self.last_step + 1)
        if not kept:
            return False
        remove_tree(kept[-1])
        return not kept[-1].exists()


class _FileForTorch:
    """torch turns a failed write into a RuntimeError of its own; this keeps what the disk said."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()


def _save_into(checkpoint: Checkpoint, file: IO[bytes]) -> None:
    kept = _FileForTorch(file)
    try:
        torch.save(checkpoint.as_saved(), kept)  # type: ignore[arg-type]
    except RuntimeError:
        if kept.error:
            raise kept.error from None
        raise


def _with_slack(tensor_bytes: int) -> int:
    return int(tensor_bytes * SLACK) + SLACK_BYTES


def _is_full(error: Exception) -> bool:
    return isinstance(error, NoRoom) or (isinstance(error, OSError) and error.errno in FULL)
