"""What to type next, each line as it works: after a plan, a proposal, data, a tuning session, a run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from gptfit.config.keys import KEYS, TrainConfig
from gptfit.config.read import read_config
from gptfit.config.start_model import is_pretrained, known_shape
from gptfit.dataset import DatasetInfo, data_folder, default_name, read_dataset
from gptfit.errors import GptfitError
from gptfit.logs.events import Header
from gptfit.logs.runlog import RUN_LOG, iterate_events
from gptfit.plan.known_data import KNOWN_DATA
from gptfit.shell import command

if TYPE_CHECKING:
    from gptfit.plan.candidates import Wish
    from gptfit.plan.propose import Proposal
    from gptfit.plan.result import DataFacts, Plan

NEXT = "next: "
FITTING = "fitting"  # the config that `plan --write` makes of one that does not fit
EXAMPLE_CARD = "4070"
WORTH_TUNING_S = 1800.0  # a run that takes longer pays for the ten minutes of `tune`
MANY_TIMES = 40.0  # epochs; a model gains nothing from what it has read so often (Muennighoff et al. 2023)
# Options of plan and propose that say where it is to run and on what; each with what it is unless given.
PLACE = {"--gpu": None, "--vram": None, "--data": None, "--host-memory": None} | {
    "--gpus": 1, "--nodes": 1, "--network": None
}  # fmt: skip
ASKED = {"--watts": None, "--program": "gptfit"}
WISH = {"--hours": None, "--block_size": None, "--only": None, "--watts": None}
FIRST_CONFIG = "configs/mine.py"
CONFIG_FOLDERS = (".", "configs", "config")  # the last is nanoGPT's
MOST_CONFIGS = 200  # files that are looked into for the name of a data set
# docs/chat.md's: a few rows per step, a low rate without warm-up, as often over the text as nanoGPT's own fine-tuning.
USUAL_WINDOW = KEYS["block_size"].default
FINE_TUNING = ("--batch_size=4", "--gradient_accumulation_steps=8", "--learning_rate=1e-4", "--warmup_iters=0")
FINE_TUNING_ROWS, FINE_TUNING_EPOCHS = 4 * 8, 3
LEAST_STEPS, MOST_STEPS = 50, 2000


def to_propose(data: str | Path, column: str = "text", gpu: str | None = None) -> list[str]:
    is_known = gpu or _is_this_machine_timed()
    card = gpu or (None if is_known else EXAMPLE_CARD)
    words = ["gptfit", "propose", *(["--gpu", card] if card else []), "--data", data, *_column(column), "--hours", 12]
    doubt = f"no card here: name yours instead of the {EXAMPLE_CARD}, or `--gpu cpu` for this machine"
    return [*([] if is_known else [doubt]), NEXT + command(words)]


def _is_this_machine_timed() -> bool:
    """On a machine without a card, whose CPU nobody timed, hours mean something for a card only."""
    from gptfit import measured
    from gptfit.device.local_gpu import local_gpu

    known = measured.read()
    return bool(local_gpu() or known.speeds or known.devices)


def after_plan(args: argparse.Namespace, plan: Plan) -> str:
    """One line; nothing where a problem's fix says what to do, or where another program trains."""
    if args.program != "gptfit":
        return ""
    if args.write:
        return NEXT + command(["gptfit", "plan", args.write, *_place(args)])
    if plan.ladder and plan.ladder.way and len(plan.errors) == 1:
        words = ["gptfit", "plan", *args.configs, *args.overrides, *_recipe(args), *_place(args)]
        return NEXT + command([*words, "--write", f"{FITTING}.py"])
    if not plan.runs:
        return ""
    trained_on = data_folder(plan.config.dataset, plan.config.data_root)
    if args.data and Path(args.data).is_file():
        out = Path("data", default_name(args.data))
        if not _is_same(trained_on, out):
            return NEXT + command(_prepare(args.data, args.text_column, str(out)))
    more = []
    if args.data and Path(args.data).is_dir() and Path(args.data).resolve() != trained_on.resolve():
        more = [f"--dataset={args.data}"]
    elif not trained_on.is_dir():
        is_waited_for = args.configs and plan.config.dataset not in KNOWN_DATA
        words = ["prepare", "FILE.parquet", "--out", trained_on] if is_waited_for else ["inspect", "FILE.parquet"]
        return "next, with text of your own: " + command(["gptfit", *words])
    elif not args.configs and not is_pretrained(plan.config) and plan.epochs and plan.epochs.value > MANY_TIMES:
        return "\n".join(to_propose(trained_on, gpu=args.gpu))
    return NEXT + _of_config("tune" if _is_long(plan) else "train", args, more)


