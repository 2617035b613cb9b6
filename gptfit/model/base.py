"""LanguageModel: what every architecture offers to training, sampling and export."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gptfit.model.cache import KVCache
from gptfit.model.head import token_loss
from gptfit.shape import ModelShape


class LanguageModel(nn.Module, ABC):
    """Token ids in, loss or logits out. A subclass writes `hidden` and makes `lm_head` and `transformer` with its blocks `h`.

    `forward(idx, targets)` is the training path, so that DDP and torch.compile see the whole of it.
    """

    lm_head: nn.Linear
    transformer: nn.ModuleDict

    def __init__(self, shape: ModelShape, dropout: float = 0.0, checkpoint_activations: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.dropout_rate = dropout
        self.checkpoint_activations = checkpoint_activations
        # Tokens per piece of the loss; 0 computes all logits at once.
        self.loss_chunk_tokens = 0
        # What forward calls for the hidden states; the compiler replaces it, `hidden` stays as written.
        self.trunk: Callable[[Tensor], Tensor] = self.hidden

    @abstractmethod
    def hidden(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """(B, T) token ids -> (B, T, C) states after the last norm; with a cache, `idx` follows what it holds."""

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of the targets, in nats per token."""
        return self.loss(self.trunk(idx), targets)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return token_loss(hidden.flatten(0, 1), self.lm_head.weight, targets.flatten(), self.loss_chunk_tokens)

    def head(self, hidden: Tensor) -> Tensor:
        """(..., C) states -> (..., V) logits."""
        return self.lm_head(hidden)  # type: ignore[no-any-return]

    def logits(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """(B, T) token ids -> (B, T, V)."""
        return self.head(self.hidden(idx, cache))

    def next_logits(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """(B, T) token ids -> (B, V) for the token after the last."""
        return self.head(self.hidden(idx, cache)[:, -1])

    def run_block(self, block: nn.Module, *inputs: object) -> Tensor:
        """Call a block, keeping its inputs only and computing the rest again in backward when asked to."""
        if self.checkpoint_activations and torch.is_grad_enabled():
            keeps_rng = self.dropout_rate > 0
            return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=keeps_rng)  # type: ignore[no-any-return]
        return block(*inputs)  # type: ignore[no-any-return]
