"""One token after the other through a decoder of transformers, with the cache that it makes itself:
of keys and values, of states, or of both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from launcher.model.foreign.decoder import ForeignDecoder


class ForeignCache:
    """Cache of one sequence, as a decoder of transformers makes it; it grows with the sequence."""

    def __init__(self, model: ForeignDecoder) -> None:
        self._causal: Any = model.causal
        self._tokens: Tensor | None = None
        self._kept: dict[str, Any] = {"use_cache": True}

    def extend(self, tokens: Tensor) -> Tensor:
        """The logits [V] behind the last of `tokens` [T], int64, which come after those before."""
        causal, before = self._causal, self._tokens
        self._tokens = tokens[None] if before is None else torch.cat([before, tokens[None]], dim=1)
        inputs = causal.prepare_inputs_for_generation(
            self._tokens,
            next_sequence_length=None if before is None else len(tokens),
            is_first_iteration=before is None,
            attention_mask=torch.ones_like(self._tokens),
            **self._kept,
        )
        output = causal.base_model(**inputs)
        self._kept = causal._update_model_kwargs_for_generation(output, self._kept)
        logits: Tensor = causal.get_output_embeddings()(output.last_hidden_state[:, -1:])
        return logits[0, 0]
