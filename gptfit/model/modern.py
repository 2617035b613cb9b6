"""arch='modern': rotary positions, norms without weights, squared ReLU; each ingredient a switch of ModelShape."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gptfit.model.base import Checkpointing, LanguageModel
from gptfit.model.cache import KVCache, LayerCache
from gptfit.model.head import soft_cap
from gptfit.model.layers import LayerNorm
from gptfit.model.rotary import rotary_tables, rotate
from gptfit.model.tables import Table
from gptfit.shape import ModelShape

# Uniform in +-1/sqrt(n): torch's own default for a Linear, as a normal distribution.
MATRIX_STD = 3**-0.5
EMBEDDING_STD = 1.0  # normalised before the first block, so only the step size relative to it matters
HEAD_STD = 0.02  # GPT-2's
BACKOUT_SCALE = 0.2  # nanochat's, at first
VALUE_SCALE = 0.5  # of the normalised embedding in every layer's values, at first

Tables = tuple[Tensor, Tensor] | None
# The embedding, how much of the stream stays, how much of the embedding joins it.
Mix = tuple[Tensor, Tensor, Tensor] | None
Values = tuple[Tensor | None, Tensor | None, Tensor | None]  # added as they are; added through gates; their openings
NO_VALUES: Values = (None, None, None)


class Modern(LanguageModel):
    """The tensors of `ModelShape.weights()` for arch='modern'."""

    def __init__(self, shape: ModelShape, dropout: float = 0.0, checkpoint_activations: Checkpointing = False) -> None:
        super().__init__(shape, dropout, checkpoint_activations)
        c, n_layer = shape.n_embd, shape.n_layer
        parts: dict[str, nn.Module] = {"wte": Table(shape.vocab_size, c)}
        if shape.positions == "learned":
            parts["wpe"] = Table(shape.block_size, c)
        parts["drop"] = nn.Dropout(dropout)
        parts["h"] = nn.ModuleList(ModernBlock(shape, dropout) for _ in range(n_layer))
        parts["ln_f"] = make_norm(shape)
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(c, shape.vocab_size, bias=False)
        if shape.tied_head:
            self.transformer["wte"].weight = self.lm_head.weight
        if shape.smear:
            self.smear = nn.Parameter(torch.zeros(c))
        if shape.smear_gate:
            self.smear_gate = nn.Linear(shape.gate_channels, 1, bias=False)
        if shape.bigram:
            self.bigram = Table(*shape.bigram_size)
        if shape.backout:
            self.backout = nn.Parameter(torch.full((1,), BACKOUT_SCALE))
        if shape.layer_scalars:
            self.residual_scales = nn.Parameter(torch.ones(n_layer))
            self.embedding_scales = nn.Parameter(torch.zeros(n_layer))
        if shape.value_residual:
            self.value_scales = nn.Parameter(torch.full((n_layer,), VALUE_SCALE))
        if shape.value_layers:
            self.values = nn.ModuleDict({str(i): ValueEmbedding(shape) for i in shape.value_layers})
        self.initialise()

    def units(self) -> list[nn.Module]:
        tables = [*self.values.children()] if self.shape.value_layers else []
        return [*super().units(), *tables, *([self.bigram] if self.shape.bigram else [])]

    def initialise(self) -> None:
        """Matrices as torch does it; what writes into the residual stream as GPT-2 does, or at zero: each block at identity."""
        shape = self.shape
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.0 if shape.zero_init else HEAD_STD / (2 * shape.n_layer) ** 0.5)
            elif name == "lm_head.weight" and shape.zero_init:
                nn.init.zeros_(parameter)
            elif name == "lm_head.weight":
                nn.init.normal_(parameter, std=HEAD_STD)
            elif name.endswith("gate.weight") or name == "bigram.weight":
                nn.init.zeros_(parameter)
            elif name.startswith("transformer.w"):
                nn.init.normal_(parameter, std=HEAD_STD if shape.tied_head else EMBEDDING_STD)
            elif parameter.dim() == 2:
                scale = shape.mlp_init if name.endswith("c_fc.weight") else 1.0
                nn.init.normal_(parameter, std=scale * MATRIX_STD * shape.n_embd**-0.5)

    def hidden(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        shape, start = self.shape, cache.length if cache else 0
        x = self.into_stream(self.transformer["drop"](rms_norm(self._embed(idx, start, cache))))
        tables = None
        if shape.positions == "rotary":
            tables = rotary_tables(start, idx.shape[1], shape.n_embd // shape.n_head, idx.device)
        embedded = middle = x
        scales = list(zip(self.residual_scales, self.embedding_scales, strict=True)) if shape.layer_scalars else None
        for i, block in enumerate(cast(nn.ModuleList, self.transformer["h"])):
            mix = (embedded, *scales[i]) if scales else None
            values = self._values(i, idx, x, mix, embedded)
            x = self.run_block(block, x, mix, values, tables, cache.layers[i] if cache else None)
            middle = x if i + 1 == shape.n_layer // 2 else middle
        if shape.backout:
            x = torch.addcmul(x, self.backout, middle, value=-1)
        return self.transformer["ln_f"](x)  # type: ignore[no-any-return]

    def _values(self, layer: int, idx: Tensor, x: Tensor, mix: Mix, embedded: Tensor) -> Values:
        """What is added to the attention values of a layer from the embeddings of the tokens."""
        plain = self.value_scales[layer] * embedded if self.shape.value_residual else None
        if layer not in self.shape.value_layers:
            return plain, None, None
        return plain, *self.values[str(layer)](idx, x, mix, embedded)

    def _embed(self, idx: Tensor, start: int, cache: KVCache | None) -> Tensor:
        """(B, T, C): the token's embedding, its place if that is learned, and a share of the token before it."""
        x: Tensor = self.transformer["wte"](idx)
        if self.shape.positions == "learned":
            x = x + self.transformer["wpe"](torch.arange(start, start + idx.shape[1], device=idx.device))
        pairs = self._pairs(idx, cache) if self.shape.bigram else None
        if self.shape.smear:
            x = self._smeared(x, cache)
        if pairs is not None:
            x = x + F.pad(pairs, (0, x.shape[2] - pairs.shape[2]))
        return x

    def _smeared(self, x: Tensor, cache: KVCache | None) -> Tensor:
        before = x.new_zeros(1, 1, x.shape[2]) if cache is None or cache.previous is None else cache.previous
        if cache is not None:
            cache.previous = x[:, -1:]
        shifted = torch.cat([before.expand(x.shape[0], 1, -1), x[:, :-1]], dim=1)
        if self.shape.smear_gate:
            shifted = 2 * torch.sigmoid(self.smear_gate(x[..., : self.shape.gate_channels])) * shifted
        return x + self.smear * shifted

    def _pairs(self, idx: Tensor, cache: KVCache | None) -> Tensor:
        """(B, T, C / 4): the embedding of the token and the one before it together; the first token has none."""
        none = idx.new_full((1, 1), -1)
        before = none if cache is None or cache.previous_id is None else cache.previous_id
        if cache is not None:
            cache.previous_id = idx[:, -1:]
        previous = torch.cat([before.expand(idx.shape[0], 1), idx[:, :-1]], dim=1)
        rows = pair_row(previous, idx, self.shape.bigram_size[0])
        return self.bigram(rows) * (previous >= 0).unsqueeze(2)  # type: ignore[no-any-return]

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return self._token_loss(hidden, targets, self.shape.logit_softcap)

    def head(self, hidden: Tensor) -> Tensor:
        return soft_cap(super().head(hidden), self.shape.logit_softcap)


