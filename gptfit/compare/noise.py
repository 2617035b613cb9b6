"""How much two validation losses may differ by luck: eval sampling error and the spread between seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gptfit.compare.facts import EvalPoint, RunFacts
from gptfit.units import count

# Spread of the mean loss of 1,024-token rows of web text, in nats. The 41 evals of the 12x384 log on an RTX 4070
# scatter by 0.0044 (median) to 0.0081 (rms) about a smooth curve with 3,200 rows each: 0.25 to 0.46 per row.
ROW_SPREAD = 0.35
ROW_TOKENS = 1024
# One standard deviation between runs that differ in nothing but chance, at the end of training, in nats. At 124M
# parameters 0.0013 is published (github KellerJordan/modded-nanogpt, pull requests 45 and 323: 4 and 10 runs). Smaller
# models scatter more: three seeds of docs/recipe.md's 5M model lie 0.014 apart, which makes 0.008.
PUBLISHED_PARAMETERS = 100e6  # from this size on
PUBLISHED_CHANCE = 0.0013
SMALL_CHANCE = 0.008
# While a loss still falls, chance puts a run ahead by a share of its steps. The same repository's pull request 321 (20
# seeds) has 0.0013 where the mean falls by 7.7e-5 a step at step 2,760, 0.21 per e-fold: 0.6 % of the steps. Two runs of
# one 124M config on one RTX 4070 (github lzwjava/zz, train_log_fineweb2 and 3) agree: 0.007 where 1.1 per e-fold is lost.
CHANCE_PER_SLOPE = PUBLISHED_CHANCE / 0.21
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


@dataclass(frozen=True)
class Noise:
    """Why two equal runs differ: each eval sees some rows only, and no two runs are the same but for chance."""

    sampling: float  # one standard deviation of the difference between two evals
    chance: float  # one standard deviation of a run, at the end of training

    def band(self, slope: float = 0.0) -> float:
        """What chance alone produces one time in twenty, where a loss falls by `slope` per e-fold of steps."""
        return SIGMAS * math.hypot(self.sampling, math.sqrt(2) * max(self.chance, CHANCE_PER_SLOPE * abs(slope)))

    def scaled(self, factor: float) -> Noise:
        return Noise(self.sampling * factor, self.chance * factor)


def noise_between(left: RunFacts, right: RunFacts) -> Noise:
    """In nats per token."""
    sampling = math.hypot(eval_error(left).nats, eval_error(right).nats)
    if same_eval_rows(left, right):
        sampling *= PAIRED_SHARE
    sizes = [run.parameters or 0 for run in (left, right)]
    return Noise(sampling, PUBLISHED_CHANCE if min(sizes) >= PUBLISHED_PARAMETERS else SMALL_CHANCE)


def same_eval_rows(left: RunFacts, right: RunFacts) -> bool:
    """gptfit's epoch sampler evaluates on fixed windows, the same for every run with these keys and this data."""
    keys = ("dataset", "eval_iters", "block_size", "sampling")
    ours = left.kind == right.kind == "gptfit" and left.config.get("sampling") == "epoch"
    return ours and all(left.config.get(key) == right.config.get(key) for key in keys) and _same_windows(left, right)


def _same_windows(left: RunFacts, right: RunFacts) -> bool:
    """They are as many as an update has, up to a limit, however that is cut into micro-batches."""
    counts = [_tokens_per_eval(run) for run in (left, right)]
    return counts[0] == counts[1]


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
