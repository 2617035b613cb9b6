"""`gptfit tune`: the micro-batch sweet spot of one config on this machine's device."""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path

from gptfit.config.keys import TUNABLE
from gptfit.config.start_model import is_pretrained
from gptfit.errors import RunError, UsageError
from gptfit.verbs.common import config_arguments, load, print_json, recipe_argument
from gptfit.verbs.gpu_and_data import find_data, vocab_size
from gptfit.verbs.next_commands import after_tune
from gptfit.verbs.ticker import LOOKING, waiting

HELP = (
    "Find the micro-batch sweet spot on the real device: same model, same tokens per step, one thing varied at a time."
)
EXAMPLES = ("gptfit tune configs/mine.py --minutes 10",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    recipe_argument(parser)
    parser.add_argument("--minutes", type=float, default=10.0, help="time to spend (default 10)")
    parser.add_argument("--also", default="", metavar="KEYS", help=f"vary as well: {','.join(TUNABLE)}")
    parser.add_argument("--sizes", default="", metavar="N,N", help="micro-batches to measure whatever the curve does")
    parser.add_argument("--headroom", type=float, default=8.0, metavar="PERCENT", help="memory kept free (default 8)")
    parser.add_argument("--memory", type=float, metavar="GIB", help="give trials at most this much (default: all free)")
    parser.add_argument(
        "--trial-seconds", type=float, default=300.0, metavar="S", help="end a trial that takes longer (default 300)"
    )
    parser.add_argument(
        "--write",
        nargs="?",
        const="",
        metavar="FILE.py",
        help="a copy of the config with the best sizes, comments kept",
    )
    parser.add_argument("--html", metavar="FILE", help="also write the curves as a self-contained page")
    parser.add_argument(
        "--csv", metavar="FILE", help="also add the winner to a table: card, model, sizes, tokens/s, memory, versions"
    )
    parser.add_argument("--json", action="store_true", help="print JSON with stable names")


def run(args: argparse.Namespace) -> int:
    _check(args)
    # argparse stops collecting files at the first --key=value
    configs = [*args.configs, *(word for word in args.overrides if not word.startswith("--"))]
    target = _target(args.write, configs)
    loaded = load(args)
    config = loaded.config
    sizes = _sizes(args.sizes)
    with waiting(LOOKING) as ticker:  # torch is imported and tries its compiler
        from gptfit.checkpoint.pretrained import adopt_model
        from gptfit.tune.session import TuneOptions, run_session, silent
        from gptfit.verbs.tune_output import answer_lines, append_row, as_json, write_config, write_page
        from gptfit.verbs.tune_view import open_screen, print_result

        options = TuneOptions(
            minutes=args.minutes,
            also=tuple(word.strip() for word in args.also.split(",") if word.strip()),
            sizes=sizes,
            headroom=args.headroom / 100,
            memory_gib=args.memory,
            trial_seconds=args.trial_seconds,
        )
        config = adopt_model(config) if is_pretrained(config) else config
        shape = config.shape(vocab_size(find_data(None, config)))
        screen = partial(open_screen, ticker, args.minutes)
        result = run_session(config, shape, options, silent if args.json else screen)
    if result.best is None:
        raise RunError(result.why_nothing())
    # The answer first: it took minutes, and a full disk must not keep it from the reader.
    if args.json:
        print_json(as_json(result))
    else:
        print_result(result, answer_lines(result))
    files = []
    if target is not None:
        files.append(f"config: {write_config(result, target, loaded.texts)}")
    if args.html:
        files.append(f"page: {write_page(result, Path(args.html))}")
    if args.csv:
        files.append(f"row: {append_row(result, Path(args.csv))}")
    if not args.json:
        print("\n".join([*files, after_tune(args, target)]))
    return 0


def _check(args: argparse.Namespace) -> None:
    for option, value in (("--minutes", args.minutes), ("--trial-seconds", args.trial_seconds)):
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"{option} {value:g} makes no sense", fix="give a number above 0")
    if args.memory is not None and not (math.isfinite(args.memory) and args.memory > 0):
        raise UsageError(f"--memory {args.memory:g} makes no sense", fix="give a number of GiB above 0")
    if args.csv and not Path(args.csv).absolute().parent.is_dir():
        raise UsageError(f"--csv {args.csv}: there is no folder {Path(args.csv).parent}")
    if args.html and not Path(args.html).absolute().parent.is_dir():
        raise UsageError(f"--html {args.html}: there is no folder {Path(args.html).parent}")
    if not 0 <= args.headroom < 100:
        raise UsageError(f"--headroom {args.headroom:g} makes no sense", fix="give a percentage from 0 to 99")


def _sizes(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UsageError(f"--sizes {text}: give whole numbers above 0, as in --sizes 4,8,16")
    return tuple(int(word) for word in words)


def _target(wish: str | None, configs: list[str]) -> Path | None:
    """Where `--write` puts the copy: FILE.py, else beside the config with _tuned in its name."""
    if wish is None:
        return None
    if wish:
        path = Path(wish)
    elif configs:
        path = Path(configs[-1]).with_name(f"{Path(configs[-1]).stem}_tuned.py")
    else:
        raise UsageError("--write without a config file needs a name: --write FILE.py")
    if path.suffix != ".py":
        raise UsageError(f"--write {path}: a config file ends in .py")
    if not path.parent.is_dir():
        raise UsageError(f"--write {path}: there is no folder {path.parent}")
    if wish and path.exists():
        # `tune --write mine.py` would otherwise replace the config it was meant to read.
        raise UsageError(
            f"--write {path}: is there already", fix="give a new name, and the config to read before --write"
        )
    return path
