"""Compiled blocks, for the trace: what torch.compile's graphs keep and hold, without any kernel.

Dynamo, AOTAutograd and inductor's partitioner are the real ones (torch 2.13.0's
torch/_inductor/compile_fx.py, which offers a place for the compiler of one graph), so that what is
kept for backward is exact. In that place stands a graph that allocates as inductor's code would:
a kernel of its own, as a matrix product, has its operands and its result in memory; what is
between two of them is fused into kernels that write only what one of those reads, or the graph
returns. Such a kernel writes over a tensor that nobody reads after it. Nothing is fused in another
order than the graph's, but for copies in fp8; partial sums are left out.
"""

import contextlib
import logging
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import getitem
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

_MATRIX_PRODUCTS: Final = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm"})
_FP8: Final = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_VIEWS: Final = frozenset({"reshape", "_unsafe_view"})
_FUSED_NAMESPACES: Final = frozenset({"aten", "prims"})
HearsOfKernel = Callable[[int, Sequence[tuple[int, int]]], None]
"""Called with the bytes that a kernel writes over, and with pairs (bytes it writes, bytes of a
tensor that ends there) for tensors that it would write over if they were as large."""


@contextlib.contextmanager
def compiled(
    blocks: Sequence[nn.Module], tuned: HearsOfKernel, kept_share: float
) -> Iterator[None]:
    """In which each block's forward is compiled when it is called, as `nn.Module.compile` would.

    `kept_share` as for `compile_blocks`. `tuned` hears of each fused kernel, when all it reads and
    writes is there.
    """
    from torch._inductor.compile_fx import compile_fx  # seconds, and only here

    def backend(graph: GraphModule, inputs: Any) -> Any:
        compile_graph: Any = compile_fx
        return compile_graph(graph, inputs, inner_compile=partial(_without_kernels, tuned))

    compile_: Any = partial(torch.compile, backend=backend, dynamic=False)
    forward = compile_(_anew(type(blocks[0]).forward))
    for block in blocks:
        own = vars(block).get("forward")  # of a block of transformers that is recomputed
        if own is None:
            vars(block)["forward"] = types.MethodType(forward, block)
        else:
            vars(block)["forward"] = compile_(_anew(own))
    logging.disable(logging.ERROR)  # of what dynamo falls back from; a run is told, too
    try:
        # A backward's graph that waits for the first backward would be copied there, under the
        # recorder's mode, which constants in it do not survive.
        with torch._functorch.config.patch(
            enable_autograd_cache=False,
            force_non_lazy_backward_lowering=True,
            activation_memory_budget=kept_share,
        ):
            yield
    finally:
        logging.disable(logging.NOTSET)


def _anew(function: Any) -> Any:
    """The same, as dynamo has never seen it: it knows functions by their code, and takes sizes for
    variables that were others before."""
    code, known = function.__code__.replace(), function.__globals__
    return types.FunctionType(code, known, closure=function.__closure__)


def _without_kernels(
    tuned: HearsOfKernel, graph: GraphModule, inputs: Any, **how: Any
) -> Callable[[list[Any]], Any]:
    run = _Graph(graph, tuned)

    def boxed(inputs: list[Any]) -> list[Any]:
        return run(inputs)

    vars(boxed)["_boxed_call"] = True  # as AOTAutograd knows that it may hand over its list
    return boxed


@dataclass(slots=True)
class _Kernel:
    """What runs by itself: reads tensors, and writes new ones."""

    writes: list[Node]
    reads: set[Node]
    fused: bool


