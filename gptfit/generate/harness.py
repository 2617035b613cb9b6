"""lm-evaluation-harness on a gptfit model: its tasks, our cached scoring."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptfit.checkpoint.loaded_model import LoadedModel
from gptfit.errors import DeviceError, RunError
from gptfit.generate.pick import Picking
from gptfit.generate.sample import sample
from gptfit.generate.score import score_continuations

if TYPE_CHECKING:
    from lm_eval.api.model import TemplateLM


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task: 'acc', 'acc_norm', 'word_perplexity', ..."""

    task: str
    metric: str
    value: float
    standard_error: float | None


def run_tasks(
    opened: LoadedModel, tasks: Sequence[str], folder: str | None, limit: int | None = None
) -> list[TaskScore]:
    """The named tasks; `folder` holds task files of the user's own that read local data."""
    # The harness looks at these when it is imported; a task's data must come from here or from the local cache.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import lm_eval
        from datasets.exceptions import DatasetsError
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise DeviceError(f"--tasks needs lm-evaluation-harness ({error})", fix="pip install 'gptfit[eval]'") from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if folder is not None and not Path(folder).is_dir():
        raise RunError(f"{folder}: no such folder of task files")
    manager = TaskManager(include_path=folder)
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        raise RunError(f"{unknown[0]!r} is not a task of lm-evaluation-harness", fix="`lm-eval ls tasks` lists them")
    try:
        found = lm_eval.simple_evaluate(
            make_harness_model(opened), tasks=list(tasks), limit=limit, task_manager=manager, bootstrap_iters=0
        )
    # What a missing data set raises depends on how far the hub client got.
    except (OSError, DatasetsError, RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        raise RunError(
            f"--tasks {','.join(tasks)}: {reason}", fix="task files with local data go in --tasks-folder"
        ) from None
    return list(_scores(found or {}))


def _scores(found: dict[str, Any]) -> list[TaskScore]:
    """The harness names a metric 'acc,none' (metric, filter) and its error 'acc_stderr,none'."""
    scores = []
    for task, values in found.get("results", {}).items():
        for key, value in values.items():
            metric, _, used_filter = key.partition(",")
            if isinstance(value, float) and not metric.endswith("_stderr"):
                error = values.get(f"{metric}_stderr,{used_filter}")
                scores.append(TaskScore(task, metric, value, error if isinstance(error, float) else None))
    return scores


def make_harness_model(opened: LoadedModel) -> TemplateLM:
    """The class is made here because the harness is imported only when it is used."""
    from lm_eval.api.model import TemplateLM

    class GptfitLM(TemplateLM):  # type: ignore[misc]
        """What the harness asks of a model, in token ids."""

        @property
        def eot_token_id(self) -> int:
            end = opened.tokenizer.end_of_text
            return end if end is not None else opened.tokenizer.encode("\n")[0]

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
            return opened.tokenizer.encode(string)

        def _loglikelihood_tokens(
            self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: object
        ) -> list[tuple[float, bool]]:
            """Requests of one question follow each other and share its context, which is read once."""
            answers: list[tuple[float, bool]] = []
            for context, group in groupby(requests, key=lambda request: request[1]):
                endings = [request[2] for request in group]
                scores = score_continuations(opened.model, context or [self.eot_token_id], endings)
                answers += [(score.log_p, score.is_greedy) for score in scores]
            return answers

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            """A whole text as the continuation of a new document."""
            texts = [opened.tokenizer.encode(request.args[0]) for request in requests]
            start = [self.eot_token_id]
            return [score_continuations(opened.model, start, [text])[0].log_p if text else 0.0 for text in texts]

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            answers = []
            for request in requests:
                context, options = request.args
                stops = options.get("until") or []
                stops = [stops] if isinstance(stops, str) else [stop for stop in stops if stop]
                how = Picking(temperature=options.get("temperature", 0.0) if options.get("do_sample") else 0.0)
                prompt = opened.tokenizer.encode(context) or [self.eot_token_id]
                pieces = sample(opened, prompt, 1, int(options.get("max_gen_toks", 256)), how, stops)
                answers.append("".join(piece.text for piece in pieces))
            return answers

    return GptfitLM()
