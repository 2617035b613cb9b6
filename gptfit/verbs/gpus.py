"""`gptfit gpus`: the table of known GPUs, each figure with its source."""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import asdict

from gptfit.gpus import GPU, all_gpus, find
from gptfit.verbs.common import console, print_json

HELP = "The table of known GPUs: memory, bandwidth, dense bf16 rate, and where each figure comes from."
EXAMPLES = ("gptfit gpus 4070",)
WIDE = 72  # columns; a narrower screen has no room for what was measured, which a card by its name shows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="*", help="show one card with its sources, e.g. 4070 or 'RTX 4070 Ti SUPER'")
    parser.add_argument("--json", action="store_true", help="the table as JSON")


def run(args: argparse.Namespace) -> int:
    gpus = [find(" ".join(args.name))] if args.name else list(all_gpus())
    if args.json:
        print_json([asdict(gpu) for gpu in gpus])
    elif args.name:
        _print_card(gpus[0])
    else:
        _print_table(gpus)
    return 0


def _print_table(gpus: list[GPU]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("GPU", no_wrap=True)
    out = console()
    is_wide = out.width >= WIDE
    for heading in ("GiB", "GB/s", "TFLOPS", *(["measured"] if is_wide else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("sure", no_wrap=True)
    for gpu in gpus:
        rate = "unknown" if gpu.bf16_tflops is None else f"{gpu.bf16_tflops:g}"
        measured = [_measured(gpu)] if is_wide else []
        table.add_row(gpu.name, f"{gpu.vram_gib:g}", f"{gpu.bandwidth_gbs:g}", rate, *measured, gpu.confidence)
    out.print(table)
    out.print(
        "\nTFLOPS: dense bf16, fp32 accumulation (fp16 where a card has no bf16), from data sheets (spec). "
        "measured: published matmul rates. sure: confidence in the figure. `gptfit gpus NAME` shows the sources."
    )


def _print_card(gpu: GPU) -> None:
    out = console()
    out.print(
        f"[bold]{gpu.name}[/bold]  compute capability {gpu.compute_capability}, bf16 {'yes' if gpu.has_bf16 else 'no'}"
    )
    rate = "no reliable figure" if gpu.bf16_tflops is None else f"{gpu.bf16_tflops:g} TFLOPS dense, fp32 accumulation"
    out.print(f"  memory     {gpu.vram_gib:g} GiB at {gpu.bandwidth_gbs:g} GB/s")
    out.print(f"  bf16/fp16  {rate} (spec, confidence {gpu.confidence})", markup=False)
    out.print(_hanging("source", gpu.source), markup=False)
    if gpu.measured_low_tflops is not None:
        words = f"{_measured(gpu)} TFLOPS matmul (published: {gpu.measured_source})"
        out.print(_hanging("measured", words), markup=False)
    if gpu.is_laptop:
        out.print("  note       a laptop card's speed depends on its power limit, by up to a factor of two")


def _hanging(label: str, words: str) -> str:
    """As many lines as the terminal needs, below each other."""
    return textwrap.fill(words, console().width, initial_indent=f"  {label:<11}", subsequent_indent=" " * 13)


def _measured(gpu: GPU) -> str:
    if gpu.measured_low_tflops is None or gpu.measured_high_tflops is None:
        return ""
    low, high = gpu.measured_low_tflops, gpu.measured_high_tflops
    rate = f"{low:g}" if low == high else f"{low:g}-{high:g}"
    return rate if gpu.measured_dtype == "bf16" else f"{gpu.measured_dtype} {rate}"
