"""Which dimensions the calculator's traces are products of, and how they are kept.

Recorded once with dimensions that are distinct primes, a trace serves for all models of the same
structure (`launcher.forecast.trace.template`). No torch is needed for that, so that a browser can
do it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from launcher.forecast.trace.events import (
    AllocationId,
    Compute,
    Lifetime,
    Module,
    Part,
    Place,
    Trace,
    Tuned,
)
from launcher.forecast.trace.template import (
    CHUNKS,
    Dimensions,
    PartialSums,
    Size,
    Template,
    loss_chunks,
)
from launcher.forecast.trace.work import Product, SegmentWork
from launcher.model.config import ModelConfig

ALIGNED_VOCAB: Final = 8
PADDED_VOCAB: Final = 64
"""Of rows that are no multiple of the one, a head's weight in bf16 is padded to one of the other:
`padded_size` in launcher/model/loss.py."""

PARTS: Final[tuple[Part, ...]] = (
    *("embed", "block", "head"),
    *("head_backward", "block_backward", "embed_backward"),
)


def dimensions_of(model: ModelConfig, *, micro_batch: int, seq_len: int) -> Dimensions:
    """The dimensions that sizes are products of."""
    chunk, last, chunks = loss_chunks(model, micro_batch * seq_len, None)
    padded = -(-model.vocab_size // PADDED_VOCAB) * PADDED_VOCAB
    groups = model.heads // model.kv_head_count
    return {
        "micro_batch": micro_batch,
        "seq_len": seq_len,
        "d_model": model.d_model,
        "kv_heads": model.kv_head_count,
        "heads_per_kv": groups,
        "qkv_per_kv": groups + 2,
        "head_size": model.head_size,
        "d_ff": model.ffn_dim,
        "vocab": model.vocab_size,
        "padded_vocab": padded,
        "context": model.context,
        "rank": 0 if model.lora is None else model.lora.rank,
        "chunk": chunk,
        "last_chunk": last,
        "chunks": chunks,
    }


def kind_of(model: ModelConfig) -> str:
    """Return what a model's parameters depend on beside its dimensions."""
    flags = {
        "rope": model.position == "rope",
        "rms": model.norm == "rms",
        "qk_norm": model.qk_norm,
        "grouped": model.kv_head_count < model.heads,
        "tied": model.tied,
        "qkv_bias": model.has_bias("qkv"),
        "attention_bias": model.has_bias("proj"),
        "mlp_bias": model.has_bias("mlp"),
    }
    adapters = "" if model.lora is None else "lora=" + ",".join(model.lora.targets)
    return " ".join([model.activation, adapters, *(name for name, has in flags.items() if has)])


def structure_of(model: ModelConfig, compute: Compute, *, seq_len: int) -> str:
    """Return what a trace depends on beside its dimensions: with the same, it is one template.

    Args:
        model: with as few blocks as are traced.
    """
    low = compute.autocast or compute.params_dtype.itemsize == 2
    flags = {
        "padded": low and model.vocab_size % ALIGNED_VOCAB != 0,
        "windowed": model.window is not None and model.window < seq_len - 1,
        "stage3": compute.stage3,
        "autocast": compute.autocast,
        "low": compute.params_dtype.itemsize == 2,
        "frozen_low": compute.frozen_dtype.itemsize == 2 and model.lora is not None,
    }
    words = [kind_of(model), model.attention, str(model.layers), model.activation_checkpointing]
    return " ".join([*words, *(name for name, has in flags.items() if has)])


def as_json(template: Template) -> dict[str, Any]:
    """Plain lists: of what comes often, a list for each field, which compresses to half."""
    trace = template.trace
    lifetimes = [
        (*_numbers(each.allocation), each.size_bytes, int(each.saved), each.at, *_end(each))
        for each in trace.lifetimes
    ]
    gradients = [
        (name, *_numbers(allocation), PARTS.index(where.part), where.layer, at)
        for name, allocation, where, at in trace.gradients
    ]
    marks = [
        (mark.name, int(mark.entering), int(mark.forward), PARTS.index(where.part), where.layer, at)
        for mark, where, at in trace.marks
        if isinstance(mark, Module)
    ]
    works = [
        (
            *(PARTS.index(place.part), place.layer, repeat),
            [[*product, times] for product, times in work.products.items()],
            *([*counter.items()] for counter in _counters(work)),
            *(work.operators, work.kernels),
        )
        for (place, repeat), work in trace.works.items()
    ]
    return {
        "layers": trace.layers,
        "sizes": [_size_as_json(size) for size in template.sizes],
        "lives": _columns(lifetimes),
        "gradients": _columns(gradients),
        "marks": _columns(marks),
        "works": works,
    }


def from_json(found: Mapping[str, Any]) -> Template:
    """Read what `as_json` wrote."""

    def place(part: int, layer: int) -> Place:
        return Place(PARTS[part], layer)

    lifetimes = [
        Lifetime(
            (place(part, layer), number),
            size,
            bool(saved),
            at,
            None if end == _OUTLIVES else (place(end, its), then),
        )
        for part, layer, number, size, saved, at, end, its, then in zip(
            *found["lives"], strict=True
        )
    ]
    gradients = [
        (name, (place(part, layer), number), place(where, its), at)
        for name, part, layer, number, where, its, at in zip(*found["gradients"], strict=True)
    ]
    marks: list[tuple[Module | Tuned, Place, int]] = [
        (Module(name, bool(entering), bool(forward)), place(part, layer), at)
        for name, entering, forward, part, layer, at in zip(*found["marks"], strict=True)
    ]
    sizes = tuple(_size_from_json(size) for size in found["sizes"])
    works = {
        (place(part, layer), repeat): SegmentWork(
            Counter({Product(*product): times for *product, times in products}),
            Counter(dict(attention)),
            Counter(dict(elementwise)),
            Counter(dict(copied)),
            operators=operators,
            kernels=kernels,
        )
        for part, layer, repeat, products, attention, elementwise, copied, operators, kernels in (
            found["works"]
        )
    }
    return Template(Trace(found["layers"], lifetimes, gradients, marks, works, CHUNKS), sizes)


def _counters(work: SegmentWork) -> tuple[Counter[int], ...]:
    return work.attention_flops, work.elementwise_bytes, work.copied_bytes


_OUTLIVES: Final = -1
"""In the place of a part: a storage that is there when the micro-batch is over."""


def _numbers(allocation: AllocationId) -> tuple[int, int, int]:
    place, number = allocation
    return PARTS.index(place.part), place.layer, number


def _end(lifetime: Lifetime) -> tuple[int, int, int]:
    return (_OUTLIVES, 0, 0) if lifetime.end is None else _numbers(lifetime.end)


def _columns(rows: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]


def _size_as_json(size: Size | PartialSums) -> list[Any]:
    if isinstance(size, Size):
        return [size.factor, *size.names]
    return [_size_as_json(size.rows), _size_as_json(size.columns), size.element_bytes]


def _size_from_json(found: list[Any]) -> Size | PartialSums:
    if isinstance(found[0], int):
        return Size(found[0], tuple(found[1:]))
    rows, columns, element_bytes = found
    return PartialSums(
        Size(rows[0], tuple(rows[1:])), Size(columns[0], tuple(columns[1:])), element_bytes
    )
