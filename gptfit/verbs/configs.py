"""`gptfit configs`: the ready config files that come with gptfit, listed, shown or copied."""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path
from typing import Any

from gptfit.config.read import read_config
from gptfit.errors import UsageError
from gptfit.shell import command
from gptfit.verbs.common import check_new_config, print_json, write_config_text

HELP = "The ready config files that come with gptfit: list them, show one, or copy it to change it."
EXAMPLES = ("gptfit configs modern_cpu --out mine.py",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="show this one (default: list them)")
    parser.add_argument("--out", type=Path, metavar="FILE.py", help="copy it to this new file")
    parser.add_argument("--json", action="store_true", help="print JSON with stable names")


def run(args: argparse.Namespace) -> int:
    ready = ready_configs()
    if args.name is None:
        if args.json:
            print_json([_as_json(path) for path in ready.values()])
        else:
            print("\n".join([*(f"{name:<18} {_title(path)}" for name, path in ready.items()), "", NEXT]))
        return 0
    path = _find(args.name, ready)
    if args.out is not None:
        check_new_config(args.out)
        write_config_text(args.out, path.read_text(encoding="utf-8"))
        print(f"{args.out}: {_title(path)}\nnext: {command(['gptfit', 'plan', args.out])}")
    elif args.json:
        print_json(_as_json(path))
    else:
        print(path.read_text(encoding="utf-8"), end="")
    return 0


NEXT = "`gptfit configs NAME` shows one, `gptfit configs NAME --out mine.py` copies it"


def ready_configs() -> dict[str, Path]:
    """By name: inside the installed package, or beside it in a clone."""
    package = Path(__file__).resolve().parent.parent
    folder = next(folder for folder in (package / "configs", package.parent / "configs") if folder.is_dir())
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def _find(name: str, ready: dict[str, Path]) -> Path:
    stem = Path(name).stem
    if stem in ready:
        return ready[stem]
    close = difflib.get_close_matches(stem, ready, n=1, cutoff=0.4)
    raise UsageError(f"{name} is not one of them", fix=f"did you mean {close[0]}?" if close else ", ".join(ready))


def _title(path: Path) -> str:
    """Its first line, which is a comment that says what it is."""
    return path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def _as_json(path: Path) -> dict[str, Any]:
    read = read_config([path])
    changed = {key: getattr(read.config, key) for key in read.sources}
    return {"name": path.stem, "title": _title(path), "keys": changed, "text": read.texts[0]}
