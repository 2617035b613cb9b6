"""The config of a candidate: nanoGPT's keys, ours only where they differ from nanoGPT's behaviour."""

from __future__ import annotations

from gptfit.config import recipe
from gptfit.config.keys import TrainConfig
from gptfit.plan import usual_values
from gptfit.plan.candidates import EVAL_TIME, PlannedRun, Wish
from gptfit.plan.evaluation import eval_seconds
from gptfit.plan.many_epochs import keys_for_epochs
from gptfit.plan.result import DataFacts
from gptfit.plan.setting import Setting
from gptfit.plan.speed import Speed
from gptfit.schedule import usual_warmup

MOST_EVALS, LEAST_EVALS = 40, 5
MOST_EVAL_ITERS, LEAST_EVAL_ITERS = 50, 4
TUNING_RATE = 5e-5  # nanoGPT tunes on Shakespeare with 3e-5; more data takes a little more


def config_of(wish: Wish, candidate: PlannedRun, speed: Speed) -> TrainConfig:
    """A run from scratch."""
    setting, data = candidate.setting, candidate.data
    evals, eval_iters = _evaluations(candidate, speed)
    max_iters = max(1, int(candidate.tokens // setting.tokens_per_step))
    regular = keys_for_epochs(candidate.epochs, setting.shape.arch, evals, data.has_documents)
    rate = usual_values.learning_rate(setting.shape.parameters)
    values = _shape_keys(setting) | _step_keys(setting, max_iters) | _files(wish, setting, data)
    values |= {
        "warmup_iters": usual_warmup(max_iters),
        "learning_rate": rate,
        "min_lr": usual_values.final_rate(rate),
        "eval_interval": max(1, max_iters // evals),
        "eval_iters": eval_iters,
    }
    if setting.shape.arch == "modern":
        values |= {
            **recipe.training_keys(max_iters, setting.tokens_per_step),
            **recipe.SECOND_EDITION,
            **recipe.length_keys(max_iters, setting.shape),
        }
        values |= {name: getattr(setting.shape, name) for name in ("value_embeddings", "bigram")}
    values |= {**regular, "average_tail": setting.average_tail}
    if wish.only_nanogpt_keys:
        values.pop("early_stop_evals", None)
    else:
        values["max_hours"] = wish.hours
    return TrainConfig(**values)  # type: ignore[arg-type]


def tuning_config(wish: Wish, candidate: PlannedRun, init_from: str, speed: Speed) -> TrainConfig:
    """A run from released weights: small rates, a few epochs, stopped when it gets no better."""
    setting = candidate.setting
    evals, eval_iters = _evaluations(candidate, speed)
    max_iters = max(1, int(candidate.tokens // setting.tokens_per_step))
    values = _shape_keys(setting) | _step_keys(setting, max_iters) | _files(wish, setting, candidate.data)
    values |= {
        "init_from": init_from,
        "out_dir": f"out-{candidate.data.name}-{init_from}",
        "wandb_run_name": f"{candidate.data.name}-{init_from}",
        "bias": True,
        "warmup_iters": usual_warmup(max_iters),
        "learning_rate": TUNING_RATE,
        "min_lr": usual_values.final_rate(TUNING_RATE),
        "weight_decay": usual_values.WEIGHT_DECAY,
        "dropout": 0.1,
        "eval_interval": max(1, max_iters // evals),
        "eval_iters": eval_iters,
        "max_hours": wish.hours,
        "early_stop_evals": max(2, evals // 4),
    }
    return TrainConfig(**values)  # type: ignore[arg-type]


def _shape_keys(setting: Setting) -> dict[str, object]:
    shape = setting.shape
    return {
        "n_layer": shape.n_layer,
        "n_head": shape.n_head,
        "n_embd": shape.n_embd,
        "block_size": shape.block_size,
        **({"chunked_loss": True} if setting.chunked_loss else {}),
        **({"checkpoint_activations": True} if setting.checkpoint_activations else {}),
    }


def _step_keys(setting: Setting, max_iters: int) -> dict[str, object]:
    return {
        "batch_size": setting.micro_batch,
        "gradient_accumulation_steps": setting.accumulation * setting.processes,
        "max_iters": max_iters,
        "lr_decay_iters": max_iters,
    }


def _files(wish: Wish, setting: Setting, data: DataFacts) -> dict[str, object]:
    name = f"{data.name}-{setting.shape.n_layer}x{setting.shape.n_embd}"
    is_own = data.name != wish.data.name
    values: dict[str, object] = {
        "dataset": data.name if is_own else wish.dataset or data.name,
        "out_dir": f"out-{name}",
        "wandb_run_name": name,
    }
    if wish.gpu is None:
        values["device"] = "cpu"
        if wish.is_short_on_a_cpu:
            values["compile"] = False
    return values


def _evaluations(candidate: PlannedRun, speed: Speed) -> tuple[int, int]:
    """How many and how long: as many as their share of the time allows, within reason."""
    setting = candidate.setting
    sizes = {"batch_size": setting.micro_batch, "block_size": setting.shape.block_size}
    steps = setting.accumulation * setting.processes
    single = TrainConfig.unchecked(eval_iters=1, gradient_accumulation_steps=steps, **sizes)
    one = eval_seconds(single, speed.ms_per_micro_step.value)
    allowed = EVAL_TIME * candidate.seconds / one  # batches of both splits
    eval_iters = int(min(MOST_EVAL_ITERS, max(LEAST_EVAL_ITERS, allowed / (2 * LEAST_EVALS))))
    return max(LEAST_EVALS, min(MOST_EVALS, int(allowed / eval_iters))), eval_iters
