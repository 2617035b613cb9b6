"""The model card of an export: what it is, its data, its recipe, its loss curve and how good it was found to be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gptfit import __version__
from gptfit.checkpoint.loaded_model import LoadedModel
from gptfit.config.keys import DEFAULTS, KEYS
from gptfit.errors import RunError
from gptfit.generate.eval_file import read_results
from gptfit.logs.events import DataSaid, Eval
from gptfit.logs.runlog import RUN_LOG, RunLog, read_run
from gptfit.units import count, duration, si

CURVE = "loss.svg"
WIDTH, HEIGHT, MARGIN = 640, 320, 48  # pixels
TABLE_ROWS = 12


def write_model_card(opened: LoadedModel, folder: Path, checks: tuple[str, ...]) -> None:
    """README.md, and loss.svg when the run's log is beside the checkpoint."""
    log = _read_log(opened)
    curve = loss_curve(log.evals) if log else None
    if curve:
        (folder / CURVE).write_text(curve, encoding="utf-8")
    parts = [
        _front(opened),
        _data(opened, log),
        _recipe(opened, log),
        _curve(log, curve),
        _evaluation(opened),
        _use(opened),
    ]
    parts.append("## Checked on export\n\n" + "\n".join(f"- {check}" for check in checks))
    (folder / "README.md").write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def _read_log(opened: LoadedModel) -> RunLog | None:
    folder = opened.path if opened.path.is_dir() else opened.path.parent
    if not (folder / RUN_LOG).is_file():
        return None
    try:
        return read_run(folder)
    except RunError:
        return None  # a card without a curve is better than no export


def _name(opened: LoadedModel) -> str:
    return (opened.path if opened.path.is_dir() else opened.path.parent).resolve().name


def _front(opened: LoadedModel) -> str:
    shape = opened.shape
    extra = "" if shape.arch == "gpt2" else "\ntags:\n- gptfit\n- custom_code"
    head = f"---\nlibrary_name: transformers\npipeline_tag: text-generation{extra}\n---\n\n# {_name(opened)}\n\n"
    return head + (
        f"A base language model with {si(shape.parameters)} parameters ({shape.arch}: {shape.n_layer} layers, "
        f"{shape.n_head} heads, {shape.n_embd} channels, {count(shape.block_size)} tokens of context, "
        f"vocabulary {count(shape.vocab_size)}), trained with gptfit {__version__}. It continues text; it was not "
        "trained to follow instructions."
    )


def _data(opened: LoadedModel, log: RunLog | None) -> str:
    logged = log.header.dataset if log else DataSaid()
    rows = [f"- data set: `{_data_name(opened.checkpoint.config)}`"]
    train = opened.data.train.tokens if opened.data and opened.data.train else logged.train_tokens
    val = opened.data.val.tokens if opened.data and opened.data.val else logged.val_tokens
    if train:
        rows.append(f"- {count(train)} training tokens" + (f", {count(val)} validation tokens" if val else ""))
    rows.append(f"- tokenizer: {opened.tokenizer.name}, {count(opened.tokenizer.vocab_size)} tokens")
    return "## Data\n\n" + "\n".join(rows)


def _data_name(config: Mapping[str, Any]) -> str:
    return str(_public_value("dataset", config.get("dataset", "unknown")))


def _is_public(key: str) -> bool:
    """A card is for other people: not where things are on this machine, and not where its owner is told about it."""
    return key not in ("out_dir", "data_root") and KEYS[key].group != "tracking"


def _public_value(key: str, value: Any) -> Any:
    """Without the folders it was in."""
    return Path(str(value)).name if key in ("dataset", "init_from") else value