def _is_long(plan: Plan) -> bool:
    return plan.seconds is None or plan.seconds.value > WORTH_TUNING_S


def same_plan(args: argparse.Namespace, keys: Sequence[str]) -> str:
    """The command for the plan of these arguments and keys."""
    return command(["gptfit", "plan", *_place(args), *_given(args, ASKED), *keys])


def after_tune(args: argparse.Namespace, written: Path | None) -> str:
    """The run with what was found: by the copy of the config, where one was written, which takes the place of the last."""
    words = [*args.configs, *args.overrides]
    if written is None:
        return NEXT + _of_config("train", args, ["--batch_size=auto"])
    files = [word for word in words if not word.startswith("--")]
    keys = [word for word in words if word.startswith("--") and not word.startswith("--batch_size")]
    return NEXT + command(["gptfit", "train", *files[:-1], written, *keys, *_recipe(args)])


def before_writing(args: argparse.Namespace) -> str:
    """The same proposal, kept as a config file; where there is one of that name already, another."""
    names = (FIRST_CONFIG, *(FIRST_CONFIG.replace(".py", f"-{number}.py") for number in range(2, MOST_CONFIGS)))
    free = next(name for name in names if not Path(name).exists())
    return NEXT + command(["gptfit", "propose", *_place(args), *_given(args, WISH), "--write", free])


def after_propose(choice: Proposal, wish: Wish, written: Path) -> list[str]:
    """A vocabulary where it is to be the data's own, then the tokens where there are none, then the run."""
    data = choice.plan.config.dataset
    commands = []
    tokenizer = ""
    if wish.source and choice.vocabulary:
        tokenizer, size = f"data/{data}.json", choice.vocabulary
        if find_spec("tokenizers") is None:
            commands.append("pip install 'gptfit[hf]'")
        words = ["gptfit", "tokenizer", "train", wish.source, *_column(wish.column)]
        commands.append(command([*words, "--vocab-size", size, "--out", tokenizer]))
    if wish.source:
        commands.append(command(_prepare(wish.source, wish.column, f"data/{data}", tokenizer)))
    elif _is_unprepared(wish.data):
        commands.append(f"gptfit prepare SOURCE --out data/{data}  (SOURCE: its Parquet files)")
    if not _is_long(choice.plan):
        return [*commands, command(["gptfit", "train", written])]
    return [*commands, command(["gptfit", "tune", written]), command(["gptfit", "train", written, "--batch_size=auto"])]


def after_prepare(info: DatasetInfo) -> list[str]:
    """The run whose config is waiting for these tokens; conversations for the last run that knows them; else a proposal."""

    def knows(header: Header) -> bool:
        return header.dataset.tokenizer_sha256 == info.tokenizer_sha256

    if info.chat and (run := newest_run(Path("."), knows, with_weights=True)):
        words = [f"--init_from={run}", f"--dataset={info.folder}", f"--out_dir={run}-chat", *FINE_TUNING]
        return [NEXT + command(["gptfit", "train", *words, *_fine_tuning_steps(info, run)])]
    waiting = list(islice(_configs_for(info.folder), 2))
    if len(waiting) == 1:
        return [NEXT + _begin(waiting[0])]
    return to_propose(info.folder)


def _begin(config: Path) -> str:
    """As the plan of it on this machine's card says: `tune` before a long run."""
    from gptfit.verbs.make_plan import make_plan, plan_arguments

    parser = argparse.ArgumentParser()
    plan_arguments(parser)
    args = parser.parse_args([str(config), *([] if _is_this_machine_timed() else ["--gpu", EXAMPLE_CARD])])
    with suppress(GptfitError):
        plan, _ = make_plan(args)
        return _of_config(("tune" if _is_long(plan) else "train") if plan.runs else "plan", args, [])
    return _of_config("train", args, [])