class ValueEmbedding(nn.Module):
    """What a layer's values get from the token itself, each head's share opened by a gate on the stream.

    The block adds it, as compiled code does there in one pass over the stream what would be ten here: this has only what
    needs the weights. The gates see few channels; that the stream is normalised is made up for afterwards.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        c, is_table = shape.n_embd, shape.value_embeddings == "tables"
        self.source = Table(shape.vocab_size, c) if is_table else nn.Linear(c, c, bias=False)
        self.gate = nn.Linear(shape.gate_channels, shape.n_head, bias=False)
        self.is_table = is_table

    def forward(self, idx: Tensor, x: Tensor, mix: Mix, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, C) values and (B, T, heads) openings of their gates, for a stream of unit size."""
        own: Tensor = self.source(idx if self.is_table else embedded)
        n = self.gate.in_features
        seen = x[..., :n] if mix is None else mixed(x[..., :n], (mix[0][..., :n], *mix[1:]))
        return own, self.gate(seen)


class ModernBlock(nn.Module):
    """Attention, then MLP, each on a normalised copy and added back."""

    def __init__(self, shape: ModelShape, dropout: float) -> None:
        super().__init__()
        self.ln_1 = make_norm(shape)
        self.attn = Attention(shape, dropout)
        self.ln_2 = make_norm(shape)
        self.mlp = ModernMLP(shape, dropout)

    def forward(self, x: Tensor, mix: Mix, values: Values, tables: Tables, past: LayerCache | None = None) -> Tensor:
        x = mixed(x, mix)
        x = x + self.attn(self.ln_1(x), added_values(x, values), tables, past)
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


