"""What a micro-batch costs a rank in arithmetic, memory traffic and operators."""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from itertools import takewhile

from launcher.config.resolve import Resolved
from launcher.forecast.moved_bytes import (
    block_bytes,
    cast_bytes,
    dequantized_bytes,
    fused_loss,
    loss_bytes,
    mlp_cast_bytes,
    score_bytes,
    tile_bytes,
    weight_cast_bytes,
)
from launcher.forecast.operators import (
    block_operators,
    mlp_tiles,
    outer_operators,
    quantized_operators,
    rebuilt_operators,
    tile_operators,
    tiles_operators,
    tokens_of,
)
from launcher.model.attention import fuses_scores, kernel_for
from launcher.model.checkpointing import LINEARS, kept_products
from launcher.model.config import ModelConfig
from launcher.model.loss import automatic_chunk_rows
from launcher.model.products import linear_products


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one pass of one rank over one micro-batch takes."""

    matmul_flops: float
    attention_flops: float
    elementwise_bytes: float
    copied_bytes: float
    operators: float

    def plus(self, other: "Work", *, times: float) -> "Work":
        """This and some of another."""
        fields = [field.name for field in dataclasses.fields(self)]
        return Work(**{n: getattr(self, n) + times * getattr(other, n) for n in fields})


def forward_work(resolved: Resolved) -> Work:
    """One micro-batch forward.

    FLOPs: 2 for each weight of a matmul, adapters' too, attention counted apart; a fused kernel
    skips the masked half of the T x T scores. A chunked loss computes its gradients here
    (model/loss.py).
    """
    model, rows = resolved.own_model, tokens_of(resolved)
    documents = resolved.config.data.document_attention
    attention = attention_flops(model, resolved.seq_len, documents=documents)
    head = 2 * model.vocab_size * model.d_model
    matmul = 2 * (model.matmul_parameter_count + _adapters(model))
    if _chunked(resolved):
        matmul += _gradients(model) * head
    return Work(
        matmul_flops=rows * matmul,
        attention_flops=rows * attention,
        elementwise_bytes=rows * (block_bytes(resolved) + loss_bytes(resolved)),
        copied_bytes=rows * score_bytes(resolved)[0]
        + weight_cast_bytes(resolved)
        + dequantized_bytes(resolved)
        + max(0, mlp_tiles(resolved) - 1) * mlp_cast_bytes(resolved),
        operators=model.layers
        * (block_operators(resolved).forward + tiles_operators(resolved).forward)
        + outer_operators(resolved).forward,
    )


def backward_work(resolved: Resolved) -> Work:
    """One micro-batch backward: twice the matmuls of the forward, or once those with frozen
    weights, and what is recomputed.

    A fused attention kernel recomputes its scores: 5 matmuls for the forward's 2
    (FlashAttention-2, arXiv:2307.08691, section 3.1.2).
    """
    model, rows = resolved.own_model, tokens_of(resolved)
    documents = resolved.config.data.document_attention
    forward = attention_flops(model, resolved.seq_len, documents=documents)
    attention = (2.5 if fuses_scores(model) else 2.0) * forward
    head = 2 * model.vocab_size * model.d_model
    blocks = 2 * model.matmul_parameter_count - head
    matmul = _gradients(model) * (blocks + (0 if _chunked(resolved) else head))
    matmul += 2 * 2 * _adapters(model)
    each = block_operators(resolved)
    operators = model.layers * each.backward + outer_operators(resolved).backward
    copied = weight_cast_bytes(resolved) + dequantized_bytes(resolved)
    copied += rows * score_bytes(resolved)[1]
    if tiles := mlp_tiles(resolved):
        operators += model.layers * tiles_operators(resolved).backward
        copied += (2 * tiles - 1) * mlp_cast_bytes(resolved)
    work = Work(
        matmul_flops=rows * matmul,
        attention_flops=rows * attention,
        elementwise_bytes=rows * 2 * block_bytes(resolved),
        copied_bytes=copied,
        operators=operators,
    )
    for word, number in Counter(model.checkpointing.blocks(model.layers)).items():
        work = work.plus(recomputed_work(resolved, word), times=number / model.layers)
    return work


def recomputed_work(resolved: Resolved, word: str) -> Work:
    """What checkpointing adds to a micro-batch's backward where all blocks do what `word` says.

    Full checkpointing recomputes the blocks, wherever their inputs have waited; others what is
    between the products that they keep, and those that they do not (model/recompute.py). Tiles of
    the MLP are recomputed one by one, inside recomputed blocks once more but for the last.
    """
    model, each, tile = resolved.own_model, block_operators(resolved), tile_operators(resolved)
    tiles, whole = mlp_tiles(resolved), word in ("full", "offload")
    matmul = attention = elementwise = copied = operators = 0.0
    if word != "none":
        elementwise += block_bytes(resolved)
        operators += model.layers * each.recomputed
        weights, trained, scores = _not_kept(resolved, word)
        matmul += 2 * weights
        attention += scores
        copied += tokens_of(resolved) * score_bytes(resolved)[0] if scores else 0
        copied += cast_bytes(resolved, trained)
        if whole:
            copied += dequantized_bytes(resolved)
            operators += model.layers * quantized_operators(model).forward
    elif not tiles:
        operators += model.layers * rebuilt_operators(model)
    if tiles:
        # Recomputing a block runs its tiles, but for the last.
        share = (tiles - 1) / tiles if whole else 1.0
        matmul += share * 2 * _recomputed_in_tiles(model)
        elementwise += share * tile_bytes(resolved) if whole or word == "none" else 0
        if whole:
            operators += model.layers * (tiles - 1) * tile.forward
            copied += (tiles - 2) * mlp_cast_bytes(resolved)
        elif word == "none":
            operators += model.layers * tile.recomputed
    rows = tokens_of(resolved)
    return Work(
        matmul_flops=rows * matmul,
        attention_flops=rows * attention,
        elementwise_bytes=rows * elementwise,
        copied_bytes=copied,
        operators=operators,
    )


def product_flops(resolved: Resolved) -> dict[str, float]:
    """FLOPs of a block's products that can be kept, by name, with what is kept beside them; per
    token."""
    model = resolved.own_model
    flops = dict.fromkeys(LINEARS, 0.0)
    for product in linear_products(model):
        if product.kept_with in flops:
            flops[product.kept_with] += 2 * product.weights
    documents = resolved.config.data.document_attention
    scores = attention_flops(model, resolved.seq_len, documents=documents)
    return flops | {"attention": scores / model.layers}


def _not_kept(resolved: Resolved, word: str) -> tuple[float, float, float]:
    """Weights of the matmuls, those of them that have gradients, and FLOPs of attention per token,
    that blocks run once more."""
    model = resolved.own_model
    scores = model.layers * product_flops(resolved)["attention"]
    again = linear_products(model)
    if word not in ("full", "offload"):
        kept = kept_products(word)
        scores = 0.0 if "attention" in kept else scores
        if again[-1].kept_with is None:  # recomputation ends before it
            again.pop()
        if model.mlp_tile:  # which recompute theirs themselves
            again = list(takewhile(lambda product: product.kept_with != "mlp-up", again))
        again = [product for product in again if product.kept_with not in kept]
    trained = [p.weights for p in again if p.of_adapter or model.lora is None]
    weights = sum(product.weights for product in again)
    return model.layers * weights, model.layers * sum(trained), scores


def attention_flops(model: ModelConfig, seq_len: int, *, documents: bool = False) -> float:
    """Forward, per token, of all layers: Q K^T and A V over T positions, all heads wide, 2 FLOPs
    each, less what the kernel skips because the mask hides it."""
    share = _visible_share(model, seq_len, documents=documents)
    return 4 * model.layers * model.attention_dim * seq_len * share


def _recomputed_in_tiles(model: ModelConfig) -> int:
    """Weights of the matmuls that a tile's backward runs again: it asks for the last one's output
    only where dropout comes after."""
    first, last = (inner * outer for inner, outer in model.linear_shapes[2:])
    return model.layers * (first + (last if model.dropout else 0))


def _visible_share(model: ModelConfig, seq_len: int, *, documents: bool) -> float:
    """Of the T x T scores, those that the kernel computes, and no less for short documents, which
    nobody knows before the data is read."""
    kernel = kernel_for(model)
    if not fuses_scores(model) or (documents and not kernel.skips_window):
        return 1.0
    if model.window is None or model.window >= seq_len:
        return 0.5
    return model.window / seq_len if kernel.skips_window else 1.0


def _chunked(resolved: Resolved) -> bool:
    model, rows = resolved.own_model, tokens_of(resolved)
    if model.loss_chunk is not None:
        return model.loss_chunk > 0
    fused = fused_loss(resolved)
    return automatic_chunk_rows(rows, model.vocab_size, model.d_model, fused=fused) > 0


def _adapters(model: ModelConfig) -> int:
    """Weights of all adapters' matmuls."""
    return model.layers * model.block_adapter_count


def _gradients(model: ModelConfig) -> int:
    """Matmuls of a backward for one of the forward with the model's own weights."""
    return 2 if model.lora is None else 1