def after_train(config: TrainConfig) -> str:
    """A model that was taught conversations is talked with, any other one continues a text."""
    with suppress(GptfitError):
        if read_dataset(data_folder(config.dataset, config.data_root)).chat:
            return NEXT + command(["gptfit", "chat", config.out_dir])
    return NEXT + command(["gptfit", "sample", config.out_dir])


def _fine_tuning_steps(info: DatasetInfo, run: Path) -> list[str]:
    known = known_shape(str(run))
    per_step = FINE_TUNING_ROWS * min(known.block_size if known else USUAL_WINDOW, USUAL_WINDOW)
    tokens = info.train.tokens if info.train else 0
    steps = min(MOST_STEPS, max(LEAST_STEPS, round(FINE_TUNING_EPOCHS * tokens / per_step)))
    return [f"--max_iters={steps}", f"--lr_decay_iters={steps}", f"--eval_interval={steps // 5}", "--eval_iters=20"]


def to_watch(config: TrainConfig) -> str:
    return "to follow it, in another terminal: " + command(["gptfit", "watch", Path(config.out_dir).parent])


def to_compare(config: TrainConfig) -> list[str]:
    """With the last run beside it that was trained on the same data."""
    mine = Path(config.out_dir)
    other = newest_run(mine.parent, lambda header: header.config.get("dataset") == config.dataset, but=mine)
    return ["to compare: " + command(["gptfit", "compare", other, mine])] if other else []


def newest_run(
    place: Path, fits: Callable[[Header], bool], but: Path | None = None, with_weights: bool = False
) -> Path | None:
    """The folder in `place` that was trained last, of those whose header is wanted."""
    try:
        logs = {log.parent: log.stat().st_mtime for log in place.glob(f"*/{RUN_LOG}")}
        if with_weights:  # a run that was stopped at once has none
            logs = {run: written for run, written in logs.items() if any(run.glob("*.pt"))}
    except OSError:
        return None
    newest_first = sorted(logs, key=logs.__getitem__, reverse=True)
    others = (run for run in newest_first if but is None or run.resolve() != but.resolve())
    return next((run for run in others if (header := _header(run)) and fits(header)), None)


def _header(run: Path) -> Header | None:
    with suppress(GptfitError, OSError):
        first = next(iterate_events(run / RUN_LOG, []), None)
        return first if isinstance(first, Header) else None
    return None


def _configs_for(folder: Path) -> Iterator[Path]:
    """Config files in the usual places that train on this folder."""
    found = (path for place in CONFIG_FOLDERS for path in sorted(Path(place).glob("*.py")))
    for path in islice(found, MOST_CONFIGS):
        with suppress(GptfitError, OSError):
            loaded = read_config([path])
            config = loaded.config
            if "dataset" in loaded.sources and _is_same(data_folder(config.dataset, config.data_root), folder):
                yield path


def _is_same(one: Path, other: Path) -> bool:
    return one.is_dir() and one.resolve() == other.resolve()


def _of_config(verb: str, args: argparse.Namespace, more: list[str]) -> str:
    """The same config for another verb."""
    return command(["gptfit", verb, *args.configs, *args.overrides, *_recipe(args), *more])


def _place(args: argparse.Namespace) -> list[str]:
    return _given(args, PLACE) + (_column(args.text_column) if args.data else [])


def _given(args: argparse.Namespace, options: Mapping[str, object]) -> list[str]:
    """Those that were typed, as they were."""
    found = {name: getattr(args, name.strip("-").replace("-", "_"), usual) for name, usual in options.items()}
    typed = {name: f"{value:g}" if isinstance(value, float) else f"{value}" for name, value in found.items()}
    return [word for name, value in found.items() if value != options[name] for word in (name, typed[name])]


def _recipe(args: argparse.Namespace) -> list[str]:
    return [] if args.recipe == "gpt2" else ["--recipe", args.recipe]


def _prepare(source: str, column: str, out: str, tokenizer: str = "") -> list[str]:
    chosen = ["--tokenizer", tokenizer] if tokenizer else []
    return ["gptfit", "prepare", source, *_column(column), *chosen, "--out", out]


def _column(name: str) -> list[str]:
    return [] if name == "text" else ["--text-column", name]


def _is_unprepared(data: DataFacts) -> bool:
    return data.name in KNOWN_DATA and not data_folder(data.name).is_dir()
