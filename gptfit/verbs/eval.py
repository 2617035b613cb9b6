"""`gptfit eval`: the exact loss over a split, HellaSwag, and lm-evaluation-harness tasks, beside known results."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from gptfit.errors import DataError, UsageError
from gptfit.files import cannot_write
from gptfit.shell import command
from gptfit.verbs.common import print_json
from gptfit.verbs.model_view import describe, note, opened_model
from gptfit.verbs.progress_line import ProgressLine

if TYPE_CHECKING:
    from gptfit.checkpoint.loaded_model import LoadedModel
    from gptfit.generate.exact_loss import SplitLoss

HELP = "The exact loss over a split, HellaSwag, and lm-evaluation-harness tasks, beside known results."
EXAMPLES = ("gptfit eval out", "gptfit eval gpt2 --data data/fineweb")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN|ckpt.pt", help="run folder, checkpoint, GPT-2 folder, or gpt2")
    parser.add_argument("--data", metavar="DIR", help="data folder; default: the one the model was trained on")
    parser.add_argument("--split", choices=("val", "train"), default="val", help="which tokens (default val)")
    parser.add_argument(
        "--stride", type=int, help="sliding windows this many tokens apart (default block_size: no overlap)"
    )
    parser.add_argument("--hellaswag", metavar="FILE", help="HellaSwag's jsonl, scored in completion style")
    parser.add_argument("--tasks", help="lm-evaluation-harness tasks, with commas: hellaswag,arc_easy")
    parser.add_argument("--tasks-folder", metavar="DIR", help="task files of your own, with local data")
    parser.add_argument("--limit", type=int, help="questions per task at most, for a quick look")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1 or mps")
    parser.add_argument("--json", action="store_true", help="print JSON with stable names")


def run(args: argparse.Namespace) -> int:
    if args.limit is not None and args.limit < 1:
        raise UsageError(f"--limit {args.limit} must be 1 or more")
    if args.tasks_folder and not args.tasks:
        raise UsageError("--tasks-folder needs --tasks")
    from gptfit.generate.eval_file import save_results

    opened = opened_model(args.model, args.data, args.device)
    for line in (describe(opened), *opened.notes):
        note(line)
    results: dict[str, Any] = {}
    for part in (_loss, _hellaswag, _tasks):
        found, said = part(opened, args)
        results |= found
        if not args.json:
            print(*said, sep="\n", end="\n" if said else "", flush=True)
    try:
        told = f"written to {save_results(opened, results)}"
    except OSError as error:  # the answer is on the screen all the same, also for a model in a folder one may not write
        told = f"not kept: {cannot_write(error)}"
    if args.json:
        print_json(results)
    if not args.json or told.startswith("not kept"):
        note(told)
    if sys.stderr.isatty():
        note("next: " + command(["gptfit", "export", args.model, "--to", "hf"]))
    return 0


def _loss(opened: LoadedModel, args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from gptfit.generate.exact_loss import split_loss

    if opened.data is None:
        if args.hellaswag or args.tasks:
            return {}, []
        raise DataError(f"{opened.path}: its data folder is not here", fix="say where it is with --data DIR")
    with ProgressLine(f"{args.split} tokens") as progress:
        found = split_loss(opened, opened.data, args.split, args.stride, progress)
    bits = found.bits_per_byte
    windows = "side by side" if found.stride == found.block_size else f"{found.stride:,} apart"
    lines = [
        f"{found.split} loss {found.loss:.4f}   perplexity {found.perplexity:,.2f}"
        + (f"   bits per byte {bits:.4f}" if bits else ""),
        f"  {_which_tokens(opened, found)} of {opened.data.folder}, windows of {found.block_size:,} {windows}",
        *_known_losses(opened),
    ]
    values = {"loss": found.loss, "perplexity": found.perplexity, "bits_per_byte": bits, "tokens": found.tokens}
    return {f"{found.split}_loss": {**values, "stride": found.stride}}, lines


def _which_tokens(opened: LoadedModel, found: SplitLoss) -> str:
    is_chat = opened.data is not None and opened.data.chat
    return f"the assistant's {found.tokens:,} tokens" if is_chat else f"all {found.tokens:,} tokens"


def _known_losses(opened: LoadedModel) -> list[str]:
    """Results on the same data; for other data in GPT-2's tokens one figure for scale."""
    from gptfit.generate.references import references

    assert opened.data is not None
    if opened.tokenizer.name not in ("gpt2", "chars") or opened.data.chat:
        return []  # a loss is per token, and all known ones are of these tokens
    rows = references(opened.data.folder.resolve().name, "loss")
    if rows:
        return [f"  known: {row.value:g} {row.model} ({row.source})" for row in rows]
    if opened.tokenizer.name != "gpt2":
        return []
    row = references("openwebtext", "loss")[0]
    return [f"  for scale, on other data: {row.value:g} on OpenWebText, {row.model} ({row.source})"]


def _hellaswag(opened: LoadedModel, args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    if not args.hellaswag:
        return {}, []
    from gptfit.generate.hellaswag import hellaswag, read_items

    items = read_items(args.hellaswag)[: args.limit]
    with ProgressLine("questions") as progress:
        found = hellaswag(opened, items, progress)
    lines = [
        f"HellaSwag acc {found.accuracy:.4f}   acc_norm {found.normalised:.4f} ± {found.standard_error:.4f}",
        f"  {found.items:,} questions of {args.hellaswag}, completion style",
        *_known("hellaswag", ("acc", "acc_norm")),
    ]
    values = {"acc": found.accuracy, "acc_norm": found.normalised, "questions": found.items}
    return {"hellaswag": {**values, "acc_norm_stderr": found.standard_error}}, lines


def _tasks(opened: LoadedModel, args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    if not args.tasks:
        return {}, []
    from gptfit.generate.harness import run_tasks

    tasks = [task.strip() for task in args.tasks.split(",") if task.strip()]
    results: dict[str, Any] = {}
    lines: list[str] = []
    for score in run_tasks(opened, tasks, args.tasks_folder, args.limit):
        results.setdefault(f"lm_eval/{score.task}", {})[score.metric] = score.value
        error = f" ± {score.standard_error:.4f}" if score.standard_error is not None else ""
        lines += [f"{score.task} {score.metric} {score.value:.4f}{error}", *_known(score.task, (score.metric,))]
    return results, lines


def _known(task: str, metrics: tuple[str, ...]) -> list[str]:
    from gptfit.generate.references import references

    rows = [row for metric in metrics for row in references(task, metric)]
    return [f"  known: {row.metric} {row.value:g} {row.model} ({row.source})" for row in rows]
