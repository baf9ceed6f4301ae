"""Work of the segments of a micro-batch: products, attention, moved bytes and operators."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

Repeat = Literal["once", "first_chunk", "chunk", "last_chunk"]
"""Names of the loss's chunks; `chunk` stands for all between the first and the last."""
_SUMMED: Final = ("attention_flops", "elementwise_bytes", "copied_bytes", "fused_bytes")


class Product(NamedTuple):
    """A product of matrices [rows, inner] x [inner, columns], `batch` times side by side; in a
    template its dimensions are indices of sizes."""

    batch: int
    rows: int
    columns: int
    inner: int
    element_bytes: int
    """Element size of its result."""
    fp8: bool = False

    @property
    def flops(self) -> int:
        """Two for each pair of elements that meet."""
        return 2 * self.batch * self.rows * self.columns * self.inner


@dataclass(slots=True)
class SegmentWork:
    """Work of a segment of a micro-batch; counters hold how often each number comes."""

    products: Counter[Product] = field(default_factory=Counter)
    attention_flops: Counter[int] = field(default_factory=Counter)
    elementwise_bytes: Counter[int] = field(default_factory=Counter)
    """Read and written by operators that compute."""
    copied_bytes: Counter[int] = field(default_factory=Counter)
    """The same of casts, copies and fills."""
    fused_bytes: Counter[int] = field(default_factory=Counter)
    """The same of kernels that a compiler has fused."""
    operators: int = 0
    """Dispatched, views included; of compiled blocks their kernels alone."""
    kernels: int = 0
    """Those that run something on the device."""
    sent: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Collectives of ranks that share matrices: kind, and bytes of the whole tensor."""

    def mapped(self, number: Callable[[int], int]) -> "SegmentWork":
        """The same with `number(size)` in the place of each size."""
        found = SegmentWork(operators=self.operators, kernels=self.kernels)
        for product, times in self.products.items():
            sized = product._replace(
                batch=number(product.batch),
                rows=number(product.rows),
                columns=number(product.columns),
                inner=number(product.inner),
            )
            found.products[sized] += times
        for name in _SUMMED:
            counter = getattr(found, name)
            for size, times in getattr(self, name).items():
                counter[number(size)] += times
        for (kind, size), times in self.sent.items():
            found.sent[kind, number(size)] += times
        return found

    def total(self, number: Callable[[int], int]) -> "Work":
        """Its sum, with `number(size)` in the place of each size."""
        found = self.mapped(number)
        sums = {
            name: sum(times * size for size, times in getattr(found, name).items())
            for name in _SUMMED
        }
        sent: dict[str, Sent] = {}
        for (kind, size), times in found.sent.items():
            sent[kind] = sent.get(kind, Sent(0.0, 0.0)).plus(Sent(size, 1.0), times)
        return Work(
            products=found.products,
            **sums,
            operators=found.operators,
            kernels=found.kernels,
            sent=sent,
        )


class Sent(NamedTuple):
    """Collectives of one kind."""

    size_bytes: float
    """Sum of the whole tensors' sizes."""
    pieces: float

    def plus(self, other: "Sent", times: float) -> "Sent":
        """These and some others."""
        return Sent(self.size_bytes + times * other.size_bytes, self.pieces + times * other.pieces)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Work of a pass of one rank over one micro-batch, or of a part of it."""

    products: Mapping[Product, float]
    """Product -> times that it is computed."""
    attention_flops: float
    """FLOPs of fused kernels, less what they skip because the mask hides it."""
    elementwise_bytes: float
    copied_bytes: float
    fused_bytes: float
    operators: float
    kernels: float
    sent: Mapping[str, Sent] = field(default_factory=dict)
    """By kind, among ranks that share matrices."""

    @property
    def matmul_flops(self) -> float:
        """Return the floating-point operations of all products."""
        return sum(times * product.flops for product, times in self.products.items())

    def plus(self, other: "Work", *, times: float = 1.0) -> "Work":
        """This and some of another."""
        products = dict(self.products)
        for product, count in other.products.items():
            products[product] = products.get(product, 0.0) + times * count
        sent = dict(self.sent)
        for kind, more in other.sent.items():
            sent[kind] = sent.get(kind, Sent(0.0, 0.0)).plus(more, times)
        return Work(
            products=products,
            attention_flops=self.attention_flops + times * other.attention_flops,
            elementwise_bytes=self.elementwise_bytes + times * other.elementwise_bytes,
            copied_bytes=self.copied_bytes + times * other.copied_bytes,
            fused_bytes=self.fused_bytes + times * other.fused_bytes,
            operators=self.operators + times * other.operators,
            kernels=self.kernels + times * other.kernels,
            sent=sent,
        )


NO_WORK: Final = Work(
    products={},
    attention_flops=0.0,
    elementwise_bytes=0.0,
    copied_bytes=0.0,
    fused_bytes=0.0,
    operators=0.0,
    kernels=0.0,
)
