"""DatasetInfo: what a folder of token files holds, from manifest.json or, as nanoGPT does, from the files alone."""

from __future__ import annotations

import io
import json
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptfit import sane
from gptfit.errors import DataError
from gptfit.files import read_plain, reading_remedy, reason_of

MANIFEST = "manifest.json"
FORMAT = "gptfit-dataset"
DTYPE_BYTES = {"uint16": 2, "uint32": 4}


@dataclass(frozen=True)
class Split:
    """One of train and val: its token files in reading order."""

    tokens: int
    files: tuple[Path, ...]
    documents: int | None = None
    text_bytes: int | None = None
    counted: int | None = None  # tokens that a loss is about, where the data set says so of each
    masks: tuple[Path, ...] = ()  # beside `files`: a byte per token, 1 where it counts


@dataclass(frozen=True)
class DatasetInfo:
    """A prepared folder. `None` where a bare nanoGPT folder does not say."""

    folder: Path
    train: Split | None
    val: Split | None
    dtype: str = "uint16"
    tokenizer: str | None = None  # gpt2 | bytes | chars | tokenizer.json
    tokenizer_sha256: str | None = None
    tokenizer_file: Path | None = None
    vocab_size: int | None = None
    end_of_text: int | None = None
    has_manifest: bool = False
    chat: str | None = None  # the template of its conversations

    @property
    def model_vocab_size(self) -> int | None:
        """Rows of the model's embedding: the data's own count, but None (nanoGPT's padded 50304) for GPT-2's 50257."""
        return None if self.tokenizer == "gpt2" else self.vocab_size

    @property
    def has_documents(self) -> bool:
        """Whether there are several to train on, and a token that says where each ends."""
        return self.end_of_text is not None and (self.train is None or self.train.documents != 1)

    @property
    def bytes_per_token(self) -> float | None:
        split = self.train
        if self.chat:
            return None  # a loss is about some of the tokens, the text is that of all
        if split is None or not split.tokens or not split.text_bytes:
            return None
        return split.text_bytes / split.tokens


def data_folder(dataset: str, data_root: str = "data") -> Path:
    """nanoGPT's data/NAME, or the folder itself when `dataset` is the path of one."""
    inside = Path(data_root) / dataset
    return Path(dataset) if Path(dataset).is_dir() and not inside.is_dir() else inside


def default_name(source: str) -> str:
    """The first source's name without its endings: 'x/000_00000.parquet' -> '000_00000'."""
    last = source.split("?")[0].rstrip("/").rsplit("/", 1)[-1]
    name = re.sub(r"[^\w.-]", "", re.sub(r"(\.parquet|\.jsonl|\.csv|\.txt|\.gz|\.zst)+$", "", last)).strip(".")
    return name or "prepared"


