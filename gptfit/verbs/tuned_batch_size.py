"""`--batch_size=auto`: the micro-batch `tune` found on this device, measured first when it is not known yet."""

from __future__ import annotations

import argparse
from functools import partial

from gptfit import measured
from gptfit.config.keys import TrainConfig
from gptfit.config.start_model import is_pretrained
from gptfit.errors import ConfigError, RunError
from gptfit.shape import ModelShape
from gptfit.units import plural
from gptfit.verbs.gpu_and_data import find_data, vocab_size
from gptfit.verbs.ticker import LOOKING, waiting

AUTO = "--batch_size=auto"


def take_auto(args: argparse.Namespace) -> bool:
    """Whether it was asked for; it is removed from the command line, as it is not a number."""
    is_asked = AUTO in args.overrides
    args.overrides = [word for word in args.overrides if word != AUTO]
    return is_asked


def with_auto_batch(config: TrainConfig) -> tuple[TrainConfig, list[str]]:
    """The config with the best micro-batch, and what to say about it. Tokens per step stay what they are."""
    with waiting(LOOKING):
        from gptfit.checkpoint.pretrained import adopt_model
        from gptfit.device.processes import find_processes
        from gptfit.tune.cache import best_known
        from gptfit.tune.measuring import find_machine

        config = adopt_model(config) if is_pretrained(config) else config
        processes = find_processes()
        shape = config.shape(vocab_size(find_data(None, config)))
        machine = find_machine(config)
    known = best_known(config, shape, machine, measured.read(), processes.count)
    if known is not None:
        micro_batch, how = known.candidate.micro_batch, f"measured here at {known.tokens_per_s:,.0f} tokens/s"
    elif processes.is_alone:
        micro_batch, how = _tuned(config, shape), "measured just now"
    else:
        raise ConfigError(
            "batch_size = auto: nothing is measured here yet", fix="run `gptfit tune` first, without torchrun"
        )
    rows = config.tokens_per_iter(processes.count) // config.block_size
    sizes = {"batch_size": micro_batch}
    if not config.tokens_per_step:
        sizes["gradient_accumulation_steps"] = rows // micro_batch
    if not processes.is_master:
        return config.replace(**sizes), []
    step = f"{rows * config.block_size:,} tokens per step as before"
    said = f"batch_size = auto: {micro_batch} rows x {plural(rows // micro_batch, 'micro-step')}, {how}; {step}"
    return config.replace(**sizes), [said]


def _tuned(config: TrainConfig, shape: ModelShape) -> int:
    """Threads stay as they are: this process trains with them."""
    from gptfit.tune.session import TuneOptions, run_session
    from gptfit.verbs.tune_output import answer_lines
    from gptfit.verbs.tune_view import open_screen, print_result

    options = TuneOptions(varies_threads=False)
    with waiting(LOOKING) as ticker:
        result = run_session(config, shape, options, partial(open_screen, ticker, options.minutes))
    if result.session.reason == "interrupted":
        raise KeyboardInterrupt  # what was measured is in the cache; Ctrl-C means that the run is not wanted now
    if result.best is None:
        raise RunError(result.why_nothing())
    print_result(result, answer_lines(result))
    return result.best.candidate.micro_batch