class _Graph:
    """Allocates and frees what the compiled code of a graph would."""

    def __init__(self, graph: GraphModule, tuned: HearsOfKernel) -> None:
        nodes: list[Any] = list(graph.graph.nodes)
        self.tuned = tuned
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        self.outputs = [node if isinstance(node, Node) else None for node in nodes[-1].args[0]]
        self.kernels = _kernels(nodes)
        last = dict.fromkeys(self.inputs, 0)
        for number, kernel in enumerate(self.kernels):
            last |= dict.fromkeys([*kernel.reads, *kernel.writes], number)
        for node in self.outputs:
            if node is not None:
                last.pop(_owner(node), None)
        self.ends: list[list[Node]] = [[] for _ in self.kernels]
        for node, number in last.items():
            self.ends[number].append(node)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Return what the graph does; empties `inputs`, as compiled code does."""
        held: dict[Node, Any] = dict(zip(self.inputs, inputs, strict=True))
        inputs.clear()
        for kernel, ends in zip(self.kernels, self.ends, strict=True):
            for node in kernel.writes:
                own = self._of_its_type(node, ends) if kernel.fused else []
                over = next((old for old in own if _numel(old) == _numel(node)), None)
                held[node] = _empty(node) if over is None else held.pop(over)
                if kernel.fused:
                    size_bytes = held[node].nbytes
                    unlike = [] if over else [(size_bytes, held[old].nbytes) for old in own]
                    self.tuned(size_bytes if over else 0, unlike)
            for node in ends:
                held.pop(node, None)
        return [None if n is None else _seen(held[_owner(n)], n) for n in self.outputs]

    def _of_its_type(self, node: Node, ends: list[Node]) -> list[Node]:
        """Return the graph's own tensors of a result's type that end there: a fused kernel writes
        over one that is as large."""
        own = (old for old in ends if old.op == "call_function" and old is not node)
        return [old for old in own if old.meta["val"].dtype == node.meta["val"].dtype]


def _empty(node: Node) -> Tensor:
    value = node.meta["val"]
    if _is_generator_state(value):
        return torch.empty(0)
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)


def _is_generator_state(value: Any) -> bool:
    """Return whether this is a saved generator state: host memory, of a size that only the run
    knows. A graph saves one for each fused attention that it recomputes."""
    return not isinstance(value.numel(), int)


def _numel(node: Node) -> Any:
    return node.meta["val"].numel()


def _seen(held: Any, node: Node) -> Any:
    value = node.meta["val"]
    if node.op == "placeholder" or _is_generator_state(value):
        return held
    return held.as_strided(value.size(), value.stride(), value.storage_offset())


def _root(node: Any) -> Any:
    """The operator that has returned a node, alone or among others."""
    while node.target is getitem:
        node = node.args[0]
    return node


def _owner(node: Any) -> Any:
    """Whose memory a node is in."""
    while _is_view(root := _root(node)):
        node = root.args[0]
    return node


def _is_view(node: Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and (target.is_view or target._opname in _VIEWS)


def _is_fused(node: Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    own = target._opname in _MATRIX_PRODUCTS or "attention" in target._opname
    return target.namespace in _FUSED_NAMESPACES and not own


def _tensors(node: Node) -> list[Node]:
    """List what an operator returns."""
    items = [user for user in node.users if user.target is getitem]
    return [leaf for item in items for leaf in _tensors(item)] if items else [node]


def _kernels(nodes: list[Any]) -> list[_Kernel]:
    """List the kernels of a graph, in its order."""
    calls = [n for n in nodes if n.op == "call_function" and n.target is not getitem]
    calls = [node for node in calls if not _is_view(node)]
    written = {_owner(node) for node in nodes[-1].args[0] if isinstance(node, Node)}
    for node in calls:
        if not _is_fused(node):
            written |= {_owner(read) for read in node.all_input_nodes} | {*_tensors(node)}
    found: list[_Kernel] = []
    sources: dict[Node, set[Node]] = {}
    fused: dict[Node, _Kernel] = {}
    for node in calls:
        reads: set[Node] = set()
        for owner in map(_owner, node.all_input_nodes):
            reads |= {owner} if owner in written or owner.op != "call_function" else sources[owner]
        tensors = _tensors(node)
        sources |= dict.fromkeys(tensors, reads)
        writes = [tensor for tensor in tensors if tensor in written]
        source = fused.get(next(iter(reads))) if len(reads) == 1 else None
        if source is not None and _is_copy_in_fp8(node):
            source.writes += writes
        elif _is_fused(node):
            own = [_Kernel([tensor], reads, fused=True) for tensor in writes]
            fused |= {kernel.writes[0]: kernel for kernel in own}
            found += own
        else:
            found.append(_Kernel(writes, reads, fused=False))
    return _with_last_products(found)


def _is_copy_in_fp8(node: Node) -> bool:
    """Return whether inductor fuses an operator with the cast that it copies."""
    return _opname(node) == "clone" and node.meta["val"].dtype in _FP8


def _with_last_products(kernels: list[_Kernel]) -> list[_Kernel]:
    """Put products in fp8 last of which no other product needs the result: gradients of weights.

    Inductor may run them at any place; their operands, copies in fp8, are held until then.
    """
    readers: defaultdict[Node, list[_Kernel]] = defaultdict(list)
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
