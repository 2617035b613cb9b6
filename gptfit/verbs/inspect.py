"""`gptfit inspect`: describe a source file or a prepared folder."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from gptfit.shell import command
from gptfit.units import count, gib, percent, plural, si
from gptfit.verbs.common import console, dataset_json, print_json, wrapped
from gptfit.verbs.next_commands import after_prepare, to_propose

if TYPE_CHECKING:
    from gptfit.data.describe import FolderDescription, SourceDescription

HELP = "Describe a Parquet (or .jsonl, .csv, .txt) file, or a prepared data folder: counts, schema, first documents."
EXAMPLES = ("gptfit inspect fineweb.parquet", "gptfit inspect data/fineweb")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="FILE|FOLDER", help="a source file, a link, or a folder with train.bin")
    parser.add_argument("--text-column", default="text", help="the column or key that holds the text (default: text)")
    parser.add_argument("--json", action="store_true", help="print JSON with stable names")


def run(args: argparse.Namespace) -> int:
    from gptfit.data.describe import describe_folder, describe_source

    if os.path.isdir(args.path):
        folder = describe_folder(args.path)
        as_json, lines = folder_json(folder), [*folder_lines(folder), *after_prepare(folder.info)]
    else:
        source = describe_source(args.path, args.text_column)
        as_json, lines = source_json(source), source_lines(source, args.text_column)
        lines += _next_lines(source, args)
    if args.json:
        print_json(as_json)
        return 0
    console().print("\n".join(wrapped(line, 4) for line in lines), markup=False, soft_wrap=True)
    return 0


def _next_lines(found: SourceDescription, args: argparse.Namespace) -> list[str]:
    """Which model for this file, or its tokens first where nothing else can count them; nothing where no text was found."""
    if not found.samples:
        return []
    column = [] if args.text_column == "text" else ["--text-column", args.text_column]
    if found.facts is None:
        return ["next: " + command(["gptfit", "prepare", args.path, *column])]
    return to_propose(args.path, args.text_column)


def source_lines(found: SourceDescription, column: str) -> list[str]:
    lines = [f"{found.source.name}: {found.source.kind}, {gib(found.source.size)}"]
    if found.columns:
        packing = f", {found.compression.lower()}" if found.compression else ""
        lines.append(f"  {plural(found.row_groups or 0, 'row group')}{packing}, written by {found.created_by}")
        width = max(len(name) for name, _ in found.columns)
        lines += [f"  {name:<{width}}  {kind}" for name, kind in found.columns]
        if column not in dict(found.columns):
            lines.append(f"no column {column!r}: name the one that holds the text with --text-column")
    if found.facts:
        facts, tokens = found.facts, found.facts.tokens
        spread = "exact" if tokens.basis == "exact" else f"{si(tokens.low)} to {si(tokens.high)}, from a sample"
        lines.append(f"  {plural(facts.rows, 'row')}, {gib(facts.text_bytes)} of text in {column!r}")
        lines.append(f"  {count(round(tokens.value))} GPT-2 tokens ({spread}), {facts.bytes_per_token:.2f} bytes each")
    for i, text in enumerate(found.samples, 1):
        lines += [f"document {i}:", *("  " + line for line in text.splitlines())]
    return lines


def folder_lines(found: FolderDescription) -> list[str]:
    info, manifest = found.info, found.manifest
    made = "" if manifest else " (no manifest: read as nanoGPT does)"
    vocabulary = "unknown" if info.vocab_size is None else count(info.vocab_size)
    lines = [f"{info.folder}: {info.tokenizer or 'gpt2'} tokens, vocabulary {vocabulary}, {info.dtype}{made}"]
    for start in found.starts:
        documents = "" if start.split.documents is None else f" in {plural(start.split.documents, 'document')}"
        lines.append(
            f"  {start.name:<5} {count(start.split.tokens):>15} tokens{documents}, {plural(len(start.split.files), 'file')}"
        )
    if info.bytes_per_token:
        lines.append(f"  {info.bytes_per_token:.2f} bytes of text per token")
    if manifest:
        rule = manifest["split_rule"]
        lines.append(f"  split: {rule['kind']}, {percent(rule['fraction'], 2)}, seed {rule['seed']}")
        for title in ("skipped", "replaced"):
            if manifest.get(title):
                lines.append(f"  {title}: " + ", ".join(f"{count(n)} {why}" for why, n in manifest[title].items()))
        for source in manifest["sources"]:
            rows = "" if source.get("rows") is None else f", {plural(source['rows'], 'row')}"
            lines.append(f"  from {source['path']}, {gib(source['size'])}{rows}")
    for start in found.starts:
        lines += [
            f"first {len(start.tokens)} tokens of {start.name}:",
            *("  " + line for line in start.text.splitlines()),
        ]
    return lines


def source_json(found: SourceDescription) -> dict[str, Any]:
    facts = found.facts
    return {
        "path": found.source.name,
        "kind": found.source.kind,
        "bytes": found.source.size,
        "columns": dict(found.columns),
        "row_groups": found.row_groups,
        "rows": facts.rows if facts else None,
        "text_bytes": facts.text_bytes if facts else None,
        "tokens": facts.tokens.as_json() if facts else None,
        "bytes_per_token": facts.bytes_per_token if facts else None,
        "samples": found.samples,
    }


def folder_json(found: FolderDescription) -> dict[str, Any]:
    starts = {start.name: {"tokens": start.tokens, "text": start.text} for start in found.starts}
    return {**dataset_json(found.info), "starts": starts, "manifest": found.manifest}
