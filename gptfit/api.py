"""What `import gptfit` offers: the verbs as functions that return what they found and print nothing.

A config is the path of a config file, several paths, a TrainConfig, or nothing for nanoGPT's defaults; keys are keyword
arguments, checked like those of the command line. What is wrong is a GptfitError whose text says what to do.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gptfit.config.keys import DEFAULTS, TrainConfig
from gptfit.errors import ConfigError, DataError, RunError, UsageError

if TYPE_CHECKING:
    from gptfit.checkpoint.loaded_model import LoadedModel
    from gptfit.compare.comparison import Comparison
    from gptfit.compare.sentences import Explanation
    from gptfit.data.options import PrepareReport
    from gptfit.dataset import DatasetInfo
    from gptfit.export.result import Exported
    from gptfit.generate.exact_loss import SplitLoss
    from gptfit.logs.events import Event
    from gptfit.logs.runlog import RunLog
    from gptfit.plan.propose import Proposals
    from gptfit.plan.result import Plan
    from gptfit.train.train import TrainResult
    from gptfit.tune.session import TuneResult

Config = TrainConfig | str | Path | Sequence[str | Path] | None


def prepare(
    sources: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    *,
    text_column: str = "text",
    tokenizer: str = "gpt2",
    limit: str | None = None,
    val_fraction: float | None = None,
    shuffle: bool = False,
    report: PrepareReport | None = None,
    **options: Any,
) -> DatasetInfo:
    """Documents (Parquet, JSON lines, CSV, text) into the data folder `out`: train.bin, val.bin, manifest.json.

    `limit` is '20k' documents or '50Mtokens'. `report` is told the forecast and the progress. Other options are those of
    `gptfit.data.options.PrepareOptions`. A folder that was made the same way is left as it is.
    """
    from gptfit.data.options import PrepareOptions
    from gptfit.data.prepare import prepare as run
    from gptfit.dataset import default_name
    from gptfit.verbs.prepare import parse_limit

    names = [os.fspath(source) for source in _listed(sources)]
    if not names:
        raise UsageError("name a source: a file, a folder or a link")
    documents, tokens = parse_limit(limit)
    chosen = PrepareOptions(
        sources=tuple(names),
        out=Path(out) if out is not None else Path("data") / default_name(names[0]),
        text_column=text_column,
        tokenizer=tokenizer,
        val_fraction=val_fraction,
        shuffle=shuffle,
        limit_documents=documents,
        limit_tokens=tokens,
        **options,
    )
    return run(chosen, report)


def plan(
    config: Config = None,
    *,
    gpu: str | None = None,
    gpus: int = 1,
    nodes: int = 1,
    data: str | Path | None = None,
    recipe: str = "gpt2",
    vram: float | None = None,
    watts: float | None = None,
    **keys: Any,
) -> Plan:
    """What a config will do on a GPU before it runs: memory, speed, time, loss, and what is wrong with it.

    `gpu` is a name from `gptfit gpus`, or None for this machine's. Figures are estimates with a range and a basis; one
    that is not known is None. `plan(...).runs` says whether it starts and fits.
    """
    from gptfit.verbs import plan as verb
    from gptfit.verbs.make_plan import make_plan

    options: dict[str, Any] = {"gpu": gpu, "gpus": gpus, "nodes": nodes, "data": _text(data)}
    return make_plan(_arguments(verb, config, keys, **options, recipe=recipe, vram=vram, watts=watts))[0]


def propose(
    data: str | Path,
    hours: float,
    *,
    gpu: str | None = None,
    gpus: int = 1,
    block_size: int | None = None,
    only: str | None = None,
    vram: float | None = None,
    write: str | Path | None = None,
) -> Proposals:
    """The config with the lowest expected loss for this data, GPU and time, with alternatives.

    `only` is 'nanogpt' (what stock nanoGPT trains), 'gpt2', 'modern' or 'weights' (GPT-2's own, tuned); the lowest loss of all otherwise. `write` names a config file to make of the choice.
    """
    from gptfit.verbs import propose as verb

    options: dict[str, Any] = {
        "gpu": gpu,
        "gpus": gpus,
        "block_size": block_size,
        "only": only,
        "vram": vram,
    }
    return verb.make_proposals(_arguments(verb, data=_text(data), hours=hours, write=_text(write), **options))[0]


def tune(
    config: Config = None,
    *,
    minutes: float = 10.0,
    also: Sequence[str] = (),
    sizes: Sequence[int] = (),
    headroom: float = 0.08,
    memory_gib: float | None = None,
    recipe: str = "gpt2",
    **keys: Any,
) -> TuneResult:
    """The micro-batch with the most tokens per second on this machine, measured at the same tokens per step.

    `also` names keys to vary besides; `sizes` are micro-batches to measure in any case; `headroom` is the share of memory
    that stays free. The result's `best` is the fastest of its `scores`; `plan` and `batch_size='auto'` use them later.
    """
    from gptfit.checkpoint.pretrained import adopt_model
    from gptfit.config.start_model import is_pretrained
    from gptfit.tune.session import TuneOptions, run_session
    from gptfit.verbs import tune as verb
    from gptfit.verbs.common import load as load_config
    from gptfit.verbs.gpu_and_data import find_data, vocab_size

    options = TuneOptions(minutes, tuple(also), tuple(sizes), headroom, memory_gib)
    chosen = load_config(_arguments(verb, config, keys, recipe=recipe)).config
    chosen = adopt_model(chosen) if is_pretrained(chosen) else chosen
    result = run_session(chosen, chosen.shape(vocab_size(find_data(None, chosen))), options)
    if result.best is None:
        raise RunError(result.why_nothing())
    return result


def train(
    config: Config = None,
    *,
    recipe: str = "gpt2",
    report: Callable[[Event], None] | None = None,
    **keys: Any,
) -> TrainResult:
    """Train a GPT; `init_from='resume'` goes on with the run in `out_dir`.

    `report` is called with each event that goes into run.jsonl: the Header, Step, Eval, Message and End of
    gptfit.logs.events. Ctrl-C saves and returns, with the reason in the result.
    """
    from gptfit.train.sinks import ignore
    from gptfit.train.train import train as run
    from gptfit.verbs import train as verb

    chosen, _ = verb.find_config(_arguments(verb, config, keys, recipe=recipe))
    result = run(chosen, report or ignore)
    if result.is_master:
        verb.after_training(result.out_dir)
    return result


@dataclass(frozen=True)
class ComparedRuns:
    """Runs side by side: the figures in `comparison`, what they mean in `explanation`."""

    logs: tuple[RunLog, ...]
    comparison: Comparison
    explanation: Explanation

    def as_json(self) -> dict[str, Any]:
        """What `gptfit compare --json` prints."""
        from gptfit.compare.comparison_json import comparison_json

        return comparison_json(self.comparison, self.explanation)

    def write_page(self, path: str | Path) -> Path:
        """One self-contained HTML file that needs no network."""
        from gptfit.pages.report import write_page

        write_page(self.logs, self.comparison, self.explanation, Path(path))
        return Path(path)


def compare(
    *runs: str | Path, gpu: str | None = None, configs: Sequence[str | Path] = (), html: str | Path | None = None
) -> ComparedRuns:
    """Two or more runs: what changed, which is better at equal tokens and time, and why.

    A run is a folder, a run.jsonl, or the stdout of nanoGPT or nanochat; `configs` are for logs that do not echo theirs,
    and `gpu` is the card where the log does not say. `html` also writes the page.
    """
    from gptfit.compare.comparison import compare_runs
    from gptfit.compare.sentences import explain
    from gptfit.verbs.compare import open_runs

    logs = open_runs([os.fspath(run) for run in runs], [os.fspath(path) for path in configs])
    comparison = compare_runs(logs, gpu)
    found = ComparedRuns(tuple(logs), comparison, explain(comparison))
    if html is not None:
        found.write_page(html)
    return found


def load(model: str | Path, *, data: str | Path | None = None, device: str = "auto") -> LoadedModel:
    """A trained model with its tokenizer: a run folder, a ckpt.pt, a Hugging Face GPT-2 folder, or 'gpt2'.

    `data` names the data folder where the checkpoint does not find it.
    """
    from gptfit.checkpoint.loaded_model import open_model

    return open_model(os.fspath(model), _text(data), device)


def sample(
    model: LoadedModel | str | Path,
    prompt: str | None = None,
    *,
    n: int = 1,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = 200,
    top_p: float | None = None,
    seed: int = 1337,
    stop: Sequence[str] = (),
) -> list[str]:
    """`n` texts that go on after the prompt, which is not repeated; without one each is a new document."""
    from gptfit.generate.pick import Picking
    from gptfit.generate.sample import check_prompt, encode_prompt
    from gptfit.generate.sample import sample as pieces

    opened = _loaded(model)
    ids = encode_prompt(opened.tokenizer, prompt)
    check_prompt(opened, ids, tokens)
    texts = [""] * n
    for piece in pieces(opened, ids, n, tokens, Picking(temperature, top_k, top_p, seed), stop):
        texts[piece.row] += piece.text
    return texts


def evaluate(
    model: LoadedModel | str | Path, *, data: str | Path | None = None, split: str = "val", stride: int | None = None
) -> SplitLoss:
    """The exact loss over every token of a split, with perplexity and bits per byte.

    `data` is another data folder than the one the model was trained on; `stride` makes windows overlap.
    """
    from gptfit.dataset import read_dataset
    from gptfit.generate.exact_loss import split_loss

    opened = _loaded(model, data)
    info = read_dataset(data) if data is not None else opened.data
    if info is None:
        raise DataError(f"{opened.path}: its data folder is not here", fix="say where it is with data=FOLDER")
    return split_loss(opened, info, split, stride)


def export(
    model: LoadedModel | str | Path, to: str, out: str | Path | None = None, *, dtype: str = "float32"
) -> Exported:
    """The model for other programs: `to` is 'hf', 'gguf' or 'nanogpt'. What is written was read back and compared.

    `dtype` is 'float32', or 'float16' for the matrices of a GGUF file of half the size.
    """
    from gptfit.export.export import DTYPES, FORMATS
    from gptfit.export.export import export as write

    if to not in FORMATS:
        raise UsageError(f"{to!r} is not a format", fix=f"choose one of {', '.join(FORMATS)}")
    if dtype not in DTYPES or (dtype != "float32" and to != "gguf"):
        raise UsageError(f"dtype {dtype!r} is not for {to!r}", fix="use float32, or float16 for gguf")
    return write(_loaded(model), to, _text(out), dtype)


def _loaded(model: LoadedModel | str | Path, data: str | Path | None = None) -> LoadedModel:
    return load(model, data=data) if isinstance(model, str | Path) else model


class _Verb(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...


def _arguments(
    verb: _Verb, config: Config = None, keys: dict[str, Any] | None = None, **options: Any
) -> argparse.Namespace:
    """The command line that says the same: the verb's defaults, these options, the config's files and keys."""
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    args = parser.parse_args([])
    unknown = set(options) - set(vars(args))
    assert not unknown, f"{unknown}: no options of this verb"
    vars(args).update(options)
    if hasattr(args, "configs"):
        values = keys or {}
        if isinstance(config, TrainConfig):
            changed = {key: value for key, value in config.as_dict().items() if value != DEFAULTS[key]}
            config, values = None, changed | values
        args.configs = [os.fspath(path) for path in _listed(config)]
        args.overrides = [_override(key, value) for key, value in values.items()]
    return args


def _override(key: str, value: object) -> str:
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if value is not None and not isinstance(value, bool | int | float | str):
        raise ConfigError(f"{key} takes a number, text, True or False, not {type(value).__name__}", key=key)
    return f"--{key}={value!r}"


def _listed(paths: str | Path | Sequence[str | Path] | None) -> list[str | Path]:
    if paths is None:
        return []
    return [paths] if isinstance(paths, str | Path) else list(paths)


def _text(path: str | Path | None) -> str | None:
    return None if path is None else os.fspath(path)
