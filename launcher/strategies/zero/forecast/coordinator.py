"""Parameters that DeepSpeed's stage 3 has gathered at each moment.

A port of the decisions in deepspeed 0.19.8's runtime/zero/partitioned_param_coordinator.py: the
first micro-batch records in which order modules are entered, forwards and backwards; from the
second on, each module's entry gathers its own parameters, then those that come next in the record,
a bucket at a time, and its exit releases what is not needed again soon.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.forecast.timeline import Timeline
from launcher.strategies.parameters import Parameter
from launcher.strategies.rank import Rank
from launcher.strategies.shapes import tied_modules


@dataclass(slots=True)
class _Gather:
    """Parameters that come in one collective; several pass through one flat buffer."""

    number: int
    parameters: list[Parameter]
    waiting: set[str] = field(default_factory=set)
    complete: bool = False


class Coordinator:
    """Gathers and releases whole parameters on a timeline."""

    def __init__(self, rank: Rank, timeline: Timeline, config: Mapping[str, Any]) -> None:
        """`config` is DeepSpeed's `zero_optimization`."""
        parameters = rank.parameters
        smallest = config["stage3_param_persistence_threshold"]
        self._timeline = timeline
        self._ranks = rank.world_size
        # A single rank computes with what it holds, where that is on its device.
        at_home = rank.device_type == "cpu" or rank.params_where == "device"
        self._in_place = self._ranks == 1 and at_home
        self._element_bytes = rank.computing_bytes
        self._persistent = {p.name: p for p in parameters if p.elements <= smallest}
        self._prefetch_elements = config["stage3_prefetch_bucket_size"]
        self._live_elements = config["stage3_max_live_parameters"]
        self._reuse_elements = config["stage3_max_reuse_distance"]
        self._of_module: defaultdict[str, list[Parameter]] = defaultdict(list)
        for p in parameters:
            self._of_module[p.name.rpartition(".")[0]].append(p)
        for module, owner in tied_modules(rank.resolved.model).items():
            self._of_module[module] = self._of_module[owner]
        self._order: list[str] = []  # of entered modules
        self._recorded = False
        self._available: set[str] = set()
        self._gathers: dict[str, _Gather] = {}  # in flight or not yet waited for, by parameter
        self._active: defaultdict[str, set[str]] = defaultdict(set)  # modules, by parameter
        # Modules that the backward is in, by when it entered them.
        self._backwards: dict[str, None] = {}
        self._recomputed: defaultdict[str, dict[str, Parameter]] = defaultdict(dict)  # by those
        self._releasable: dict[tuple[str, int], set[str]] = {}
        self._count = 0
        self._step = 0
        self._live = 0
        self._queue: deque[tuple[Parameter, int]] = deque()  # with the step of their use
        self._fetched_for: dict[str, int] = {}

    def hold_persistent(self) -> None:
        """After a step: small parameters stay whole on every rank, beside their slices.

        But for the first micro-batch, which releases them like all others.
        """
        if self._in_place:
            return
        for p in self._persistent.values():
            self._allocate(p, self._padded(p))
            self._available.add(p.name)

    def drop_persistent(self) -> None:
        """A step begins: until it is over, all parameters are in slices."""
        for name in self._persistent:
            self._timeline.free(("whole", name))

    def begin(self) -> None:
        """A forward starts."""
        self._recorded = bool(self._order)
        self._queue = deque(
            (p, step) for step, name in enumerate(self._order) for p in self._of_module[name]
        )
        self._fetched_for = {}
        self._step = self._live = 0

    def fetch(self, module: str, *, forward: bool) -> None:
        """A module is entered."""
        if not forward:
            self._backwards[module] = None
        own = self._of_module[module]
        if not self._recorded:
            self._order.append(module)
        # a module's own parameters come in one gather, prefetched ones in another
        missing = [p for p in own if p.name not in self._available and p.name not in self._gathers]
        self._gather(missing)
        for p in own:
            self._active[p.name].add(module)
            if forward and self._backwards and not p.trained:
                # Recomputed, it stays for the module that the backward is in: of what is frozen no
                # gradient would tell when it is used for the last time.
                owner = next(reversed(self._backwards))
                self._recomputed[owner][p.name] = p
                self._active[p.name].add(owner)
            self._wait(p)
        if self._recorded:
            self._take_from_queue(own)
            self._prefetch()
        self._step += 1

    def release(self, module: str, *, forward: bool) -> None:
        """A module is left."""
        own = self._of_module[module]
        going = {p.name for p in own}
        # before the record is complete all parameters of a module go, persistent ones included
        if self._recorded and own:
            going = self._not_needed_soon(module, own, going - self._persistent.keys())
        if not forward:
            del self._backwards[module]
            recomputed = self._recomputed.pop(module, {})
            going = going | (recomputed.keys() - self._persistent.keys())
            own = [*own, *(p for name, p in recomputed.items() if p not in own)]
        for p in own:
            self._active[p.name].discard(module)
            if p.name in going:
                self._release(p)

    def release_all(self) -> None:
        """The backward is over; embeddings, whose inputs have no gradient, are still there."""
        self._active.clear()
        self._backwards.clear()
        self._recomputed.clear()
        for own in self._of_module.values():
            for p in own:
                if p.name not in self._persistent:
                    self._release(p)

    def _take_from_queue(self, own: list[Parameter]) -> None:
        expected = {p.name for p in own if self._fetched_for.get(p.name, -1) < self._step}
        while self._queue and expected:
            p, step = self._queue.popleft()
            self._fetched_for[p.name] = step
            expected.discard(p.name)

    def _prefetch(self) -> None:
        # Parameters are taken until there is enough: the last one may go beyond the bucket's size.
        most = min(self._live_elements - self._live, self._prefetch_elements)
        wanted: list[Parameter] = []
        elements = 0
        while self._queue and elements < most:
            p, step = self._queue.popleft()
            self._fetched_for[p.name] = max(self._fetched_for.get(p.name, -1), step)
            if p.name in self._available or p.name in self._gathers or p in wanted:
                continue
            wanted.append(p)
            elements += p.elements
        self._gather(wanted)

    def _gather(self, parameters: list[Parameter]) -> None:
        if not parameters:
            return
        self._live += sum(p.elements for p in parameters)
        self._count += 1
        gather = _Gather(self._count, parameters, {p.name for p in parameters})
        for p in parameters:
            self._gathers[p.name] = gather
        if self._in_place:
            return
        # A parameter alone is gathered into its own padded memory, without a flat buffer.
        if self._ranks == 1 or len(parameters) == 1:
            for p in parameters:
                self._allocate(p, self._padded(p))
            return
        size_bytes = sum(self._element_bytes(p) * self._padded(p) for p in parameters)
        self._timeline.allocate(("flat", gather.number), size_bytes, "temporary", stream="gather")

    def _wait(self, p: Parameter) -> None:
        gather = self._gathers.pop(p.name, None)
        if gather is None:
            return
        if not gather.complete:
            gather.complete = True
            for other in gather.parameters:
                if self._ranks > 1 and len(gather.parameters) > 1:
                    # AllGatherCoalescedHandle.wait copies all its parameters out of the flat
                    # buffer, which lives until the last of them has been waited for.
                    self._allocate(other, other.elements)
                self._available.add(other.name)
        gather.waiting.discard(p.name)
        if not gather.waiting:
            self._timeline.free(("flat", gather.number))

    def _not_needed_soon(self, module: str, own: list[Parameter], going: set[str]) -> set[str]:
        if (module, self._step) not in self._releasable:
            # What prefetching passed over, because it was there, must stay for its next use.
            kept = {p.name for p in own if self._fetched_for.get(p.name, -1) > self._step}
            passed = 0
            for name in self._order[self._step :]:
                if passed >= self._reuse_elements:
                    break
                for p in self._of_module[name]:
                    kept.add(p.name)
                    passed += p.elements
            self._releasable[module, self._step] = going - kept
        return self._releasable[module, self._step]

    def _release(self, p: Parameter) -> None:
        if p.name in self._available and not self._active[p.name]:
            self._available.discard(p.name)
            self._timeline.free(("whole", p.name))
            self._live -= p.elements

    def _allocate(self, p: Parameter, elements: int) -> None:
        category = p.category if p.name in self._persistent else "temporary"
        size_bytes = self._element_bytes(p) * elements
        self._timeline.allocate(("whole", p.name), size_bytes, category, stream="gather")

    def _padded(self, p: Parameter) -> int:
        return -(-p.elements // self._ranks) * self._ranks
