"""`gptfit quickstart`: the whole journey on this machine, as the commands a person would type, really run."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from gptfit.config.keys import TrainConfig
from gptfit.config.recipe import training_keys
from gptfit.config.write import render
from gptfit.errors import RunError, UsageError
from gptfit.files import write_text
from gptfit.shell import command
from gptfit.units import plural
from gptfit.verbs.common import console

HELP = "The whole journey on this machine, with no download and no GPU: about three minutes on two cores."
EXAMPLES = ("gptfit quickstart", "gptfit quickstart --out /tmp/try --steps 100")
PROMPT = "The function returns"
EXAMPLE_GPU = "RTX 4070"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("quickstart"), help="folder to work in (default: quickstart)")
    parser.add_argument("--steps", type=int, default=300, help="training steps (default 300)")


def run(args: argparse.Namespace) -> int:
    folder: Path = args.out
    if args.steps < 1:
        raise UsageError(f"--steps {args.steps} must be 1 or more")
    if find_spec("torch") is None:  # known now, not after three of the seven steps
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    config = quickstart_config(folder, args.steps)
    _say("1. Text. No download: the manual and docstrings that came with this Python, as a Parquet file.")
    documents = _write_inputs(folder, config)
    console().print(f"{plural(documents, 'document')} in {folder / 'docs.parquet'}", markup=False)

    _say("2. Tokens. Bytes, so that the vocabulary is small; your own files default to GPT-2's BPE.")
    _gptfit("prepare", str(folder / "docs.parquet"), "--tokenizer", "bytes", "--out", str(folder / "data"))
    _say(f"3. Plan, before anything runs: here for an {EXAMPLE_GPU}; nothing is downloaded and no card is needed.")
    _gptfit("plan", str(folder / "config.py"), f"--gpu={EXAMPLE_GPU}", "--data", str(folder / "data"))
    _say("4. What an untrained model writes: one step, then a sample.")
    before = folder / "run-before"
    short = ("--max_iters=1", "--lr_decay_iters=1", "--eval_iters=1", f"--out_dir={before}")
    _gptfit("train", str(folder / "config.py"), *short)
    _sample(before)
    _say("5. Train.")
    _gptfit("train", str(folder / "config.py"))
    _say("6. The same prompt, after training.")
    _sample(Path(config.out_dir))
    _next_steps(_report(Path(config.out_dir)))
    return 0


def quickstart_config(folder: Path, steps: int) -> TrainConfig:
    """The modern recipe, small enough for two CPU cores, good enough to write words there in two minutes."""
    return TrainConfig(
        dataset=str(folder / "data"),
        out_dir=str(folder / "run"),
        n_layer=4,
        n_head=3,
        n_embd=192,
        block_size=256,
        vocab_size=257,  # the bytes and end-of-text
        batch_size=16,
        gradient_accumulation_steps=1,
        max_iters=steps,
        **training_keys(steps, 16 * 256),
        eval_interval=max(1, steps // 4),
        eval_iters=8,
        log_interval=max(1, steps // 30),
        compile=False,  # compiling takes longer than it saves in two minutes
    )


def _say(line: str) -> None:
    out = console()
    out.print()
    out.print(line, style="bold", markup=False)


def _write_inputs(folder: Path, config: TrainConfig) -> int:
    from gptfit.data.stdlib_text import write_stdlib_parquet

    try:
        text = render(config, title="gptfit quickstart: a small model on bytes")
        write_text(folder / "config.py", text)
        return write_stdlib_parquet(folder / "docs.parquet")
    except OSError as error:
        raise RunError(
            f"{folder}: cannot be written ({error.strerror})", fix="choose another folder with --out"
        ) from None


def _sample(run: Path) -> None:
    _gptfit("sample", str(run), "--prompt", PROMPT, "--tokens", "200", "--n", "1")


def _gptfit(*words: str) -> None:
    """One step, as its own command, so that what is shown is what a person can type."""
    console().print("$ " + command(["gptfit", *words]), style="cyan", markup=False, soft_wrap=True)
    sys.stdout.flush()
    code, interrupted = _run_to_its_own_end([sys.executable, "-m", "gptfit", *words])
    if interrupted:
        raise KeyboardInterrupt
    if code:
        raise RunError(
            f"quickstart stopped at `gptfit {words[0]}`, whose message is above",
            fix="`gptfit doctor` checks this machine",
        )


def _run_to_its_own_end(words: list[str]) -> tuple[int, bool]:
    """Exit code, and whether Ctrl-C was pressed. The step gets the signal too and saves; it must not be killed for it."""
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: interrupts.append(number))
    try:
        return subprocess.Popen(words).wait(), bool(interrupts)
    finally:
        signal.signal(signal.SIGINT, before)


def _report(run: Path) -> Path:
    """Again, now with the samples; `gptfit train` wrote it before there were any."""
    from gptfit.pages.report import write_report

    page = run / "report.html"
    write_report([run], page)
    return page


def _next_steps(page: Path) -> None:
    _say("7. Your turn.")
    lines = [
        f"The report page of this run: {page}",
        "With your own Parquet file and GPU:",
        "  gptfit prepare my.parquet --out data/mine",
        f'  gptfit propose --gpu "{EXAMPLE_GPU}" --data data/mine --hours 12 --write configs/mine.py',
        "  gptfit train configs/mine.py",
    ]
    console().print("\n".join(lines), markup=False, soft_wrap=True)
