"""Is tune's answer the best there is? Runs `gptfit tune` on a 6 x 384 model, then measures every size and thread
count one by one, and prints both tables with the ratio of tune's choice to the exhaustive best.

    python bench/tune.py [--minutes 4.5] [--rounds 3] [--compile] [--n_layer=2 --n_embd=128 ...]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import tempfile
import time
from dataclasses import replace
from typing import Any

from gptfit.cli import main as gptfit
from gptfit.config.keys import TrainConfig
from gptfit.config.read import load_config
from gptfit.tune.measuring import find_machine, make_measure
from gptfit.tune.rank import Score, machine_notes, score_all
from gptfit.tune.space import divisors, make_space, thread_counts
from gptfit.tune.trials import Candidate, Trial, timing_from_json

MODEL = ("--n_layer=6", "--n_head=6", "--n_embd=384", "--block_size=256", "--vocab_size=50304")
STEP = ("--batch_size=8", "--gradient_accumulation_steps=4", "--device=cpu")
PROMISE = 0.95  # issue: within 5 % of the exhaustive best, in under 5 minutes
# After the first round only candidates this close to the best can still be the best.
STILL_POSSIBLE = 0.85


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=4.5)
    parser.add_argument("--rounds", type=int, default=3, help="of the exhaustive measurement")
    parser.add_argument("--compile", action="store_true", help="compiled, as train does by default; much longer")
    args, changes = parser.parse_known_args()
    keys = [*MODEL, *STEP, f"--compile={args.compile}", *changes]
    config = load_config([], keys).config
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["GPTFIT_CACHE"] = cache  # nothing remembered may help
        tuned = run_tune(keys, args.minutes)
    seconds = time.monotonic() - began
    chosen = (tuned["best"]["micro_batch"], tuned["best"]["threads"])
    print(f"tune: {len(tuned['trials'])} trials in {seconds:.0f} s; micro-batch {chosen[0]}, {chosen[1]} threads")
    print(f"      {tuned['explanation']}")
    for note in tuned["notes"]:
        print(f"      {note}")
    scores = measure_all(config, args.rounds)
    best = scores[0]
    print(f"\nexhaustive: {'micro-batch':>11} {'threads':>7} {'tokens/s':>9} {'+-':>6} {'of best':>8}")
    for score in scores:
        candidate, share = score.candidate, score.tokens_per_s / best.tokens_per_s
        mark = "  <- tune" if (candidate.micro_batch, candidate.variant.threads) == chosen else ""
        print(
            f"{'':11} {candidate.micro_batch:>11} {candidate.variant.threads:>7} {score.tokens_per_s:>9.0f} "
            f"{100 * score.spread:>5.1f}% {share:>8.3f}{mark}"
        )
    found = next(s for s in scores if (s.candidate.micro_batch, s.candidate.variant.threads) == chosen)
    ratio = found.tokens_per_s / best.tokens_per_s
    print(
        f"\ntune's choice / exhaustive best = {ratio:.3f} (promised at least {PROMISE}), tune took {seconds / 60:.1f} min"
    )
    return 0 if ratio >= PROMISE and seconds < 300 else 1


def run_tune(keys: list[str], minutes: float) -> dict[str, Any]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = gptfit(["tune", *keys, f"--minutes={minutes}", "--json"])
    if code:
        raise SystemExit(code)
    answer: dict[str, Any] = json.loads(output.getvalue())
    return answer


def measure_all(config: TrainConfig, rounds: int) -> list[Score]:
    """Every divisor with every thread count, interleaved; later rounds leave out what cannot win any more."""
    shape, machine = config.shape(), find_machine(config)
    space = make_space(config, shape, machine)
    measure = make_measure(config, shape, machine)
    counts = [machine.threads, *(int(str(n)) for n in thread_counts(machine))]
    candidates = [
        Candidate(size, replace(space.base, threads=threads))
        for size in divisors(space.workload.rows)
        for threads in counts
    ]
    trials: list[Trial] = []
    began = time.monotonic()
    for _ in range(rounds):
        for candidate in candidates:
            ended = measure(candidate, False, 600.0, lambda stage: None)
            timing = timing_from_json(ended.values) if ended.outcome == "ok" else None
            started_s = time.monotonic() - began
            trials.append(Trial(candidate, ended.outcome, started_s, ended.duration_s, ended.message, timing))
        scores = score_all(trials, space.workload)
        reach = STILL_POSSIBLE * scores[0].tokens_per_s
        candidates = [score.candidate for score in scores if score.tokens_per_s >= reach]
    for note in machine_notes(trials):
        print(f"exhaustive: {note}")
    return score_all(trials, space.workload)


if __name__ == "__main__":
    raise SystemExit(main())
