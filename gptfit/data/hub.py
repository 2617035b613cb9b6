"""hf://datasets/... addresses: files of the Hugging Face hub, downloaded with resume and verified."""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gptfit.errors import DataError
from gptfit.files import reason_of

EXAMPLE = "hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT/000_00000.parquet"


@dataclass(frozen=True)
class Address:
    """hf://datasets/OWNER/NAME[@REVISION]/PATH, where PATH is a file, a folder, a glob or nothing."""

    repo: str
    revision: str
    path: str


def parse(address: str) -> Address:
    parts = address.removeprefix("hf://").split("/")
    if len(parts) < 3 or parts[0] != "datasets" or not parts[1] or not parts[2]:
        raise DataError(f"{address}: is not hf://datasets/OWNER/NAME/PATH", fix=f"for example {EXAMPLE}")
    name, _, revision = parts[2].partition("@")
    return Address(f"{parts[1]}/{name}", revision or "main", "/".join(parts[3:]))


def download(address: str, is_wanted: Callable[[str], object]) -> list[tuple[str, str]]:
    """(local path, name) of every file whose name is wanted; the hub's own cache keeps them, HF_ENDPOINT names a mirror."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        raise DataError(f"{address}: hf:// needs an extra", fix="pip install 'gptfit[hf]'") from None
    wanted = parse(address)
    expected: tuple[type[Exception], ...] = (*failures(), HFValidationError)
    try:
        # Asked once: a branch that moves meanwhile must not mix two commits. It also fails at once without a network,
        # where listing files is tried again for half a minute.
        commit = huggingface_hub.HfApi().dataset_info(wanted.repo, revision=wanted.revision).sha
        found = []
        for entry in _entries(huggingface_hub, wanted, commit, address, is_wanted):
            local = huggingface_hub.hf_hub_download(wanted.repo, entry.path, repo_type="dataset", revision=commit)
            _verify(local, entry, address)
            found.append((local, f"hf://datasets/{wanted.repo}@{wanted.revision}/{entry.path}"))
        return found
    except expected as error:
        raise DataError(f"{address}: {reason_of(error)}", fix="run the same command again to go on") from None


def failures() -> tuple[type[Exception], ...]:
    """What the hub's client raises when it is refused or there is no network.

    Its own error derives from the most general one of whichever HTTP library it uses, which has changed twice; not all of
    those are OSErrors.
    """
    from huggingface_hub.errors import HfHubHTTPError

    general = tuple(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception))
    return (*general, OSError)


def _entries(
    hub: Any, wanted: Address, commit: str | None, address: str, is_wanted: Callable[[str], object]
) -> list[Any]:
    """The files of the repository that the path names, in sorted order."""
    tree = hub.HfApi().list_repo_tree(wanted.repo, repo_type="dataset", revision=commit, recursive=True)
    files = sorted((entry for entry in tree if hasattr(entry, "size")), key=lambda entry: entry.path)
    found = [entry for entry in files if is_wanted(entry.path) and _matches(entry.path, wanted.path)]
    if not found:
        raise DataError(f"{address}: names none of the repository's {len(files)} files", fix="check the path")
    return found


def _matches(path: str, wanted: str) -> bool:
    wanted = wanted.rstrip("/")
    return not wanted or path == wanted or path.startswith(wanted + "/") or fnmatch.fnmatchcase(path, wanted)


def _verify(local: str, entry: Any, address: str) -> None:
    """Size always; sha256 where the hub states it (large files)."""
    size = os.path.getsize(local)
    if size != entry.size:
        raise DataError(
            f"{address}: {entry.path} is {size:,} bytes where the hub says {entry.size:,}", fix=f"delete {local}"
        )
    expected = entry.lfs.sha256 if entry.lfs else None
    if expected is None:
        return
    with open(local, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != expected:
            raise DataError(
                f"{address}: {entry.path} does not have the hub's sha256", fix=f"delete {local} and run again"
            )
