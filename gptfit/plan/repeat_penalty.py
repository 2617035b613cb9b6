"""What repeats cost beside being worth less and less: a model with many parameters for its data learns it by heart."""

from __future__ import annotations

# From Lovelace et al. (2026), "Prescriptive Scaling Laws for Data Constrained Training": one additive penalty, of which
# strong weight decay (1.0) leaves 30 %. That it is linear in the repeats and in the parameters per unique token is ours.
# Its size is that of nanoGPT's shakespeare_char: 10.65M parameters, 1.0M characters, 1.470 at best after 28 epochs and
# 1.704 to 1.710 after 81.6 (published logs), 0.0044 nats per character and epoch. Rows of the embedding and of the head are
# learned by heart like any other weight: GPT-2's vocabulary on 108k bytes then costs 0.28 bits per byte; measured once, 0.30.
PER_REPEAT = 4.1e-4  # nats, times parameters per unique token; the same per byte
LEFT = 0.3
USUAL_DECAY, STRONG_DECAY = 0.1, 1.0


def penalty(parameters: float, seen: float, unique: float, weight_decay: float = USUAL_DECAY) -> float:
    """Nats per token of `seen` tokens of which `unique` are different, or per byte of bytes.

    >>> round(penalty(10.65e6, 81.6e6, 1e6) - penalty(10.65e6, 28e6, 1e6), 3)
    0.234
    """
    repeats = max(0.0, seen / unique - 1)
    strength = min(1.0, max(0.0, (weight_decay - USUAL_DECAY) / (STRONG_DECAY - USUAL_DECAY)))
    return PER_REPEAT * repeats * parameters / unique * (1 - (1 - LEFT) * strength)
