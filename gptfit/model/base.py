"""LanguageModel: what every architecture offers to training, sampling and export."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gptfit.model.cache import KVCache
from gptfit.model.head import mean_loss, soft_cap, token_loss
from gptfit.model.tables import Table, on_device
from gptfit.shape import ModelShape

# False keeps everything for backward; 'wide' computes norms, activations and residual sums again, which costs memory
# traffic only; True computes whole blocks again, a third more arithmetic.
Checkpointing = bool | str

# The costly operations, whose results checkpoint_activations='wide' keeps.
_aten = torch.ops.aten
KEPT_OPERATIONS = frozenset(
    [
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten._scaled_mm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    ]
)


def _keep_costly(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_costly = operation in KEPT_OPERATIONS
    return CheckpointPolicy.MUST_SAVE if is_costly else CheckpointPolicy.PREFER_RECOMPUTE


class LanguageModel(nn.Module, ABC):
    """Token ids in, loss or logits out. A subclass writes `hidden` and makes `lm_head` and `transformer` with its blocks `h`.

    `forward(idx, targets)` is the training path, so that DDP and torch.compile see the whole of it.
    """

    lm_head: nn.Linear
    transformer: nn.ModuleDict

    def __init__(self, shape: ModelShape, dropout: float = 0.0, checkpoint_activations: Checkpointing = False) -> None:
        super().__init__()
        self.shape = shape
        self.dropout_rate = dropout
        self.checkpoint_activations = checkpoint_activations
        # Tokens per piece of the loss; 0 computes all logits at once.
        self.loss_chunk_tokens = 0
        # Whether a chunk's softmax and gradient are one compiled kernel; worth it on a card only.
        self.loss_is_fused = False
        # Whether some targets do not count (UNCOUNTED): their loss is zero, the mean is over all.
        self.loss_is_masked = False
        # Format of the residual stream; None leaves it in float32, as the embedding is.
        self.stream_dtype: torch.dtype | None = None
        # Whether the weights of embeddings and head are in host memory.
        self.tables_on_host = False
        # What forward calls for the hidden states; the compiler replaces it, `hidden` stays as written.
        self.trunk: Callable[[Tensor], Tensor] = self.hidden

    def units(self) -> list[nn.Module]:
        """What is whole only while it is at work, where a model is divided; the rest is whole for a micro-step."""
        return list(self.transformer["h"].children())

    def tables(self) -> list[Table]:
        return [module for module in self.modules() if isinstance(module, Table)]

    @abstractmethod
    def hidden(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """(B, T) token ids -> (B, T, C) states after the last norm; with a cache, `idx` follows what it holds."""

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of the targets, in nats per token."""
        return self.loss(self.trunk(idx), targets)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return self._token_loss(hidden, targets, cap=0.0)

    def _token_loss(self, hidden: Tensor, targets: Tensor, cap: float) -> Tensor:
        states, ids = hidden.flatten(0, 1), targets.flatten()
        if not self.loss_chunk_tokens:
            return mean_loss(soft_cap(LanguageModel.head(self, states), cap), ids, self.loss_is_masked)
        how = self.loss_chunk_tokens, cap, self.loss_is_fused, self.loss_is_masked
        return token_loss(states, self.lm_head.weight, ids, *how)

    def head(self, hidden: Tensor) -> Tensor:
        """(..., C) states -> (..., V) logits."""
        if self.tables_on_host:
            return F.linear(hidden, on_device(self.lm_head.weight, hidden.device))
        return self.lm_head(hidden)  # type: ignore[no-any-return]

    def keep_tables_on_host(self, pinned: Callable[[Tensor], Tensor]) -> None:
        """Embeddings, tables and head stay, or go, there; `pinned` makes host memory that copies without waiting."""
        self.tables_on_host = True
        for table in self.tables():
            table.keep_on_host()
        for weight in {*(table.weight for table in self.tables()), self.lm_head.weight}:  # a tied one once
            weight.data = pinned(weight.data.to("cpu"))

    def logits(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """(B, T) token ids -> (B, T, V)."""
        return self.head(self.hidden(idx, cache))

    def next_logits(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """(B, T) token ids -> (B, V) for the token after the last."""
        return self.head(self.hidden(idx, cache)[:, -1])

    def into_stream(self, x: Tensor) -> Tensor:
        """What the blocks add to, in its number format; their products come out in 16 bits and keep it."""
        return x if self.stream_dtype is None else x.to(self.stream_dtype)

    def run_block(self, block: nn.Module, *inputs: object) -> Tensor:
        """Call a block, keeping its inputs only and computing the rest again in backward when asked to."""
        if self.checkpoint_activations and torch.is_grad_enabled():
            how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": self.dropout_rate > 0}
            if self.checkpoint_activations == "wide":
                how["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_costly)
            return checkpoint(block, *inputs, **how)  # type: ignore[no-any-return]
        return block(*inputs)  # type: ignore[no-any-return]
