"""The parts of nanoGPT's GPT-2 block: LayerNorm with optional bias, causal attention, MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gptfit.model.cache import LayerCache

LAYER_NORM_EPSILON = 1e-5  # GPT-2's


class LayerNorm(nn.Module):
    """Layer normalisation over the last dimension, with the bias as a choice."""

    def __init__(self, size: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if x.dtype == torch.float32 and weight.dtype != x.dtype:  # FSDP's 16-bit copies beside a stream of 32 bits
            weight, bias = weight.float(), None if bias is None else bias.float()
        return F.layer_norm(x, weight.shape, weight, bias, LAYER_NORM_EPSILON)


class CausalSelfAttention(nn.Module):
    """Every token looks at itself and the tokens before it; the flash kernel is chosen by torch."""

    def __init__(self, n_embd: int, n_head: int, bias: bool, dropout: float) -> None:
        super().__init__()
        # Creation order is nanoGPT's: each Linear draws from the random stream when it is made.
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=bias)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=bias)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head = n_head
        self.dropout = dropout

    def forward(self, x: Tensor, past: LayerCache | None = None) -> Tensor:
        batch, time, n_embd = x.shape
        q, k, v = (
            part.view(batch, time, self.n_head, n_embd // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
            for part in self.c_attn(x).split(n_embd, dim=2)
        )
        if past is not None:
            y = past.attend(q, k, v)
        else:
            dropout = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(batch, time, n_embd)
        return self.resid_dropout(self.c_proj(y))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Each token on its own: four times wider, GELU, back."""

    def __init__(self, n_embd: int, bias: bool, dropout: float) -> None:
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd, bias=bias)
        self.c_proj = nn.Linear(4 * n_embd, n_embd, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.gelu = "none"  # exact, as nanoGPT; OpenAI's own weights want "tanh"

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate=self.gelu)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then MLP, each on a normalised copy and added back."""

    def __init__(self, n_embd: int, n_head: int, bias: bool, dropout: float) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(n_embd, bias)
        self.attn = CausalSelfAttention(n_embd, n_head, bias, dropout)
        self.ln_2 = LayerNorm(n_embd, bias)
        self.mlp = MLP(n_embd, bias, dropout)

    def forward(self, x: Tensor, past: LayerCache | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), past)
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]
