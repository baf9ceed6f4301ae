"""One step of a rehearsed program as it reached the device: what it is made of, in order.

Reads what inside/shardscale_rehearsal/timeline.py and library/timeline.c have written.
"""

import json
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from launcher.forecast.trace.counting import WorkCounter
from launcher.forecast.trace.work import NO_WORK, Work

# kind, operator, stream, a, b: Entry of library/timeline.c
ENTRY: Final = struct.Struct("<iiQQQ")
RECEIVE: Final = 7
"""nccl.c's kind of a message that comes from one other rank."""
_COMPILED: Final = "compiled"
"""Name of a kernel that torch.compile has made."""
_UPDATES: Final = re.compile(r"_foreach_|_fused_|update$")
"""Kernels over many tensors at once, or an optimizer's: at the bandwidth of a copy."""


class Kind(IntEnum):
    """Kind of an entry; as Entry_kind in library/timeline.h."""

    OPERATOR = 0
    KERNEL = 1
    COPY = 2
    COLLECTIVE = 3
    RECORD_EVENT = 4
    WAIT_EVENT = 5
    SYNCHRONIZE = 6
    HOOK = 7


class Entry(NamedTuple):
    """One request of the host; a and b are as library/timeline.h says."""

    kind: Kind
    operator: int
    """Number of the operator that it is of, from 1; 0 for none."""
    stream: int
    a: int
    b: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """An operator with one set of operands."""

    name: str
    work: Work
    type_: str
    """In which it computes: fp32, tf32, bf16 or fp16."""
    ranks: tuple[int, ...] | None
    """Ranks of the group, where it is a message."""
    multiplies: bool = False
    """True for a kernel of Triton with products, which are not counted."""
    masked: bool = False
    """True for FlexAttention with a mask, which is counted as causal."""
    format: str | None = None
    """fp8 or bf16 where it multiplies operands of it, which not all tensor cores can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """A step of one rank."""

    entries: Sequence[Entry]
    operators: Sequence[Operator]
    """The first has number 1."""
    kernels: Mapping[int, float]
    """Kernels, for one call of each operator."""
    left_out: Sequence[str] = ()
    """Phases that lay between this step and the next, and are no part of it."""
    host_bytes: int = 0
    """Bytes of the tensors of operators on the host, which have no seconds."""

    def calls(self, kind: Kind) -> list[Entry]:
        """Return the entries of this kind."""
        return [entry for entry in self.entries if entry.kind == kind]

    @property
    def received(self) -> int:
        """Return the messages that came from one other rank."""
        return [entry.b >> 32 for entry in self.calls(Kind.COLLECTIVE)].count(RECEIVE)

    @property
    def uncounted_products(self) -> int:
        """Return the calls of kernels whose products are not counted."""
        return sum(one.multiplies for one in self._called())

    @property
    def assumed_causal(self) -> int:
        """Return the calls of FlexAttention whose masks are not known."""
        return sum(one.masked for one in self._called())

    def _called(self) -> Iterator[Operator]:
        """Yield the operator of each call."""
        return (self.operators[entry.operator - 1] for entry in self.calls(Kind.OPERATOR))

    @property
    def formats(self) -> frozenset[str]:
        """Return the formats of products, fp8 and bf16."""
        return frozenset(one.format for one in self.operators if one.format is not None)

    @property
    def unknown_kernels(self) -> int:
        """Return the kernels that no operator has launched, whose work is not known."""
        return sum(not entry.operator for entry in self.calls(Kind.KERNEL))


def read_timeline(path: Path) -> Timeline | None:
    """Read `path`.json and `path`.entries; None where there is no complete timeline."""
    try:
        content = json.loads(path.with_name(f"{path.name}.json").read_text(encoding="utf-8"))
        raw = path.with_name(f"{path.name}.entries").read_bytes()
        entries = [Entry(Kind(kind), *rest) for kind, *rest in ENTRY.iter_unpack(raw)]
    except (OSError, ValueError, struct.error):
        return None
    of_operators = Counter((entry.kind, entry.operator) for entry in entries if entry.operator)
    types = ["tf32" if content[key] else "fp32" for key in ("tf32", "tf32_convolutions")]
    operators = content["operators"]
    return Timeline(
        entries=entries,
        operators=[_operator(one, types["convolution" in one["name"]]) for one in operators],
        kernels={
            number: of_operators[Kind.KERNEL, number] / times
            for (kind, number), times in of_operators.items()
            if kind == Kind.OPERATOR
        },
        left_out=content.get("left_out", ()),
        host_bytes=content.get("host_bytes", 0),
    )


def _operator(described: Mapping[str, Any], fp32: str) -> Operator:
    name: str = described["name"]
    if (shape := described.get("attention")) is not None:
        return Operator(
            name=name,
            work=replace(_moving(described["bytes"], name), attention_flops=_flex_flops(shape)),
            type_=_type([shape], fp32),
            ranks=None,
            masked=shape["masked"],
        )
    if "bytes" in described:
        return Operator(
            name=name,
            work=_moving(described["bytes"], name),
            type_=fp32,
            ranks=None,
            multiplies=bool(described.get("multiplies")),
        )
    tensors = list(_tensors([described.get("args"), described.get("kwargs")]))
    ranks, work = described.get("ranks"), _work(described, tensors)
    multiplies = bool(work.products or work.attention_flops)
    return Operator(
        name=name,
        work=work,
        type_=_type(tensors, fp32),
        ranks=None if ranks is None else tuple(ranks),
        format=_format(tensors) if multiplies else None,
    )


def _work(described: Mapping[str, Any], tensors: Sequence[Any]) -> Work:
    """Count an operator as the plan's trace does, from its operands' shapes alone."""
    known = _known(described["name"])
    if known is not None and "out" in described:
        counter = WorkCounter()
        args, kwargs, out = (_as_tensors(described[key]) for key in ("args", "kwargs", "out"))
        try:
            counter.operator(known, args, kwargs, out)
            work = counter.here.total(lambda size: size)
            return _as_copies(work) if torch.Tag.pointwise in known.tags else work
        except (ValueError, LookupError, TypeError, RuntimeError, AttributeError):
            pass  # of operands that it does not expect: by its bytes
    operands = (*tensors, *_tensors([described.get("out")]))
    return _moving([_as_tensors(one).nbytes for one in operands])


def _as_copies(work: Work) -> Work:
    """Return work that only goes over elements, which is as fast as a copy. The plan's rate of
    elementwise work is an average over a step, norms and sums among it."""
    moved = work.elementwise_bytes + work.copied_bytes
    return replace(work, elementwise_bytes=0.0, copied_bytes=moved)


def _flex_flops(shape: Mapping[str, Any]) -> float:
    """Return FLOPs of FlexAttention: two products in forward and five in backward, of each half
    where there is a mask, as the causal one hides."""
    products = 5 if shape["backward"] else 2
    flops: float = 2.0 * products * shape["sequences"] * shape["rows"]
    flops *= shape["columns"] * shape["width"]
    return flops / 2 if shape["masked"] else flops


def _moving(sizes: Sequence[int], name: str = "") -> Work:
    moved_bytes, found = float(sum(sizes)), replace(NO_WORK, operators=1.0, kernels=1.0)
    if name == _COMPILED:
        return replace(found, fused_bytes=moved_bytes)
    if _UPDATES.search(name):
        return replace(found, copied_bytes=moved_bytes)
    return replace(found, elementwise_bytes=moved_bytes)


@cache
def _known(name: str) -> Any:
    """Return torch's operator of this name ("aten::mm.default"); None where it has none."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    try:
        found: Any = getattr(getattr(torch.ops, namespace), packet)
        return getattr(found, overload or "default")
    except (AttributeError, RuntimeError):
        return None


