"""llama.cpp's graph of `arcee` in numpy, float64, from a GGUF file alone: nothing of gptfit is used here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

Array = np.ndarray[Any, Any]


class ArceeFile:
    """Reads the file as llama.cpp does: tensors by name, numbers by key, defaults where it has defaults."""

    def __init__(self, path: Path) -> None:
        self.reader = gguf.GGUFReader(path)
        self.tensors = {t.name: np.asarray(t.data, np.float64) for t in self.reader.tensors}
        assert self.field("general.architecture") == "arcee"
        self.n_layer, self.n_head = int(self.number("block_count")), int(self.number("attention.head_count"))
        self.n_embd = int(self.number("embedding_length"))
        self.epsilon = self.number("attention.layer_norm_rms_epsilon")
        self.n_rot = int(self.number("rope.dimension_count"))
        assert self.n_rot == self.n_embd // self.n_head, "llama.cpp asserts it"
        assert self.tensors["blk.0.ffn_up.weight"].shape == (int(self.number("feed_forward_length")), self.n_embd)

    def field(self, name: str) -> Any:
        return self.reader.fields[name].contents()

    def number(self, name: str) -> float:
        return float(self.field(f"arcee.{name}"))

    def logits(self, ids: list[int]) -> Array:
        """(T, vocabulary)."""
        x = self.tensors["token_embd.weight"][ids]
        for i in range(self.n_layer):
            x = x + self._attention(self._norm(x, f"blk.{i}.attn_norm"), i)
            up = self._linear(self._norm(x, f"blk.{i}.ffn_norm"), f"blk.{i}.ffn_up")
            x = x + self._linear(np.maximum(up, 0.0) ** 2, f"blk.{i}.ffn_down")
        return self._linear(self._norm(x, "output_norm"), "output")

    def _linear(self, x: Array, name: str) -> Array:
        return x @ self.tensors[f"{name}.weight"].T

    def _norm(self, x: Array, name: str) -> Array:
        scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon)
        return x * scale * self.tensors[f"{name}.weight"]

    def _attention(self, x: Array, layer: int) -> Array:
        parts = [self._linear(x, f"blk.{layer}.attn_{part}") for part in "qkv"]
        q, k, v = (part.reshape(len(x), self.n_head, -1).swapaxes(0, 1) for part in parts)  # (heads, T, head size)
        scores = self._turned(q) @ self._turned(k).swapaxes(1, 2) / np.sqrt(self.n_rot)
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        return self._linear((shares @ v).swapaxes(0, 1).reshape(len(x), -1), f"blk.{layer}.attn_output")

    def _turned(self, x: Array) -> Array:
        """LLAMA_ROPE_TYPE_NORM: channels 2 i and 2 i + 1 turn together, by position * base^(-2 i / n) / factor."""
        pairs = np.arange(self.n_rot // 2)
        speeds = self.number("rope.freq_base") ** (-2 * pairs / self.n_rot) / self.tensors["rope_freqs.weight"]
        angles = np.outer(np.arange(x.shape[1]), speeds)
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = np.empty_like(x)
        turned[..., 0::2] = even * np.cos(angles) - odd * np.sin(angles)
        turned[..., 1::2] = even * np.sin(angles) + odd * np.cos(angles)
        return turned