def read_dataset(folder: str | Path) -> DatasetInfo:
    """What is there; a split whose file is missing is None, a folder with neither split is an error."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such data folder", fix=f"make one with `gptfit prepare SOURCE --out {folder}`")
    manifest = folder / MANIFEST
    info = _from_manifest(folder, manifest) if manifest.is_file() else _from_files(folder)
    if info.train is None and info.val is None:
        raise DataError(f"{folder}: has no train.bin", fix=f"make it with `gptfit prepare SOURCE --out {folder}`")
    return info


def _from_manifest(folder: Path, path: Path) -> DatasetInfo:
    try:
        manifest = json.loads(read_plain(path))
        if manifest["format"] != FORMAT:
            raise DataError(f"{path}: is not a gptfit manifest", fix="move it away or prepare the folder again")
        tokenizer, dtype = manifest["tokenizer"], manifest["dtype"]
        if dtype not in DTYPE_BYTES:
            raise DataError(f"{path}: dtype {dtype!r} is not uint16 or uint32", fix="prepare the folder again")
        splits = {name: _manifest_split(folder, entry, dtype) for name, entry in manifest["splits"].items()}
        return DatasetInfo(
            folder=folder,
            train=splits.get("train"),
            val=splits.get("val"),
            dtype=dtype,
            tokenizer=sane.text(tokenizer["name"], "tokenizer", 1000),
            tokenizer_sha256=tokenizer.get("sha256"),
            tokenizer_file=folder / sane.text(tokenizer["file"], "tokenizer file", 255)
            if tokenizer.get("file")
            else None,
            vocab_size=sane.integer(tokenizer["vocab_size"], "vocab_size", 1, sane.MOST_TOKENS),
            end_of_text=_end_of_text(tokenizer),
            has_manifest=True,
            chat=None if manifest.get("chat") is None else sane.text(manifest["chat"], "chat", 100),
        )
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({reason_of(error)})", fix=reading_remedy(error)) from None
    except KeyError as error:
        raise DataError(f"{path}: damaged manifest (it has no {error})", fix="prepare the folder again") from None
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise DataError(f"{path}: damaged manifest ({reason_of(error)})", fix="prepare the folder again") from None


def _end_of_text(tokenizer: dict[str, Any]) -> int | None:
    found = tokenizer.get("end_of_text")
    return None if found is None else sane.integer(found, "end_of_text", 0, sane.MOST_TOKENS)


def _manifest_split(folder: Path, entry: dict[str, Any], dtype: str) -> Split:
    names = [sane.text(name, "a file's name", 255) for name in sane.sequence(entry["files"], "files", 10**6)]
    if any(Path(name).name != name for name in names):
        raise ValueError("a file of the data set is not in its folder")
    files = tuple(folder / name for name in names)
    tokens = sane.integer(entry["tokens"], "tokens", 0, 10**15)
    for file in files:
        if not file.is_file():
            raise DataError(f"{file}: named in the manifest but missing", fix="prepare the folder again")
    size = sum(file.stat().st_size for file in files)
    if size != tokens * DTYPE_BYTES[dtype]:
        raise DataError(
            f"{files[0] if files else folder}: holds {size // DTYPE_BYTES[dtype]:,} tokens where the manifest says "
            f"{tokens:,}",
            fix="prepare the folder again",
        )
    documents, text_bytes = (
        None if entry.get(key) is None else sane.integer(entry[key], key, 0, 10**18) for key in ("documents", "bytes")
    )
    return Split(tokens, files, documents, text_bytes, *_mask(folder, names, tokens, entry))


def _mask(folder: Path, names: list[str], tokens: int, entry: dict[str, Any]) -> tuple[int | None, tuple[Path, ...]]:
    """How many tokens count, and the files that say which; a data set of plain documents has none."""
    if entry.get("counted") is None:
        return None, ()
    masks = tuple(folder / f"{Path(name).stem}_mask.bin" for name in names)
    for file in masks:
        if not file.is_file():
            raise DataError(f"{file}: the mask of a chat data set is missing", fix="prepare the folder again")
    if (size := sum(file.stat().st_size for file in masks)) != tokens:
        where = masks[0] if masks else folder
        raise DataError(f"{where}: masks {size:,} tokens, the data has {tokens:,}", fix="prepare the folder again")
    return sane.integer(entry["counted"], "counted", 0, tokens), masks


def _from_files(folder: Path) -> DatasetInfo:
    meta = read_meta(folder / "meta.pkl")
    vocab_size = meta.get("vocab_size") if meta else None
    return DatasetInfo(
        folder=folder,
        train=_bare_split(folder / "train.bin"),
        val=_bare_split(folder / "val.bin"),
        tokenizer="chars" if meta and "itos" in meta else None,
        tokenizer_file=folder / "meta.pkl" if meta else None,
        vocab_size=_vocab_size_of_meta(folder, vocab_size),
    )


def _vocab_size_of_meta(folder: Path, found: Any) -> int | None:
    try:
        return None if found is None else sane.integer(found, "vocab_size", 1, sane.MOST_TOKENS)
    except ValueError as error:
        raise DataError(f"{folder / 'meta.pkl'}: {error}", fix="make it again") from None


def _bare_split(path: Path) -> Split | None:
    if not path.is_file():
        return None
    size = path.stat().st_size
    if size % 2:
        raise DataError(f"{path}: {size:,} bytes is odd, so these are not 16-bit tokens", fix="prepare the file again")
    return Split(size // 2, (path,))


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, text and numbers; anything that names a class or function is refused before it runs."""

    def find_class(self, module: str, name: str) -> Any:
        asked = f"{module}.{name}"  # of a damaged file any bytes, which must not reach a terminal as they are
        raise pickle.UnpicklingError(f"it wants to run {asked if asked.isprintable() else ascii(asked)}")


def read_meta(path: Path) -> dict[str, Any] | None:
    """nanoGPT's meta.pkl as plain data, or None when there is none."""
    if not path.is_file():
        return None
    try:
        meta = _PlainUnpickler(io.BytesIO(read_plain(path))).load()
        if not isinstance(meta, dict):
            raise pickle.UnpicklingError("it holds no dict")
        return meta
    # A damaged pickle raises nearly anything: pickle's documentation names these and "not necessarily limited to".
    except (
        pickle.UnpicklingError,
        ValueError,
        EOFError,
        IndexError,
        KeyError,
        TypeError,
        AttributeError,
        OSError,
        OverflowError,
        RecursionError,
        MemoryError,
    ) as error:
        raise DataError(
            f"{path}: not a plain meta.pkl ({error})", fix="it was not run; remove it or make it again"
        ) from None
