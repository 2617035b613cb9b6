"""`--batch_size=auto`: the micro-batch `tune` found on this device, measured first when it is not known yet."""

from __future__ import annotations

import argparse

from gptfit import measured
from gptfit.config import TrainConfig
from gptfit.errors import ConfigError, RunError
from gptfit.startmodel import is_pretrained
from gptfit.verbs.common import load
from gptfit.verbs.planinput import find_data, vocab_size

AUTO = "--batch_size=auto"


def resolve_auto(args: argparse.Namespace) -> list[str]:
    """Puts numbers in place of `auto` on the command line; says what it chose, or nothing when it was not asked.

    Tokens per step stay what the config says without it.
    """
    if AUTO not in args.overrides:
        return []
    args.overrides = [word for word in args.overrides if word != AUTO]
    from gptfit.run.pretrained import adopt_model
    from gptfit.run.processes import find_processes
    from gptfit.run.resume import adopt_config
    from gptfit.run.tune import find_machine
    from gptfit.run.tunecache import best_known

    # Resuming, the keys that are not given come from the checkpoint, so the whole is checked only after that.
    loaded = load(args, checked=False)
    is_resume = loaded.config.init_from == "resume"
    config = adopt_config(loaded.config, loaded.sources) if is_resume else load(args).config
    config = adopt_model(config) if is_pretrained(config) else config
    processes = find_processes()
    shape = config.shape(vocab_size(find_data(None, config)))
    machine = find_machine(config)
    known = best_known(config, shape, machine, measured.read(), processes.count)
    if known is not None:
        micro_batch, how = known.candidate.micro_batch, f"measured here at {known.tokens_per_s:,.0f} tokens/s"
    elif processes.is_alone:
        micro_batch, how = _tuned(config), "measured just now"
    else:
        raise ConfigError("batch_size = auto: nothing is measured here yet; run `gptfit tune` first, without torchrun")
    rows = config.tokens_per_iter(processes.count) // config.block_size
    args.overrides.append(f"--batch_size={micro_batch}")
    if not config.tokens_per_step:
        args.overrides.append(f"--gradient_accumulation_steps={rows // micro_batch}")
    if not processes.is_master:
        return []
    step = f"{rows * config.block_size:,} tokens per step as before"
    return [f"batch_size = auto: {micro_batch} rows x {rows // micro_batch} micro-steps, {how}; {step}"]


def _tuned(config: TrainConfig) -> int:
    """Threads stay as they are: this process trains with them."""
    from gptfit.verbs.tune_output import answer_lines
    from gptfit.verbs.tune_session import Wish, run_session
    from gptfit.verbs.tune_view import print_result

    result = run_session(config, Wish(varies_threads=False))
    if result.session.reason == "interrupted":
        raise KeyboardInterrupt  # what was measured is in the cache; Ctrl-C means that the run is not wanted now
    if result.best is None:
        raise RunError(result.why_nothing())
    print_result(result, answer_lines(result))
    return result.best.candidate.micro_batch