def _type(tensors: Sequence[Any], fp32: str) -> str:
    types = {one["dtype"] for one in tensors}
    if "bfloat16" in types:
        return "bf16"
    if "float16" in types:
        return "fp16"
    narrow = {name for name in types if name.startswith(("float8", "int8", "uint8"))}
    return "bf16" if narrow and "float32" not in types else fp32


def _format(tensors: Sequence[Any]) -> str | None:
    types = {one["dtype"] for one in tensors}
    if any(name.startswith("float8") for name in types):
        return "fp8"
    return "bf16" if "bfloat16" in types else None


def _tensors(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        if "dtype" in tree and "shape" in tree:
            yield tree
        else:
            yield from _tensors(list(tree.values()))
    elif isinstance(tree, list):
        for one in tree:
            yield from _tensors(one)


def _as_tensors(tree: Any) -> Any:
    """The same values with tensors without memory in the place of their descriptions."""
    if isinstance(tree, dict) and "dtype" in tree and "shape" in tree:
        # The program's torch may have types that this one lacks: they count as one byte per
        # element.
        dtype = getattr(torch, tree["dtype"], torch.uint8)
        return torch.empty(tree["shape"], dtype=dtype, device="meta")
    if isinstance(tree, dict):
        return {key: _as_tensors(one) for key, one in tree.items()}
    if isinstance(tree, list):
        return [_as_tensors(one) for one in tree]
    return tree
