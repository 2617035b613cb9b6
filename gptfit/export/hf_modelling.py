"""A gptfit model for transformers. `gptfit export --to hf` copies this file into the folder it writes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from gptfit.model.modern import Modern
from gptfit.shape import ModelShape


class GptfitConfig(PretrainedConfig):  # type: ignore[misc]
    """`shape` holds the fields of ModelShape."""

    model_type = "gptfit"

    def __init__(self, shape: dict[str, Any] | None = None, **others: Any) -> None:
        self.shape = shape
        super().__init__(**others)


class GptfitForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Reads the whole text for every token: simple and exact; `gptfit sample` has the cache."""

    config_class = GptfitConfig
    base_model_prefix = "model"
    # Where config.tie_word_embeddings says so: transformers would refuse to save one tensor under two names.
    _tied_weights_keys: ClassVar = {"model.lm_head.weight": "model.transformer.wte.weight"}

    def __init__(self, config: GptfitConfig) -> None:
        super().__init__(config)
        if config.shape is None:
            raise ValueError("config.json has no shape")
        self.model = Modern(ModelShape(**config.shape))
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """The model initialises itself; loaded weights must stay as they are."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **_: Any
    ) -> CausalLMOutput:
        if attention_mask is not None and not bool(attention_mask[:, 0].all()):
            raise ValueError("pad on the right: this model counts positions from the first token")
        logits = self.model.logits(input_ids)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return CausalLMOutput(loss=loss, logits=logits)

    def prepare_inputs_for_generation(self, input_ids: Tensor, **_: Any) -> dict[str, Any]:
        return {"input_ids": input_ids[:, -self.model.shape.block_size :]}

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.model.transformer["wte"]

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.model.lm_head
