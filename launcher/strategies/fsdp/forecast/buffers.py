"""FSDP2's gathered parameters and communication buffers, as wrapping.py uses it.

Sizes and order of allocation follow torch/distributed/fsdp/_fully_shard: `_fsdp_collectives.py`
and `_fsdp_param_group.py` (torch 2.13). On a GPU what is sent is allocated on streams of its own.
"""

import math
from collections.abc import Iterator

from launcher.forecast.buffers import Buffers
from launcher.forecast.timeline import Timeline
from launcher.forecast.trace.events import Key, Place
from launcher.strategies.fsdp.forecast.sharded_groups import Division, ShardedGroup, grouped
from launcher.strategies.fsdp.grouping import HEAD, ROOT, Group
from launcher.strategies.fsdp.placement import row_range
from launcher.strategies.parameters import Parameter
from launcher.strategies.rank import FP32, Rank


class FsdpBuffers(Buffers):
    """Shards between uses; a group's whole parameters while it computes, the next one's early."""

    def __init__(self, rank: Rank, timeline: Timeline) -> None:
        super().__init__(rank, timeline)
        sharding = rank.resolved.config.sharding
        self.ranks = rank.world_size // sharding.replicate
        self.division = Division(rank, self.ranks, rank.rank % self.ranks)
        self.replicated = sharding.replicate > 1
        self.offloaded = sharding.offload_param == "cpu" and rank.device_type != "cpu"
        self.casts = self.element != self.stored
        self.updates_on = "reduce" if rank.updates_in_backward else None
        self._kept_gather: Group | None = None
        self._scattering: str | None = None
        self._reductions = 0
        self._group_parameters()

    def _group_parameters(self) -> None:
        groups = {group.of: group for group in grouped(self.rank)}
        self.root, self.head = groups.pop(ROOT), groups.pop(HEAD, None)
        self.blocks = [*groups.values()]
        self.of_layer = {
            layer: (number, layer == layers.start, layer == layers.stop - 1)
            for number, layers in enumerate(each for each in groups if isinstance(each, range))
            for layer in layers
        }
        """Number of a block's group, and whether the block is its first or last."""
        self.groups = [*self.blocks, *([self.head] if self.head else []), self.root]
        for group in self.groups:
            group.sum_up(self.division, whole_blocks=self.timeline.whole_blocks)

    def build(self) -> None:
        where, pins = self.rank.params_where, self.rank.pins
        for p in self.parameters:
            key, size = ("param", p.name), self.rank.element_bytes(p) * self.division.padded(p)
            self.timeline.allocate(key, size, p.category, where=where, pinned=pins)
        # Each parameter's full initial value is made and cut; those before it are still there.
        for p in self.parameters:
            drawn = self.draw(p)
            self.timeline.free("value")
            self.timeline.rename(drawn, "value", "temporary")
            size_bytes = (1 if p.packed else FP32) * math.prod(self.local_shape(p))
            self.timeline.allocate("new", size_bytes, "temporary")
            self.timeline.free("cut")
            self.timeline.rename("new", "cut", "temporary")
        self.timeline.free("value")
        self.timeline.free("cut")

    def updated(self) -> Iterator[tuple[Parameter, int, int]]:
        index, ranks = self.division.index, self.ranks
        return ((p, *row_range(p.shape, rank=index, ranks=ranks)) for p in self.trained)

    def begin_forward(self, *, last: bool) -> None:
        self.reduces = last or self.rank.resolved.config.sharding.reduce_each_micro_batch
        self._copy_out(self.root, forward=True)

    def enter(self, place: Place) -> None:
        if place.part == "block":
            number, first, _ = self.of_layer[place.layer]
            if first:
                self._copy_out(self.blocks[number], forward=True)
        elif place.part == "head" and self.head is not None:
            self._copy_out(self.head, forward=True)
        elif place.part == "head_backward":
            self._begin_backward()
        elif place.part == "block_backward":
            number, _, last = self.of_layer[place.layer]
            if last:
                self._copy_out(self.blocks[number], forward=False)
                self._prefetch(number)

    def leave(self, place: Place) -> None:
        if place.part == "block":
            number, _, last = self.of_layer[place.layer]
            if last and self.blocks[number].reshard:
                self._release(self.blocks[number])
        elif place.part == "block_backward":
            number, first, _ = self.of_layer[place.layer]
            if first and not self._is_late(number):
                self._reduce(self.blocks[number])
        elif place.part == "head_backward" and self.head is not None:
            self._reduce(self.head)

    def end_forward(self) -> None:
        if self.root.reshard:
            self._release(self.root)
        self._free_kept_gather()

    def gradient(self, key: Key, name: str) -> None:
        if self.timeline.has(("grad", name)):
            self.timeline.free(key)
        else:
            self.timeline.rename(key, ("grad", name), "temporary")

    def end_backward(self) -> None:
        self._reduce(self.root)
        if self._is_late(0):
            self._reduce(self.blocks[0])
        self.timeline.free(self._scattering)
        self._scattering = None
        for number in range(self._reductions):
            self.timeline.free(("added", number))
        self._reductions = 0

    def step(self) -> None:
        if not self.rank.updates_in_backward:
            self.clip_and_update()
        for group in self.groups:
            self._drop_shards(group)

    def update(self, parameter: Parameter) -> None:
        super().update(parameter)
        size_bytes, where = self.division.decayed_bytes(parameter), self.rank.params_where
        self.transient(size_bytes, where=where, stream=self.updates_on)

    def _update(self, group: ShardedGroup) -> None:
        """Update a group as soon as it is reduced, where the optimizer is in the backward."""
        for p in group.trained:
            self.update(p)
        key = ("shard", group.of)
        if self.replicated and self.timeline.has(key):
            # All-reduced, it is kept until the backward is over (_all_reduce_state).
            self.timeline.rename(key, ("added", self._reductions), "temporary")
            self._reductions += 1
        self._drop_shards(group)

    def _drop_shards(self, group: ShardedGroup) -> None:
        self.timeline.free(("shard", group.of))
        for p in group.trained:
            self.timeline.free(("shard", p.name))

    def _is_late(self, number: int) -> bool:
        """Return whether a group is reduced after the backward: its input has no gradient."""
        return number == 0 and len(self.trained) < len(self.parameters)

    def local_shape(self, parameter: Parameter) -> tuple[int, ...]:
        return self.division.shape(parameter)

    def _begin_backward(self) -> None:
        # The hooks of head and root are both on the loss; each gathers the one before it early.
        if self.head is not None:
            self._prefetch(len(self.blocks))
        self._copy_out(self.root, forward=False)
        self._prefetch(len(self.blocks))

    def _prefetch(self, before: int) -> None:
        if before > 0:
            self._gather(self.blocks[before - 1])

    def _gather(self, group: ShardedGroup) -> None:
        if group.gathered or group.gathering:  # prefetched, or never freed
            return
        group.gathering = True
        if self.ranks == 1:
            return
        if self.offloaded:
            for p in group.parameters:
                self._fetch(p, stream="gather")
        elif self.casts:
            sent_bytes = self.element * self.division.padded(*group.trained)
            self.timeline.allocate("shards to send", sent_bytes, "temporary", stream="gather")
        size_bytes = self.division.whole_bytes(*group.parameters)
        self.timeline.allocate(("gather", group.of), size_bytes, "temporary", stream="gather")
        self.timeline.free("shards to send")
        for p in reversed(group.parameters):
            self.timeline.free(("fetched", p.name))

    def _fetch(self, p: Parameter, stream: str | None = None) -> None:
        """Fetch a shard from the host and cast it, apart from others."""
        key, shard = ("fetched", p.name), self.division.padded(p)
        if self.offloaded:
            size_bytes = self.rank.element_bytes(p) * shard
            self.timeline.allocate(key, size_bytes, "temporary", stream=stream)
        if self.casts and p.trained:
            self.timeline.allocate("cast", self.element * shard, "temporary", stream=stream)
            self.timeline.free(key)
            self.timeline.rename("cast", key, "temporary")

    def _copy_out(self, group: ShardedGroup, *, forward: bool) -> None:
        self._gather(group)
        if group.gathered:
            return
        if self.ranks > 1:
            self.timeline.run(group.copied_out)
        else:
            for p in group.parameters:
                self._fetch(p)
                self.timeline.free("copied")  # a copy lives until the next one is made
                if self.timeline.has(("fetched", p.name)):
                    self.timeline.rename(("fetched", p.name), "copied", "temporary")
                self.timeline.allocate(("whole", p.name), self.division.whole_bytes(p), "temporary")
            self.timeline.free("copied")
        group.gathered, group.gathering = True, False
        if forward:
            self._free_kept_gather()  # so late that its memory is not reused while it is sent
            self._kept_gather = group.of
        else:
            self.timeline.free(("gather", group.of))

    def _free_kept_gather(self) -> None:
        self.timeline.free(("gather", self._kept_gather))
        self._kept_gather = None

    def _release(self, group: ShardedGroup) -> None:
        if self.ranks > 1 and group.gathered:
            self.timeline.run(group.released)
        elif self.ranks == 1:
            for p in group.parameters:
                self.timeline.free(("whole", p.name))
        group.gathered = False

    def _reduce(self, group: ShardedGroup) -> None:
        self._release(group)
        if not self.reduces:
            return self._accumulate(group)
        if self.casts and group.accumulated:
            for p in group.trained:  # added to what the window has
                self.timeline.free(("grad", p.name))
        # torch keeps one reduce-scatter's input (reduce_scatter_max_input_buffers) until the next.
        self.timeline.free(self._scattering)
        elements = self.division.padded(*group.trained)
        if elements == 0:
            return
        kept, self._scattering = self._rearrange(group), f"scatter {group.of}"
        self.timeline.allocate(self._scattering, self.stored * self.ranks * elements, "temporary")
        for p in group.trained:
            self.timeline.free(("rearranged", p.name))
        if self.ranks > 1:
            kept.append(group.trained[-1])  # as the variable of a loop in foreach_reduce
        self._drop_gradients([p for p in group.trained if p not in kept])
        group.accumulated = False
        self._keep_shard(group, elements)
        self._drop_gradients(group.trained)
        if self.rank.updates_in_backward:
            self._update(group)

    def _rearrange(self, group: ShardedGroup) -> list[Parameter]:
        """Copy gradients of which each rank gets a part of every row; return the one kept with its
        parts until all are sent."""
        element = self.stored if group.accumulated else self.element
        kept: list[Parameter] = []
        for p in group.trained:
            if self.division.is_rearranged(p):
                self._drop_gradients(kept)
                self.timeline.allocate(("rearranged", p.name), element * p.elements, "temporary")
                kept = [p]
        return kept

    def _drop_gradients(self, parameters: list[Parameter]) -> None:
        for p in reversed(parameters):  # as Python clears a list
            self.timeline.free(("grad", p.name))
            self.timeline.free(("accumulated", p.name))

    def _keep_shard(self, group: ShardedGroup, elements: int) -> None:
        size_bytes, pins = self.stored * elements, self.rank.pins
        if self.offloaded:
            self.timeline.allocate("reduced", size_bytes, "grads", stream="reduce")
            for p in group.trained:
                if not self.timeline.has(("shard", p.name)):
                    shard, own = self.stored * self.division.padded(p), ("shard", p.name)
                    self.timeline.allocate(own, shard, "grads", where="host", pinned=pins)
            self.timeline.free("reduced")
        elif self.timeline.has(("shard", group.of)):
            key = ("added", self._reductions)  # to the shards of the micro-batches before
            self.timeline.allocate(key, size_bytes, "temporary", stream="reduce")
            if self.replicated:
                self._reductions += 1  # kept until the backward is over
            else:
                self.timeline.free(key)
        else:
            self.timeline.allocate(("shard", group.of), size_bytes, "grads", stream="reduce")

    def _accumulate(self, group: ShardedGroup) -> None:
        """Add up bf16 micro-batches without communication in fp32."""
        if not self.casts:  # then `gradient` has added up already
            return
        for p in group.trained:
            if not group.accumulated:
                self.timeline.allocate(("accumulated", p.name), self.stored * p.elements, "grads")
            self.timeline.free(("grad", p.name))
        group.accumulated = True
