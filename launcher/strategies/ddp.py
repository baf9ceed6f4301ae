"""DistributedDataParallel: every rank holds everything, gradients are averaged."""

from collections.abc import Mapping, Sequence

from torch.nn.parallel import DistributedDataParallel

from launcher.config.schema import ShardingChoice
from launcher.memory.materialize import materialize_whole
from launcher.memory.parameters import Parameter
from launcher.memory.timeline import Tag, Timeline
from launcher.memory.trace_events import Key
from launcher.optim.dtypes import dtypes
from launcher.strategies.base import TORCH, Variant
from launcher.strategies.buffers import Buffers, Whole
from launcher.strategies.compiled import compile_whole
from launcher.strategies.engine import Engine, Recipe
from launcher.strategies.native import NativeEngine
from launcher.strategies.rank import Rank
from launcher.strategies.traffic import Traffic, Transfer, Wire

# torch/csrc/distributed/c10d/reducer.cpp, and bucket_cap_mb of DistributedDataParallel.
FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20


def build(recipe: Recipe) -> Engine:
    """Gradients live in the reduction buckets, so they are held once; mixed precision under
    autocast."""
    module = recipe.meta_module()
    device = recipe.world.device
    optim = recipe.config.optim
    types = dtypes(optim)
    materialize_whole(module, recipe.initial_value, device=device, dtype=types.stored)
    if recipe.config.loop.compile:
        compile_whole(module)
    wrapped = DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )

    def set_sync(last: bool) -> None:
        wrapped.require_backward_grad_sync = last

    return NativeEngine(
        wrapped,
        recipe.new_optimizer(wrapped),
        accumulation=recipe.accumulation,
        clip=optim.clip,
        device=device,
        autocast=types.autocast,
        scaled=optim.precision == "fp16",
        set_sync=set_sync,
        keeps_gradients=True,  # the buckets stay, so a ledger without them would be wrong
    )


class DdpBuffers(Whole):
    """DistributedDataParallel with gradients in its buckets, which stay.

    Sizes and order as in torch/csrc/distributed/c10d/reducer.cpp: a first bucket of 1 MiB, then
    25 MiB, filled in the order of the parameters, and once more, after the first backward, in the
    order in which gradients came.
    """

    def __init__(self, rank: Rank, timeline: Timeline) -> None:
        super().__init__(rank, timeline)
        self._arrived: list[Parameter] = []
        self._rebuilt = False

    def build(self) -> None:
        super().build()
        # The constructor sends rank 0's values to all, flattened in pieces of 250 MB.
        whole = self.rank.stored_bytes * sum(p.elements for p in self.parameters)
        sent = Tag("temporary", "broadcast of the initial values")
        self.timeline.allocate("sync", min(whole, 250 * 10**6), sent)
        self.timeline.free("sync")
        self._allocate(self.parameters, "first")

    def begin_forward(self, *, last: bool) -> None:
        super().begin_forward(last=last)
        if self._arrived and not self._rebuilt:
            self._rebuilt = True
            self._allocate(self._arrived, "rebuilt")
            self._free("first")

    def gradient(self, key: Key, name: str) -> None:
        in_buckets = self._rebuilt
        if in_buckets:
            self.timeline.free(key)
            return
        self.accumulate(key, name)
        if self.last:
            self._arrived.append(self.by_name[name])
            self.timeline.free(("grad", name))  # copied into its bucket

    def drop_gradients(self) -> None:
        pass  # zeroed in place

    def _allocate(self, order: Sequence[Parameter], name: str) -> None:
        element = self.rank.stored_bytes
        limits = FIRST_BUCKET_BYTES // element, BUCKET_BYTES // element
        for number, elements in enumerate(_bucket_elements(order, *limits)):
            grads = Tag("grads", f"DDP bucket {number}", (elements,))
            self.timeline.allocate(("bucket", name, number), element * elements, grads)

    def _free(self, name: str) -> None:
        number = 0
        while self.timeline.has(("bucket", name, number)):
            self.timeline.free(("bucket", name, number))
            number += 1


def _bucket_elements(
    order: Sequence[Parameter], first_elements: int, later_elements: int
) -> list[int]:
    buckets, open_elements, limit = [], 0, first_elements
    for parameter in order:
        open_elements += parameter.elements
        if open_elements >= limit:
            buckets.append(open_elements)
            open_elements, limit = 0, later_elements
    return buckets + ([open_elements] if open_elements else [])


class Ddp:
    """`--strategy ddp`."""

    name = "ddp"
    variants: tuple[Variant, ...] = (
        Variant(label="ddp", also_called="ZeRO-0", fields={"strategy": "ddp"}, level=0),
    )
    needs_group = True
    keeps_master = False
    imports_bytes = 0
    follows: Mapping[str, tuple[str, ...]] = {"torch": TORCH}
    build = staticmethod(build)

    def variant(self, sharding: ShardingChoice) -> Variant:
        """There is one."""
        return self.variants[0]

    def casts_parameters(self, sharding: ShardingChoice) -> bool:
        """Autocast does."""
        return False

    def memory(self, rank: Rank, timeline: Timeline) -> Buffers:
        """Gradients in buckets that stay."""
        return DdpBuffers(rank, timeline)

    def traffic(self, wire: Wire) -> Traffic:
        """All-reduce of the gradients, in the parameters' type (fp32 under autocast), in the last
        backward, in buckets as they fill. The embeddings' bucket fills last: nothing is left to
        hide it behind."""
        element = wire.stored_bytes
        before = element * (wire.blocks + wire.head)
        last = element * wire.embeddings
        return Traffic(
            last_backward=(
                Transfer(
                    kind="all_reduce", size_bytes=before, pieces=max(1.0, before / BUCKET_BYTES)
                ),
                Transfer(kind="all_reduce", size_bytes=last, hideable=False),
            )
        )
