"""The text of a page as HTML: tables, sentences, samples. Everything from a log is escaped here."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from gptfit.compare.comparison import Comparison
from gptfit.compare.figures import four_figures
from gptfit.compare.sentences import Explanation
from gptfit.compare.table import equal_table, fact_rows, value_words, what_if_table

CHARTS = (
    ("speed", "Tokens per second (steps without an eval)"),
    ("mfu", "MFU against the card's own peak"),
    ("memory", "Peak memory"),
    ("lr", "Learning rate"),
    ("norm", "Gradient norm"),
)
SHOWN_STEPS = 3  # whose samples are not folded away
AXIS_BUTTONS = (("step", "steps"), ("tokens", "tokens"), ("hours", "hours"), ("flops", "FLOPs"))


def body(comparison: Comparison, explanation: Explanation, samples: Sequence[tuple[str, list[dict[str, Any]]]]) -> str:
    """Verdict first, then the numbers, the curves, the reasons, and the small print; of one run the curve is first."""
    facts, curves = f'<section id="facts">{_card(_facts(comparison))}</section>', _curves(comparison)
    parts = [
        f'<section id="headline">{_headline(explanation.verdict)}</section>',
        *((_figures(comparison), curves, facts) if len(comparison.runs) == 1 else (facts, curves)),
        _equal(comparison),
        _why(comparison, explanation),
        _what_if(explanation),
        _configs(comparison),
        _samples(samples),
        _small_print(comparison),
    ]
    return "\n".join(part for part in parts if part)


def _headline(verdict: str) -> str:
    """The first sentence is the answer, the rest is in smaller type."""
    first, dot, rest = verdict.partition(". ")
    lead = f'<p class="lead">{escape(rest)}</p>' if rest else ""
    return f"<h1>{escape(first + dot.strip())}</h1>{lead}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], marked: Iterable[int] = ()) -> str:
    """Cells are escaped; rows whose index is in `marked` stand out."""
    strong = set(marked)
    lines = []
    for i, row in enumerate(rows):
        style = ' class="changed"' if i in strong else ""
        lines.append("<tr>" + "".join(f"<td{style}>{escape(cell)}</td>" for cell in row) + "</tr>")
    headings = "".join(f"<th>{cell}</th>" for cell in head)
    wide = ' class="wide"' if len(head) > 3 else ""
    return f'<div class="scroll"><table{wide}><thead><tr>{headings}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def run_headings(comparison: Comparison) -> list[str]:
    """`A name` with the colour its curves have."""
    cells = []
    for i, run in enumerate(comparison.runs):
        letter = f"{comparison.letter(i)} " if len(comparison.runs) > 1 else ""
        cells.append(f'<span class="key key-{i % 6}"></span>{letter}{escape(run.name)}')
    return cells


def _card(inside: str) -> str:
    return f'<div class="card">{inside}</div>'


def _facts(comparison: Comparison) -> str:
    return table(["", *run_headings(comparison)], fact_rows(comparison))


def _figures(comparison: Comparison) -> str:
    shown = "".join(
        f'<div><span class="soft">{escape(figure.name)}</span><strong>{escape(figure.value)}</strong>'
        f'<span class="soft">{escape(figure.words)}</span></div>'
        for figure in four_figures(comparison.runs[0])
    )
    return f'<section id="figures"><div class="numbers four">{shown}</div></section>' if shown else ""


def _curves(comparison: Comparison) -> str:
    buttons = "".join(
        f'<button type="button" data-axis="{axis}" aria-pressed="false">{words}</button>'
        for axis, words in AXIS_BUTTONS
    )
    logs = "".join(
        f'<button type="button" data-log="{axis}" aria-pressed="false" aria-label="Logarithmic {words}">log {axis}</button>'
        for axis, words in (("x", "horizontal axis"), ("y", "loss axis"))
    )
    smoothing = (
        '<label class="smoothing small soft">smoothing <input type="range" id="smoothing" min="0" max="0.99" step="0.01" '
        'value="0"></label>'
    )
    loss = (
        '<p class="chart-title">Loss. Thick: validation. Dotted: train at the same evals. Thin: every training step.</p>'
        '<div id="loss" class="chart tall"></div>'
    )
    gap = (
        '<p class="chart-title">Difference in validation loss; below zero B is better. The grey band is noise.</p>'
        '<div id="gap" class="chart"></div>'
    )
    small = "".join(
        _card(f'<p class="chart-title">{title}</p><div id="{name}" class="chart"></div>') for name, title in CHARTS
    )
    return (
        f'{"<h2>Curves</h2>" if len(comparison.runs) > 1 else ""}<div class="bar"><div class="switch" role="group" aria-label="Axis">{buttons}</div>'
        f'<div class="controls">{smoothing}<div class="switch" role="group" aria-label="Scale">{logs}</div></div></div>'
        f'<div class="stack">{_card(loss)}{_card(gap) if len(comparison.duels) == 1 else ""}</div>'
        f'<div class="pair">{small}</div>'
    )


def _equal(comparison: Comparison) -> str:
    found = equal_table(comparison)
    return f"<h2>Validation at equal …</h2>{_card(table(*found))}" if found.rows else ""


def _why(comparison: Comparison, explanation: Explanation) -> str:
    """The sentences that matter, the rest folded away."""
    title = "Why" if len(comparison.runs) > 1 else "In words"
    first, rest = explanation.first, explanation.sentences[len(explanation.first) :]
    more = f"<details><summary>{len(rest)} more</summary>{_bullets(rest)}</details>" if rest else ""
    return f'<section id="why"><h2>{title}</h2><div class="card">{_bullets(first)}{more}</div></section>'


def _bullets(sentences: Sequence[str]) -> str:
    items = "".join(f"<li>{_with_code(sentence)}</li>" for sentence in sentences)
    return f'<ul class="why">{items}</ul>'


def _with_code(sentence: str) -> str:
    """Text between backquotes is a command."""
    pieces = sentence.split("`")
    return "".join(f"<code>{escape(piece)}</code>" if i % 2 else escape(piece) for i, piece in enumerate(pieces))


def _what_if(explanation: Explanation) -> str:
    found = what_if_table(explanation.what_if)
    return f"<h2>What plan predicts for each combination</h2>{_card(table(*found))}" if found.rows else ""


def _configs(comparison: Comparison) -> str:
    """Changed rows first and marked, then what is the same, folded away."""
    if len(comparison.runs) == 1:
        rows = [[key, value_words(value)] for key, value in comparison.runs[0].config.items()]
        return _folded("Config", table(["key", "value"], rows)) if rows else ""
    found = comparison.differences
    changed = [
        [change.key, *(value_words(value) for value in change.values), change.affects] for change in found.changed
    ]
    same = [[key, value_words(value)] for key, value in found.same.items()]
    parts = []
    if changed:
        head = ["changed", *(comparison.letter(i) for i in range(len(comparison.runs))), "can affect"]
        parts.append(f"<h2>Config</h2>{_card(table(head, changed, range(len(changed))))}")
    if same:
        parts.append(_folded(f"{len(same)} keys are the same", table(["key", "value"], same)))
    return "".join(parts)


def _folded(title: str, inside: str) -> str:
    return f'<details class="card"><summary>{escape(title)}</summary>{inside}</details>'


def _samples(samples: Sequence[tuple[str, list[dict[str, Any]]]]) -> str:
    """Newest first; of one step, all prompts under one heading. All but the last few steps are folded away."""
    blocks = []
    for name, found in samples:
        steps = []
        for step, of_step in itertools.groupby(reversed(found), key=lambda sample: sample["step"]):
            where = f"{escape(name)}, step {step}" if name else f"step {step}"
            texts = "".join(_sample(sample) for sample in reversed(list(of_step)))
            steps.append(f'<p class="sample-step">{where}</p>{texts}')
        blocks += steps[:SHOWN_STEPS]
        if earlier := steps[SHOWN_STEPS:]:
            blocks.append(f"<details><summary>{len(earlier)} earlier</summary>{''.join(earlier)}</details>")
    hidden = "" if blocks else " hidden"
    return f'<section id="samples-section"{hidden}><h2>Samples</h2><div class="card" id="samples">{"".join(blocks)}</div></section>'


def _sample(sample: dict[str, Any]) -> str:
    prompt = f"<strong>{escape(sample['prompt'])}</strong>" if sample.get("prompt") else ""
    return f'<pre class="sample">{prompt}{escape(sample["text"])}</pre>'


def _small_print(comparison: Comparison) -> str:
    lines = []
    for i, run in enumerate(comparison.runs):
        letter = f"{comparison.letter(i)}: " if len(comparison.runs) > 1 else ""
        lines += [letter + note for note in run.notes]
        if run.kind == "nanogpt":
            lines.append(
                letter
                + "nanoGPT prints the loss of a step's last micro-batch only: the thin curve is noisier than the run"
            )
        versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
        if versions:
            lines.append(letter + versions)
    lines.append(
        "Time is training only: evals and compiling are left out. Perplexity is exp(loss). Parameters are counted as nanoGPT "
        "does, without position embeddings. MFU is the model's FLOPs (6N + 12LCT per token) over the card's dense peak."
    )
    items = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return f'<h2>Notes</h2><div class="soft small">{items}</div>'
