"""Kernels of a compiled graph: what is fused, and the tensors that each reads and writes."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.fx import Node

from launcher.forecast.trace.operators import EMPTY

_MATRIX_PRODUCTS: Final = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm"})
_FP8: Final = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_VIEWS: Final = frozenset({"reshape", "_unsafe_view"})
_OVER_MANY: Final = "_foreach_"
"""Kernels of their own, over lists of tensors."""
_FUSED_NAMESPACES: Final = frozenset({"aten", "prims"})


@dataclass(slots=True)
class Kernel:
    """A launch on the device: reads tensors, and writes new ones."""

    writes: list[Node]
    seen: set[Node]
    """Operands: whole tensors, and views of them."""
    operator: Node | None
    """None for fused ones."""

    @property
    def fused(self) -> bool:
        return self.operator is None

    @property
    def reads(self) -> set[Node]:
        """Return the tensors that it reads."""
        return {owner_of(node) for node in self.seen}


def is_generator_state(value: Any) -> bool:
    """Return whether this is a saved generator state: host memory, of a size that only the run
    knows. A graph saves one for each fused attention that it recomputes."""
    return not isinstance(value.numel(), int)


def numel(node: Node) -> Any:
    """Count the elements of a node's tensor."""
    return node.meta["val"].numel()


def _root(node: Any) -> Any:
    """Return the operator that has returned a node, alone or among others."""
    while node.target is getitem:
        node = node.args[0]
    return node


def owner_of(node: Any) -> Any:
    """Return the node whose memory a node is in."""
    while _is_view(root := _root(node)):
        node = root.args[0]
    return node


def _is_view(node: Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and (target.is_view or target._opname in _VIEWS)


def _is_empty(node: Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and target._opname in EMPTY


def _operands(node: Node) -> list[Node]:
    """List what a node reads, not memory that it is the first to write to."""
    return [read for read in node.all_input_nodes if not _is_empty(owner_of(read))]


def _is_fused(node: Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    own = target._opname in _MATRIX_PRODUCTS or "attention" in target._opname
    own = own or target._opname.startswith(_OVER_MANY)
    return target.namespace in _FUSED_NAMESPACES and not own


def call_of(node: Node) -> list[Any]:
    """Return an operator and its arguments, nothing for a call of something else.

    Where it draws random numbers, another function is called with it: its state is left out.
    """
    call = [node.target, *node.args]
    return call[next((n for n, p in enumerate(call) if isinstance(p, OpOverload)), len(call)) :]


def _tensors(node: Node) -> list[Node]:
    """List what an operator returns."""
    items = [user for user in node.users if user.target is getitem]
    return [leaf for item in items for leaf in _tensors(item)] if items else [node]


def kernels_of(nodes: list[Any]) -> list[Kernel]:
    """List the kernels of a graph, in its order."""
    calls = [n for n in nodes if n.op == "call_function" and n.target is not getitem]
    calls = [node for node in calls if not _is_view(node) and not _is_empty(node)]
    # in memory: results of the graph, and what kernels that are not fused read and return
    written = {owner_of(node) for node in nodes[-1].args[0] if isinstance(node, Node)}
    for node in calls:
        if not _is_fused(node):
            written |= {owner_of(read) for read in _operands(node)} | {*_tensors(node)}
    found: list[Kernel] = []
    # fused node -> the tensors in memory that it is computed from, through other fused nodes
    sources: dict[Node, set[Node]] = {}
    fused: dict[Node, Kernel] = {}
    for node in calls:
        seen: set[Node] = set()
        for read in _operands(node):
            owner = owner_of(read)
            seen |= {read} if owner in written or owner.op != "call_function" else sources[owner]
        tensors = _tensors(node)
        sources |= dict.fromkeys(tensors, seen)
        writes = [tensor for tensor in tensors if tensor in written]
        reads = {owner_of(read) for read in seen}
        source = fused.get(next(iter(reads))) if len(reads) == 1 else None
        if source is not None and _is_copy_in_fp8(node):
            source.writes += writes
        elif _is_fused(node):
            own = [Kernel([tensor], seen, None) for tensor in writes]
            fused |= {kernel.writes[0]: kernel for kernel in own}
            found += own
        else:
            found.append(Kernel(writes, seen, node))
    return _with_last_products(found)


def launched(kernels: Iterable[Kernel]) -> list[list[Kernel]]:
    """Put fused kernels together that follow each other and write as many elements."""
    found: list[list[Kernel]] = []
    for kernel in kernels:
        last = found[-1][0] if found else kernel  # itself where none came before
        fused = last is not kernel and last.fused and kernel.fused
        if fused and numel(last.writes[0]) == numel(kernel.writes[0]):
            found[-1].append(kernel)
        else:
            found.append([kernel])
    return found


def moved_bytes(kernels: Sequence[Kernel]) -> list[int]:
    """List the bytes that kernels read and write together, each tensor once."""
    writes = [node for kernel in kernels for node in kernel.writes]
    parts: dict[Node, dict[Any, int]] = defaultdict(dict)
    for node in {node for kernel in kernels for node in kernel.seen}:
        value, owner = node.meta["val"], owner_of(node)
        if owner not in writes and not is_generator_state(value):
            # views of the same range of a tensor are read once
            parts[owner][value.storage_offset(), value.numel()] = value.nbytes
    read = [min(o.meta["val"].nbytes, sum(sizes.values())) for o, sizes in parts.items()]
    return [*(node.meta["val"].nbytes for node in writes), *read]


def _is_copy_in_fp8(node: Node) -> bool:
    """Return whether inductor fuses an operator with the cast that it copies."""
    return _opname(node) == "clone" and node.meta["val"].dtype in _FP8


def _with_last_products(kernels: list[Kernel]) -> list[Kernel]:
    """Put products in fp8 last of which no other product needs the result: gradients of weights.

    Inductor may run them at any place; their operands, copies in fp8, are held until then.
    """
    readers: defaultdict[Node, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        for node in kernel.reads:
            readers[node].append(kernel)
    needed: set[int] = set()  # by a product or attention behind it
    for kernel in reversed(kernels):
        after = [reader for node in kernel.writes for reader in readers[node]]
        if any(not reader.fused or id(reader) in needed for reader in after):
            needed.add(id(kernel))
    late: set[int] = set()
    for kernel in kernels:
        begins = not kernel.fused and _opname(kernel.writes[0]) == "_scaled_mm"
        if begins and id(kernel) not in needed:
            late |= {id(kernel), *(id(r) for node in kernel.writes for r in readers[node])}
    return sorted(kernels, key=lambda kernel: id(kernel) in late)


def _opname(node: Node) -> str:
    return str(getattr(_root(node).target, "_opname", ""))
