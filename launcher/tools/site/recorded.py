"""Records templates: a trace per structure, of dimensions that are told apart by their factors."""

from dataclasses import replace
from functools import partial
from typing import Final

from launcher.forecast.trace.events import Compute
from launcher.forecast.trace.record import record_trace
from launcher.forecast.trace.template import Size, Template, template_of
from launcher.model.config import ModelConfig
from launcher.parallel.mesh import WHOLE_MODEL
from launcher.strategies.shapes import shapes_of_one_block
from launcher.tools.site.template import dimensions_of

_MICRO_BATCH, SEQ_LEN, _CHUNK_ROWS = 11, 13, 53  # 143 rows are chunks of 53, 53 and 37
_PRIMES: Final = {
    "micro_batch": 11,
    "seq_len": 13,
    "d_model": 29,
    "kv_heads": 7,
    "heads_per_kv": 17,
    "qkv_per_kv": 19,
    "head_size": 23,
    "d_ff": 31,
    "context": 149,
    "rank": 43,
}
_VOCAB: Final = 8 * 67
_PADDED_VOCAB: Final = 5003
"""A prime; padded to a multiple of 64 it is 64 x 79."""
_LARGEST_FACTOR: Final = 5
"""Prime, of what is not a dimension: bytes of an element, how many matrices are one."""


def prime_model(model: ModelConfig, *, padded: bool, windowed: bool) -> ModelConfig:
    """A model of the same structure and few blocks, whose dimensions have no factor in common."""
    p, grouped = _PRIMES, model.kv_head_count < model.heads
    lora = model.lora
    return replace(
        model,
        d_model=p["d_model"],
        kv_heads=p["kv_heads"],
        heads=p["kv_heads"] * (p["heads_per_kv"] if grouped else 1),
        head_dim=2 * p["head_size"],
        d_ff=p["d_ff"],
        context=p["context"],
        window=2 if windowed else None,
        vocab_size=_PADDED_VOCAB if padded else _VOCAB,
        loss_chunk=_CHUNK_ROWS,
        rope_scaling=None,
        lora=None if lora is None else replace(lora, rank=p["rank"]),
    )


def record_template(model: ModelConfig, compute: Compute) -> Template:
    """The template of a structure, from one of `prime_model`."""
    record = partial(record_trace, model, compute, _MICRO_BATCH, SEQ_LEN, WHOLE_MODEL)
    return template_of(record, partial(_product, primes=_primes_of(model)))


def shape_template(model: ModelConfig) -> list[tuple[str, tuple[Size, ...]]]:
    """(name, dimensions) of every parameter of one of `prime_model` with one block."""
    product = partial(_product, primes=_primes_of(model))
    return [
        (name, tuple(product(size) for size in shape)) for name, shape in shapes_of_one_block(model)
    ]


def _primes_of(model: ModelConfig) -> dict[int, tuple[str, int]]:
    """Prime -> whose factor it is, and what else that dimension has."""
    found: dict[int, tuple[str, int]] = {}
    for name, value in dimensions_of(model, micro_batch=_MICRO_BATCH, seq_len=SEQ_LEN).items():
        prime = max(_factors(value), default=1)
        if prime > _LARGEST_FACTOR:
            assert prime not in found, f"{name} and {found[prime][0]} are both {prime}"
            found[prime] = (name, value // prime)
    return found


def _factors(number: int) -> list[int]:
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors


def _product(number: int, primes: dict[int, tuple[str, int]]) -> Size:
    factor, names = 1, []
    for prime in _factors(number):
        factor *= prime
        if prime in primes:
            names.append(primes[prime][0])
    for prime in _factors(number):
        if prime in primes:
            factor, rest = divmod(factor, prime * primes[prime][1])
            assert rest == 0, (number, prime)
    assert max(_factors(factor), default=1) <= _LARGEST_FACTOR, (
        f"{number} bytes are no product of dimensions"
    )
    return Size(factor, tuple(sorted(names)))
