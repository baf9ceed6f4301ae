"""Work of the segments of a micro-batch: products, attention, moved bytes and operators."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeVar

Repeat = Literal["once", "first_chunk", "chunk", "last_chunk"]
"""Names of the loss's chunks; `chunk` stands for all between the first and the last."""
_Key = TypeVar("_Key")
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
        return Work(
            products=found.products,
            **sums,
            operators=found.operators,
            kernels=found.kernels,
            sent=found.sent,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Work of a pass of one rank over one micro-batch, or of a part of it."""

    products: Mapping[Product, float] = field(default_factory=dict)
    """Product -> times that it is computed."""
    attention_flops: float = 0.0
    """FLOPs of fused kernels, less what they skip because the mask hides it."""
    elementwise_bytes: float = 0.0
    copied_bytes: float = 0.0
    fused_bytes: float = 0.0
    operators: float = 0.0
    kernels: float = 0.0
    sent: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """Kind and bytes of the whole tensor -> times that ranks which share matrices send it."""

    @property
    def matmul_flops(self) -> float:
        """Return the floating-point operations of all products."""
        return sum(times * product.flops for product, times in self.products.items())

    def plus(self, other: "Work", *, times: float = 1.0) -> "Work":
        """This and some of another."""
        return Work(
            products=_added(self.products, other.products, times),
            sent=_added(self.sent, other.sent, times),
            **{
                name: getattr(self, name) + times * getattr(other, name)
                for name in (*_SUMMED, "operators", "kernels")
            },
        )


NO_WORK: Final = Work()


def _added(
    counts: Mapping[_Key, float], others: Mapping[_Key, float], times: float
) -> dict[_Key, float]:
    found = dict(counts)
    for key, count in others.items():
        found[key] = found.get(key, 0.0) + times * count
    return found
