"""Compiled blocks, for the trace: what torch.compile's graphs keep, hold and move, and no kernel.

Dynamo, AOTAutograd and inductor's partitioner are the real ones (torch 2.13.0's
torch/_inductor/compile_fx.py, which offers a place for the compiler of one graph), so that what is
kept for backward is exact. In that place stands a graph that allocates as inductor's code would:
a kernel of its own, as a matrix product, has its operands and its result in memory; what is
between two of them is fused into kernels that write only what one of those reads, or the graph
returns. Such a kernel writes over a tensor that has no later reader, and each takes the memory of
one that ended before. Nothing is fused in another order than the graph's, but for copies in fp8;
partial sums are left out.

Work is counted kernel by kernel, too. A fused one moves what it reads and writes; those that follow
each other and write as many elements are one, which reads what they share once.
"""

import contextlib
import itertools
import logging
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from launcher.forecast.trace.counting import WorkCounter, paused
from launcher.forecast.trace.fusion import (
    Kernel,
    call_of,
    is_generator_state,
    kernels_of,
    launched,
    moved_bytes,
    numel,
    owner_of,
)


class HearsOfKernels(Protocol):
    """Hears of each kernel as it runs."""

    work: WorkCounter

    def take(self, func: Any, args: Sequence[Any]) -> None:
        """An operator runs, and takes memory for as long as that."""

    def tuned(self, copied_bytes: int, unlike: Sequence[tuple[int, int]]) -> None:
        """A fused kernel has all that it reads and writes.

        Args:
            copied_bytes: what it writes over.
            unlike: pairs (bytes it writes, bytes of a tensor that ends there) for tensors that it
                would write over if they were as large.
        """


@contextlib.contextmanager
def compiled(
    blocks: Sequence[nn.Module], recorder: HearsOfKernels, kept_share: float
) -> Iterator[None]:
    """In which each block's forward is compiled when it is called, as `nn.Module.compile` would.

    `kept_share` as for `compile_blocks`.
    """
    from torch._inductor.compile_fx import compile_fx  # seconds, and only here

    def backend(graph: GraphModule, inputs: Any) -> Any:
        compile_graph: Any = compile_fx
        return compile_graph(graph, inputs, inner_compile=partial(_without_kernels, recorder))

    compile_: Any = partial(torch.compile, backend=backend, dynamic=False)
    # one function for all blocks, so that dynamo compiles it once
    forward = compile_(_anew(type(blocks[0]).forward))
    for block in blocks:
        own = vars(block).get("forward")  # of a block of transformers that is recomputed
        if own is None:
            vars(block)["forward"] = types.MethodType(forward, block)
        else:
            vars(block)["forward"] = compile_(_anew(own))
    logging.disable(logging.ERROR)  # of what dynamo falls back from; a run reports it
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
    recorder: HearsOfKernels, graph: GraphModule, inputs: Any, **how: Any
) -> Callable[[list[Any]], Any]:
    run = _Graph(graph, recorder)

    def boxed(inputs: list[Any]) -> list[Any]:
        with paused():
            outputs = run(inputs)
        run.count(recorder.work)
        return outputs

    vars(boxed)["_boxed_call"] = True  # as AOTAutograd knows that it may hand over its list
    return boxed


