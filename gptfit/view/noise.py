"""How much two validation losses may differ by luck: eval sampling error and the spread between seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gptfit.view.facts import EvalPoint, RunFacts

# Spread of the mean loss of 1,024-token rows of web text, in nats. The 41 evals of the 12x384 log on an RTX 4070
# scatter by 0.0044 (median) to 0.0081 (rms) about a smooth curve with 3,200 rows each: 0.25 to 0.46 per row.
ROW_SPREAD = 0.35
ROW_TOKENS = 1024
# One standard deviation between runs that differ in nothing but chance, in nats. Two runs of one 124M config on one
# RTX 4070 (github lzwjava/zz, train_log_fineweb2 and 3; same seed, same eval rows) differ by 0.010 rms over nine evals,
# 0.007 each; modded-nanogpt's record logs report 0.0013 to 0.003 at the end of training.
SEED_SPREAD = 0.005
# A difference is called real beyond two standard deviations.
SIGMAS = 2.0
# When neither the eval size nor enough evals to see their scatter are known; about 3,200 rows.
UNKNOWN_SPREAD = 0.01
FEWEST_EVALS = 8


@dataclass(frozen=True)
class EvalError:
    """One standard deviation of a validation loss, and how it is known."""

    nats: float
    basis: str


def eval_error(run: RunFacts) -> EvalError:
    """From the number of tokens each eval reads, else from the scatter of the run's own evals."""
    config = run.config
    if all(isinstance(config.get(key), int) for key in ("eval_iters", "batch_size", "block_size")):
        # nanoGPT evaluates on one process: eval_iters batches of batch_size rows.
        rows = config["eval_iters"] * config["batch_size"] * config["block_size"] / ROW_TOKENS
        return EvalError(ROW_SPREAD / math.sqrt(rows), f"{config['eval_iters']} x {config['batch_size']} rows per eval")
    scatter = _scatter(run.evals)
    if scatter is not None:
        return EvalError(scatter, "the scatter of its own evals")
    return EvalError(UNKNOWN_SPREAD, "assumed; the eval size is unknown")


def noise_band(left: RunFacts, right: RunFacts) -> float:
    """The difference in validation loss that chance alone produces one time in twenty, in nats."""
    variance = eval_error(left).nats ** 2 + eval_error(right).nats ** 2 + 2 * SEED_SPREAD**2
    return SIGMAS * math.sqrt(variance)


def _scatter(evals: tuple[EvalPoint, ...]) -> float | None:
    """Second differences cancel the trend; that of three independent values has six times the variance of one."""
    losses = [point.val_loss for point in evals if point.val_loss is not None]
    late = losses[len(losses) // 2 :]
    if len(late) < FEWEST_EVALS:
        return None
    bends = sorted(abs(a - 2 * b + c) for a, b, c in zip(late, late[1:], late[2:], strict=False))
    return bends[len(bends) // 2] / 0.6745 / math.sqrt(6)  # 0.6745: the median of |x| for a unit normal
