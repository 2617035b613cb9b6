"""An exported folder on the Hugging Face hub: what stands there is asked first, what has arrived is not sent again."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptfit import __version__
from gptfit.data.hub import failures
from gptfit.errors import DeviceError, GptfitError, RunError, UsageError
from gptfit.files import reason_of

AGAIN = "run the same command again: what has arrived is not sent twice"
NOT_OURS = ".gitattributes"  # the hub's own, in every repository
MOST_NAMES = 3


@dataclass(frozen=True)
class Repository:
    """A model repository as it stands on the hub. `files` have the hash the hub gives them; None: there is none."""

    name: str
    endpoint: str
    files: dict[str, str] | None = None
    is_private: bool = True

    @property
    def address(self) -> str:
        return f"{self.endpoint}/{self.name}"


def find_repository(name: str) -> Repository:
    """Before anything is exported: whether the name, the token and the network are such that it could be pushed."""
    owner, slash, rest = name.partition("/")
    if not (owner and slash and rest) or "/" in rest:
        raise UsageError(f"--push {name}: name it OWNER/NAME", fix="for example --push me/my-first-gpt")
    hub = _hub()
    api = hub.HfApi(library_name="gptfit", library_version=__version__)
    found = Repository(name, api.endpoint)
    if hub.get_token() is None:
        raise RunError(f"{name}: no token for {api.endpoint}", fix="run `hf auth login`, or set HF_TOKEN")
    with _in_words(found):
        try:
            is_private = bool(api.repo_info(name).private)
            return Repository(name, api.endpoint, _files(api, name), is_private)
        except hub.errors.RepositoryNotFoundError:
            return found


def push(folder: Path, there: Repository, public: bool, replace: bool = False) -> tuple[str, ...]:
    """Upload the folder and compare what arrived; what was found, in words."""
    ours = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    others = {name for name, known in (there.files or {}).items() if not _is_same(ours.get(name), known)}
    if others and not replace:
        raise RunError(
            f"{there.name}: exists on the hub and has {_some(others)}",
            fix="choose another name, or --replace files of the same names (its history keeps the old ones)",
        )
    api = _hub(quiet=not sys.stderr.isatty()).HfApi(library_name="gptfit", library_version=__version__)
    with _in_words(there):
        if there.files is None:
            api.create_repo(there.name, private=not public)
        api.upload_folder(
            repo_id=there.name, folder_path=folder, commit_message=f"Upload a model of gptfit {__version__}"
        )
        arrived = _files(api, there.name)
    wrong = {name for name, path in ours.items() if not _is_same(path, arrived.get(name, ""))}
    if wrong:
        raise RunError(f"{there.name}: {_some(wrong)} did not arrive as sent", fix=AGAIN)
    return (f"{len(ours)} files on the hub are equal to ours", *_visibility(there, public))


def name_the_repository(folder: Path, name: str) -> None:
    """In the card's example, which has a path otherwise."""
    card = folder / "README.md"
    card.write_text(card.read_text(encoding="utf-8").replace('"PATH"', f'"{name}"'), encoding="utf-8")


def _visibility(there: Repository, public: bool) -> tuple[str, ...]:
    if there.files is None:
        return ("it is public",) if public else ("it is private; its page on the hub can make it public",)
    kept = "private" if there.is_private else "public"
    return (f"the repository was there before and stays {kept}",) if there.is_private == public else (f"it is {kept}",)


def _hub(quiet: bool = False) -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError:
        raise DeviceError("--push needs the huggingface_hub package", fix="pip install 'gptfit[hf]'") from None
    hub: Any = huggingface_hub
    if quiet:
        hub.utils.disable_progress_bars()
    return hub


def _files(api: Any, name: str) -> dict[str, str]:
    """Path and hash: sha256 of a large file, git's own of a small one."""
    entries = [entry for entry in api.list_repo_tree(name, recursive=True) if hasattr(entry, "blob_id")]
    return {entry.path: entry.lfs.sha256 if entry.lfs else entry.blob_id for entry in entries if entry.path != NOT_OURS}


def _is_same(path: Path | None, known: str) -> bool:
    if path is None:
        return False
    if len(known) == hashlib.sha256().digest_size * 2:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == known
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() == known


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:MOST_NAMES])
    return shown if len(names) <= MOST_NAMES else f"{shown} and {len(names) - MOST_NAMES} more"


@contextmanager
def _in_words(there: Repository) -> Iterator[None]:
    """What the hub's client raises, as one line."""
    # Errors of a thread or of the storage's own library come as RuntimeError, malformed names and answers as ValueError.
    expected: tuple[type[Exception], ...] = (*failures(), RuntimeError, ValueError)
    try:
        yield
    except expected as error:
        raise _refusal(error, there) or _trouble(error, there) from None


def _refusal(error: BaseException, there: Repository) -> GptfitError | None:
    """The hub said no."""
    owner, tokens = there.name.partition("/")[0], f"{there.endpoint}/settings/tokens"
    status = _status(error)
    if status == 401:
        fix = f"log in with `hf auth login`, or make a new one at {tokens}"
        return RunError(f"{there.name}: the hub does not accept the token", fix=fix)
    if status in (403, 404):
        fix = f"use one with write access to {owner}: {tokens}"
        return RunError(f"{there.name}: the token may not write there", fix=fix)
    if status == 409:
        return RunError(f"{there.name}: exists on the hub and is not yours to see", fix="choose another name")
    return None


def _trouble(error: BaseException, there: Repository) -> GptfitError:
    cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
    status, said = _status(cause), reason_of(cause)
    if status is not None:
        return RunError(f"{there.name}: {there.endpoint} answered {status} ({said})", fix=AGAIN)
    if isinstance(cause, failures()):
        message = f"{there.name}: {there.endpoint} cannot be reached ({said})"
        return RunError(message, fix=f"check the network; {AGAIN}")
    fix = "check the name" if isinstance(cause, ValueError) else AGAIN
    return RunError(f"{there.name}: could not be pushed ({said})", fix=fix)


def _status(error: BaseException) -> int | None:
    """Of the answer, which may be the cause of what was raised."""
    response = getattr(error, "response", None)
    if response is None and error.__cause__ is not None:
        return _status(error.__cause__)
    return None if response is None else int(response.status_code)