class _Graph:
    """Allocates and frees what the compiled code of a graph would."""

    def __init__(self, graph: GraphModule, recorder: HearsOfKernels) -> None:
        nodes: list[Any] = list(graph.graph.nodes)
        self.recorder = recorder
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        self.outputs = [node if isinstance(node, Node) else None for node in nodes[-1].args[0]]
        self.kernels = kernels_of(nodes)
        # kernel after which a tensor is freed; unread inputs go with the first
        last = dict.fromkeys(self.inputs, 0)
        for number, kernel in enumerate(self.kernels):
            last |= dict.fromkeys([*kernel.reads, *kernel.writes], number)
        for node in self.outputs:
            if node is not None:
                last.pop(owner_of(node), None)  # the caller holds it
        self.ends: list[list[Node]] = [[] for _ in self.kernels]
        for node, number in last.items():
            self.ends[number].append(node)
        self.taken = self._taken()

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Return what the graph does; empties `inputs`, as compiled code does."""
        held: dict[Node, Any] = dict(zip(self.inputs, inputs, strict=True))
        inputs.clear()
        kept = {*self.taken.values()}
        for kernel, ends in zip(self.kernels, self.ends, strict=True):
            for node in kernel.writes:
                old = self.taken.get(node)
                held[node] = _empty(node) if old is None else held.pop(old)
                if kernel.fused:
                    over, size_bytes = old in ends, held[node].nbytes
                    own = [] if over else self._of_its_type(node, ends)
                    unlike = [(size_bytes, old.meta["val"].nbytes) for old in own]
                    self.recorder.tuned(size_bytes if over else 0, unlike)
            if kernel.operator is not None:
                operator, *args = call_of(kernel.operator) or [None]
                self.recorder.take(operator, map_arg(args, lambda n: n.meta["val"]))
            for node in ends:
                if node not in kept:
                    held.pop(node, None)
        return [None if n is None else _seen(held[owner_of(n)], n) for n in self.outputs]

    def count(self, work: WorkCounter) -> None:
        """Add up the work of its kernels."""
        for kernels in launched(self.kernels):
            node = kernels[0].operator
            call = [] if node is None else call_of(node)
            if node is None or not call:  # fused, or a kernel that a function calls
                work.fused(moved_bytes(kernels))
                continue
            operator, *args = call
            given, named = (map_arg(each, lambda n: n.meta["val"]) for each in (args, node.kwargs))
            work.operator(operator, given, named, node.meta.get("val"))

    def _taken(self) -> dict[Node, Node]:
        """Return tensor -> an earlier one whose memory it takes: one that ends in its fused kernel,
        or that ended before, where no peak is higher for keeping it (AllocateLine of torch 2.13.0's
        torch/_inductor/codegen/wrapper.py)."""
        taken: dict[Node, Node] = {}
        ended: defaultdict[tuple[Any, int], list[tuple[Node, int]]] = defaultdict(list)
        levels = self._levels()
        highest = max(levels, default=0)
        for number, (kernel, ends) in enumerate(zip(self.kernels, self.ends, strict=True)):
            for node in kernel.writes:
                own = self._of_its_type(node, ends) if kernel.fused else []
                over = next((old for old in own if numel(old) == numel(node)), None)
                earlier = ended[_kind(node)]
                if over is not None:
                    taken[node] = over
                elif earlier and _is_allocated(kernel):
                    size_bytes, between = node.meta["val"].nbytes, range(earlier[-1][1] + 1, number)
                    if size_bytes + max((levels[n] for n in between), default=0) <= highest:
                        taken[node] = earlier.pop()[0]
                        for n in between:
                            levels[n] += size_bytes
            for node in ends:
                own_memory = node.op == "call_function" and _bytes_of(node) > 0
                if own_memory and node not in taken.values():
                    ended[_kind(node)].append((node, number))
        return taken

    def _levels(self) -> list[int]:
        """Return the bytes that are there in each kernel."""
        first = dict.fromkeys(self.inputs, 0)
        for number, kernel in enumerate(self.kernels):
            first |= dict.fromkeys(kernel.writes, number)
        changes = [0] * (len(self.kernels) + 1)
        for node, number in first.items():
            changes[number] += _bytes_of(node)
        for number, ends in enumerate(self.ends):
            changes[number + 1] -= sum(map(_bytes_of, ends))
        return [*itertools.accumulate(changes)][:-1]

    def _of_its_type(self, node: Node, ends: list[Node]) -> list[Node]:
        """Return the graph's own tensors of a result's type that end there: a fused kernel writes
        over one that is as large."""
        own = (old for old in ends if old.op == "call_function" and old is not node)
        return [old for old in own if old.meta["val"].dtype == node.meta["val"].dtype]


def _is_allocated(kernel: Kernel) -> bool:
    """Return whether compiled code allocates its results: attention does so itself."""
    return kernel.fused or len(kernel.writes) == 1


def _bytes_of(node: Node) -> int:
    value = node.meta["val"]
    return 0 if is_generator_state(value) else value.nbytes


def _kind(node: Node) -> tuple[Any, int]:
    """Type and size: memory is taken by what has the same."""
    return node.meta["val"].dtype, _bytes_of(node)


def _empty(node: Node) -> Tensor:
    value = node.meta["val"]
    if is_generator_state(value):
        return torch.empty(0)
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)


def _seen(held: Any, node: Node) -> Any:
    value = node.meta["val"]
    if node.op == "placeholder" or is_generator_state(value):
        return held
    return held.as_strided(value.size(), value.stride(), value.storage_offset())