def mixed(x: Tensor, mix: Mix) -> Tensor:
    """The stream and the embedding it began with, each scaled."""
    if mix is None:
        return x
    embedded, own_scale, embedding_scale = mix
    return own_scale * x + embedding_scale * embedded


def added_values(x: Tensor, values: Values) -> Tensor | None:
    plain, own, openings = values
    if own is None or openings is None:
        return plain
    squares = x.float().square().mean(dim=2, keepdim=True) + torch.finfo(x.dtype).eps  # rms_norm's
    gates = 2 * torch.sigmoid(openings * squares.rsqrt())
    gated = (gates.unsqueeze(3) * own.view(*gates.shape, -1)).flatten(2).to(own.dtype)
    return gated if plain is None else plain + gated


class Attention(nn.Module):
    """Causal attention with queries and keys of unit size, so that no logit can run away."""

    def __init__(self, shape: ModelShape, dropout: float) -> None:
        super().__init__()
        self.c_attn = nn.Linear(shape.n_embd, 3 * shape.n_embd, bias=False)
        self.c_proj = nn.Linear(shape.n_embd, shape.n_embd, bias=False)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head, self.qk_norm, self.dropout = shape.n_head, shape.qk_norm, dropout
        # None is the usual scale; both queries and keys times qk_scale is their product times its square.
        self.scale = None if shape.qk_scale == 1.0 else shape.qk_scale**2 * (shape.n_embd // shape.n_head) ** -0.5

    def forward(self, x: Tensor, values: Tensor | None, tables: Tables, past: LayerCache | None = None) -> Tensor:
        q, k, v = self.c_attn(x).chunk(3, dim=2)
        if values is not None:
            v = v + values
        q, k, v = (part.unflatten(2, (self.n_head, -1)).transpose(1, 2) for part in (q, k, v))  # (B, nh, T, hs)
        if self.qk_norm:
            q, k = rms_norm(q), rms_norm(k)
        if tables is not None:
            q, k = rotate(q, *tables), rotate(k, *tables)
        if past is not None:
            y = past.attend(q, k, v, self.scale)
        else:
            dropout = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=self.scale)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


class ModernMLP(nn.Module):
    """Each token on its own: four times wider, squared ReLU (So et al. 2021), back."""

    def __init__(self, shape: ModelShape, dropout: float) -> None:
        super().__init__()
        self.c_fc = nn.Linear(shape.n_embd, 4 * shape.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * shape.n_embd, shape.n_embd, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.act: Callable[[Tensor], Tensor] = F.gelu if shape.activation == "gelu" else squared_relu

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))  # type: ignore[no-any-return]


class RMSNorm(nn.Module):
    """To unit size along the last dimension, with nothing to learn."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x)


def make_norm(shape: ModelShape) -> nn.Module:
    return LayerNorm(shape.n_embd, bias=False) if shape.norm == "layer" else RMSNorm()


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def squared_relu(x: Tensor) -> Tensor:
    """Not `square()`: autocast on a card does that in float32, and backward would keep another 16 bytes per channel."""
    positive = F.relu(x)
    return positive * positive


def pair_row(previous: Tensor, token: Tensor, rows: int) -> Tensor:
    """Two tokens' row of a table smaller than all pairs: multiplying with an odd number gives neighbouring pairs distant rows."""
    mixed = (previous * 0x9E3779B1 + token) * 0x85EBCA6B  # wraps at 64 bits, the same on every device
    return (mixed ^ (mixed >> 29)) % rows
