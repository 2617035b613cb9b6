"""What plan says a run's last validation loss will be, from what its log says it is."""

from __future__ import annotations

from pathlib import Path

from gptfit.compare.facts import RunFacts
from gptfit.estimate import Estimate
from gptfit.plan.expected import expected_loss
from gptfit.plan.result import DataFacts


def planned_loss(facts: RunFacts) -> Estimate | None:
    """In nats per token. None where the model, the batch or the length is not known, or other weights came first."""
    config, per_step = facts.as_config(), facts.tokens_per_step
    if config is None or facts.shape is None or not facts.max_iters or not per_step:
        return None
    if facts.chat or facts.config.get("init_from", "scratch") not in ("scratch", "resume"):
        return None  # plan's law is about text, and models that begin with nothing
    tokens = float(config.windows_until(facts.max_iters, facts.processes) * config.block_size)
    name, tokenizer = Path(config.dataset).name, (facts.tokenizer or "").partition(" ")[0] or None
    seen = float(facts.train_tokens or tokens)
    data = DataFacts(
        name, Estimate(seen, seen, seen, "exact"), tokenizer=tokenizer, bytes_per_token=facts.bytes_per_token
    )
    found = expected_loss(facts.shape, tokens, data, optimizer=config.optimizer, weight_decay=config.weight_decay)
    return found.loss if found else None