def _recipe(opened: LoadedModel, log: RunLog | None) -> str:
    """Every key that differs from the defaults, as a config file would say it."""
    config = opened.checkpoint.config
    if not config:
        return ""
    keys = [key for key in DEFAULTS if key in config and config[key] != DEFAULTS[key] and _is_public(key)]
    lines = [f"{key} = {_public_value(key, config[key])!r}" for key in keys]
    said = f"{count(opened.checkpoint.iter_num)} steps"
    if log and log.steps:
        header, seconds = log.header, log.steps[-1].seconds
        said += f" of {count(header.tokens_per_step)} tokens" if header.tokens_per_step else ""
        said += f", {duration(seconds)}" if seconds is not None else ""
        said += f" on {header.device.name}" if header.device.name else ""
    return f"## Recipe\n\n{said}. Keys that differ from the defaults:\n\n```python\n" + "\n".join(lines) + "\n```"


def _curve(log: RunLog | None, curve: str | None) -> str:
    if log is None or curve is None:
        return ""
    points = _points(log.evals)
    shown = points[:: max(1, math.ceil(len(points) / TABLE_ROWS))]
    shown = shown if shown[-1] == points[-1] else [*shown, points[-1]]
    rows = "\n".join(f"| {count(step)} | {train:.4f} | {val:.4f} |" for step, train, val in shown)
    return f"## Curves\n\n![loss]({CURVE})\n\n| step | train loss | val loss |\n|---:|---:|---:|\n{rows}"


def _evaluation(opened: LoadedModel) -> str:
    """What `gptfit eval` kept, and what training itself measured."""
    rows = []
    if math.isfinite(opened.checkpoint.best_val_loss) and opened.checkpoint.best_val_loss < 1e9:
        rows.append(f"| best val loss while training | {opened.checkpoint.best_val_loss:.4f} |")
    for task, values in _results(opened).items():
        rows += [f"| {task} {key} | {value:.4f} |" for key, value in values.items() if isinstance(value, float)]
    if not rows:
        return ""
    return "## Evaluation\n\n| what | value |\n|---|---:|\n" + "\n".join(rows)


def _results(opened: LoadedModel) -> dict[str, Any]:
    try:
        return read_results(opened) or {}
    except OSError:
        return {}  # a card without them is better than no export


def _use(opened: LoadedModel) -> str:
    trust = "" if opened.shape.arch == "gpt2" else ", trust_remote_code=True"
    return (
        "## Use\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("PATH"{trust})\n'
        f'model = AutoModelForCausalLM.from_pretrained("PATH"{trust})\n'
        'text = tokenizer("Once upon a time", return_tensors="pt")\n'
        "print(tokenizer.decode(model.generate(text.input_ids, max_new_tokens=50)[0]))\n```"
    )


def _points(evals: Sequence[Eval]) -> list[tuple[int, float, float]]:
    rows = [(event.step, event.train_loss, event.val_loss) for event in evals]
    return [(step, train, val) for step, train, val in rows if train is not None and val is not None]


def loss_curve(evals: Sequence[Eval]) -> str | None:
    """Train and val loss against the step as an SVG picture; None with fewer than two evaluations."""
    points = _points(evals)
    if len(points) < 2:
        return None
    steps = [step for step, _, _ in points]
    losses = [loss for _, *both in points for loss in both]
    low, high = min(losses), max(max(losses), min(losses) + 1e-6)

    def place(step: int, loss: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * (step - steps[0]) / max(1, steps[-1] - steps[0])
        y = MARGIN + (HEIGHT - 2 * MARGIN) * (high - loss) / (high - low)
        return f"{x:.1f},{y:.1f}"

    lines = []
    for column, (name, colour) in enumerate((("train", "#7a7a7a"), ("val", "#c0392b")), start=1):
        path = " ".join(place(row[0], row[column]) for row in points)
        lines.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        lines.append(f'<text x="{WIDTH - MARGIN}" y="{16 * column}" text-anchor="end" fill="{colour}">{name}</text>')
    frame = (
        f'<text x="{MARGIN}" y="{HEIGHT - 16}">step {count(steps[0])}</text>'
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 16}" text-anchor="end">{count(steps[-1])}</text>'
        f'<text x="4" y="{MARGIN}">{high:.2f}</text><text x="4" y="{HEIGHT - MARGIN}">{low:.2f}</text>'
    )
    style = 'font-family="sans-serif" font-size="13"'
    body = "\n".join([frame, *lines])
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {style}>\n{body}\n</svg>\n'
