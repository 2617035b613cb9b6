"""How much two validation losses may differ by luck: eval sampling error and the spread between seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gptfit.units import count
from gptfit.view.facts import EvalPoint, RunFacts

# Spread of the mean loss of 1,024-token rows of web text, in nats. The 41 evals of the 12x384 log on an RTX 4070
# scatter by 0.0044 (median) to 0.0081 (rms) about a smooth curve with 3,200 rows each: 0.25 to 0.46 per row.
ROW_SPREAD = 0.35
ROW_TOKENS = 1024
# One standard deviation between runs that differ in nothing but chance, in nats. Two runs of one 124M config on one
# RTX 4070 (github lzwjava/zz, train_log_fineweb2 and 3; same seed, same eval rows) differ by 0.010 rms over nine evals,
# 0.007 each; modded-nanogpt's record logs report 0.0013 to 0.003 at the end of training.
SEED_SPREAD = 0.005
# What remains of the sampling error when both runs are evaluated on the same rows: hard rows are hard for both.
# Measured with character models of order 3, 4 and 5 on tinyshakespeare, which differ by 0.1 to 0.4 nats: 0.16 to 0.46.
PAIRED_SHARE = 0.35
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
    tokens = _tokens_per_eval(run)
    if tokens is not None:
        return EvalError(ROW_SPREAD / math.sqrt(tokens / ROW_TOKENS), f"{count(tokens)} tokens per eval")
    scatter = _scatter(run.evals)
    if scatter is not None:
        return EvalError(scatter, "the scatter of its own evals")
    return EvalError(UNKNOWN_SPREAD, "assumed; the eval size is unknown")


def noise_band(left: RunFacts, right: RunFacts) -> float:
    """The difference in validation loss that chance alone produces one time in twenty, in nats."""
    sampling = math.hypot(eval_error(left).nats, eval_error(right).nats)
    if same_eval_rows(left, right):
        sampling *= PAIRED_SHARE
    return SIGMAS * math.hypot(sampling, math.sqrt(2) * SEED_SPREAD)


def same_eval_rows(left: RunFacts, right: RunFacts) -> bool:
    """gptfit's epoch sampler evaluates on fixed windows, the same for every run with these keys and this data."""
    keys = ("dataset", "eval_iters", "batch_size", "block_size", "sampling")
    ours = left.kind == right.kind == "gptfit" and left.config.get("sampling") == "epoch"
    return ours and all(left.config.get(key) == right.config.get(key) for key in keys)


def _tokens_per_eval(run: RunFacts) -> int | None:
    said = next((point.eval_tokens for point in reversed(run.evals) if point.eval_tokens), None)
    if said is not None:
        return said
    sizes = [run.config.get(key, 0) for key in ("eval_iters", "batch_size", "block_size")]
    # nanoGPT evaluates on one process: eval_iters batches of batch_size rows.
    return math.prod(sizes) if all(size > 0 for size in sizes) else None


def _scatter(evals: tuple[EvalPoint, ...]) -> float | None:
    """Second differences cancel the trend; that of three independent values has six times the variance of one."""
    losses = [point.val_loss for point in evals if point.val_loss is not None]
    late = losses[len(losses) // 2 :]
    if len(late) < FEWEST_EVALS:
        return None
    bends = sorted(abs(a - 2 * b + c) for a, b, c in zip(late, late[1:], late[2:], strict=False))
    return bends[len(bends) // 2] / 0.6745 / math.sqrt(6)  # 0.6745: the median of |x| for a unit normal
