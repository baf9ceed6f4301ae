"""One token after the other, with a cache: each position's keys and values are computed once.

Training knows nothing of this: the cache walks the model's blocks from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from launcher.model.gpt import GPT, Block, SharedInputs
from launcher.model.layers import Rotation

if TYPE_CHECKING:
    from launcher.model.foreign.decode import ForeignCache
    from launcher.model.foreign.decoder import ForeignDecoder


class Cache:
    """Keys and values of one sequence, in room that is taken once.

    Args:
        capacity: the longest sequence in tokens, at most the model's context.
    """

    def __init__(self, model: GPT, capacity: int) -> None:
        config = model.config
        self._model = model
        self._blocks = cast("list[Block]", list(model.blocks))
        self._window = capacity if config.window is None else config.window
        self._positions = torch.arange(capacity, device=model.device)
        self._rotation = model.rotation(self._positions)
        shape = (config.layers, 2, 1, config.kv_head_count, capacity, config.head_size)
        empty = torch.empty(shape, dtype=model.dtype, device=model.device)
        self._of_blocks = [(keys, values) for keys, values in empty]
        self._length = 0

    def extend(self, tokens: Tensor) -> Tensor:
        """The logits [V] behind the last of `tokens` [T], int64, which come after those before.

        The first call takes the whole prompt, each further one a single token.
        """
        begin, self._length = self._length, self._length + len(tokens)
        model, end = self._model, self._length
        x = model.embed(tokens[None], self._positions[begin:end])
        sequences = SharedInputs(x.shape[:2], None, self._turned_by(begin, end))
        mask, window = None, model.config.window
        if begin == 0:
            mask = model.prepare_mask(end, window, tokens.device, None, x.dtype)
        for block, (keys, values) in zip(self._blocks, self._of_blocks, strict=True):
            q, k, v = (part.transpose(1, 2) for part in block.attn.heads(block.ln_1(x), sequences))
            keys[:, :, begin:end] = k
            values[:, :, begin:end] = v
            if begin == 0:
                y = block.attn.attend(q, k, v, mask=mask, window=block.attn.window, dropout=0.0)
            else:
                first = max(0, begin - self._window)
                y = _attend(q, keys[:, :, first:end], values[:, :, first:end])
            x = x + block.attn.output(y).view_as(x)
            x = x + block.mlp(block.ln_2(x))
        return model.logits(x[:, -1:])[0, 0]

    def _turned_by(self, begin: int, end: int) -> Rotation | None:
        if self._rotation is None:
            return None
        cos, sin = self._rotation
        return cos[begin:end], sin[begin:end]


def _attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One token's queries [1, H, 1, head_dim] over all of keys and values [1, kv heads, T,
    head_dim]: those that share a key head are the rows of one attention, and none is repeated."""
    rows = q.reshape(1, keys.size(1), -1, q.size(-1))
    # No view: the kernel chooses the layout of its output, and in fp32 on CUDA it is not that of q.
    return F.scaled_dot_product_attention(rows, keys, values).reshape(q.shape)


@torch.inference_mode()
def continuation(
    model: GPT | ForeignDecoder,
    prompt: Sequence[int],
    choose: Callable[[Tensor], int],
    *,
    most: int,
) -> Iterator[int]:
    """Up to `most` tokens that come after `prompt`, each as `choose` takes it from logits [V].

    The prompt is not empty, and with `most` tokens more it fits into the model's context.
    """
    cache: Cache | ForeignCache
    if isinstance(model, GPT):
        cache = Cache(model, len(prompt) + most - 1)  # the last token is not fed back
    else:
        from launcher.model.foreign.decode import ForeignCache

        cache = ForeignCache(model)
    device = next(model.parameters()).device
    tokens = torch.tensor(prompt, device=device)
    for _ in range(most):
        token = choose(cache.extend(tokens))
        yield token
        tokens = torch.tensor([token], device=device)
