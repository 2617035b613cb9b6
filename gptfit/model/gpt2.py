"""nanoGPT's GPT-2: its parameter names, its initialisation and the order of it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gptfit.model.base import Checkpointing, LanguageModel
from gptfit.model.cache import KVCache
from gptfit.model.layers import Block, LayerNorm
from gptfit.model.tables import Table
from gptfit.shape import ModelShape

INIT_STD = 0.02  # GPT-2


class GPT2(LanguageModel):
    """The tensors of `ModelShape.weights()`, made in nanoGPT's order so one seed gives the same weights."""

    def __init__(self, shape: ModelShape, dropout: float = 0.0, checkpoint_activations: Checkpointing = False) -> None:
        super().__init__(shape, dropout, checkpoint_activations)
        blocks = (Block(shape.n_embd, shape.n_head, shape.bias, dropout) for _ in range(shape.n_layer))
        self.transformer = nn.ModuleDict(
            {
                "wte": Table(shape.vocab_size, shape.n_embd),
                "wpe": Table(shape.block_size, shape.n_embd),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList(blocks),
                "ln_f": LayerNorm(shape.n_embd, shape.bias),
            }
        )
        self.lm_head = nn.Linear(shape.n_embd, shape.vocab_size, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        self.initialise()

    def initialise(self) -> None:
        """Normal weights, zero biases, residual projections smaller; draws in nanoGPT's order."""
        self.apply(_initialise)
        residual_std = INIT_STD / math.sqrt(2 * self.shape.n_layer)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=residual_std)

    def hidden(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        start = cache.length if cache else 0
        positions = torch.arange(start, start + idx.shape[1], device=idx.device)
        embedded = self.transformer["wte"](idx) + self.transformer["wpe"](positions)
        x = self.into_stream(self.transformer["drop"](embedded))
        for i, block in enumerate(self.transformer["h"].children()):
            x = self.run_block(block, x, cache.layers[i] if cache else None)
        return self.transformer["ln_f"](x)  # type: ignore[no-any-return]


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INIT_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
