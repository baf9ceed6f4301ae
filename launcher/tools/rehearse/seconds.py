"""Seconds of a rehearsed step on a GPU: the plan's prices for what reached the device, in order.

The host dispatches one operator after the other; a kernel begins when the host has asked for it and
the one before it on its stream has ended; streams wait for each other's events as the program had
them, and messages go over the links of the data sheets (launcher/forecast/machine.py). What lies on
different streams at the same time slows each other, as in the plan.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from launcher.forecast.collectives import Group, collective_s
from launcher.forecast.efficiency import (
    CONTENTION,
    FETCH_HOOK_OPERATORS,
    GRADIENT_HOOK_OPERATORS,
    GROUP_HOOK_OPERATORS,
    KERNEL_S,
)
from launcher.forecast.machine import Machine
from launcher.forecast.on_gpu import moved_s, products_s
from launcher.forecast.traffic import Collective
from launcher.tools.rehearse.timeline import Entry, Kind, Operator, Timeline

_COLLECTIVES: tuple[Collective | None, ...] = (
    *("all_reduce", "all_reduce", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    *(None, None),
)
"""The collective that each of nccl.c's kinds is priced as: reduce and broadcast as half of an
all-reduce; messages between two ranks are none."""
_REDUCE, _BROADCAST, _ALL_GATHER, _SEND = 1, 2, 3, 6
_TO_DEVICE, _TO_HOST = 1, 2
_HOOKS = (0, FETCH_HOOK_OPERATORS, GRADIENT_HOOK_OPERATORS, GROUP_HOOK_OPERATORS)
"""By inside/shardscale_rehearsal/engines.py's kinds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeconds:
    """Predicted seconds of one step of a rank."""

    total_s: float
    products_s: float
    attention_s: float
    moved_s: float
    """Seconds of kernels that are bound by memory, and of copies on the device."""
    starts_s: float
    """Between kernels."""
    messages_s: float
    """Seconds of all collectives; `hidden_s` of it and of transfers beside other work."""
    transfers_s: float
    """Between the host and the device."""
    hidden_s: float
    host_s: float
    """Seconds of the host, to dispatch every operator and to run a strategy's hooks."""


def step_seconds(timeline: Timeline, machine: Machine) -> StepSeconds:
    """Price one rank's step on a machine, between one that went before and one that follows."""
    run = _Run(timeline, machine)
    run.take()
    # the first pass leaves host and streams as a step before this one does; only the second counts
    first, run.busy = run.now_s, []
    run.sums = defaultdict(float)
    run.take()
    computing_s = _covered_s([span for span in run.busy if span[2]])
    sending_s = _covered_s([span for span in run.busy if not span[2]])
    # the pass ran both at full speed side by side; CONTENTION adds back what they lose
    hidden = computing_s + sending_s - _covered_s(run.busy)
    return StepSeconds(
        total_s=run.now_s - first + CONTENTION * hidden,
        products_s=run.sums["products"],
        attention_s=run.sums["attention"],
        moved_s=run.sums["moved"],
        starts_s=run.sums["starts"],
        messages_s=run.sums["messages"],
        transfers_s=run.sums["transfers"],
        hidden_s=(1 - CONTENTION) * hidden,
        host_s=run.sums["host"],
    )


@dataclass(slots=True)
class _Run:
    """Clocks of the host and of every stream."""

    timeline: Timeline
    machine: Machine
    host_s: float = 0.0
    streams: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    events: dict[int, float] = field(default_factory=dict)
    busy: list[tuple[float, float, bool]] = field(default_factory=list)
    """(from, to, whether it computes), in the order of the host."""
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    costs: dict[int, dict[str, float]] = field(default_factory=dict)

    @property
    def now_s(self) -> float:
        """Return when all that was asked for so far has ended."""
        return max(self.host_s, *self.streams.values(), 0.0)

    def take(self) -> None:
        """Go through the step once."""
        for entry in self.timeline.entries:
            match entry.kind:
                case Kind.OPERATOR if not entry.a:
                    self._host(1)
                case Kind.HOOK:
                    self._host(_HOOKS[entry.a])
                case Kind.KERNEL:
                    self._kernel(entry)
                case Kind.COPY:
                    self._copy(entry)
                case Kind.COLLECTIVE:
                    self._run(entry.stream, self._message_s(entry), "messages", computes=False)
                case Kind.RECORD_EVENT:
                    self.events[entry.a] = max(self.streams[entry.stream], self.host_s)
                case Kind.WAIT_EVENT:
                    ready = self.events.get(entry.a, 0.0)
                    self.streams[entry.stream] = max(self.streams[entry.stream], ready)
                case Kind.SYNCHRONIZE:
                    self._wait(entry)
                case Kind.OPERATOR:  # in a hook
                    pass

    def _host(self, operators: int) -> None:
        seconds = operators * self.machine.operator_s
        self.host_s += seconds
        self.sums["host"] += seconds

    def _run(self, stream: int, seconds: float, what: str, *, computes: bool) -> None:
        begins = max(self.streams[stream], self.host_s)
        self.streams[stream] = begins + seconds
        self.busy.append((begins, begins + seconds, computes))
        self.sums[what] += seconds

    def _kernel(self, entry: Entry) -> None:
        """Run one of an operator's kernels, which share its time."""
        self._run(entry.stream, KERNEL_S, "starts", computes=True)
        if not entry.operator:
            return
        if entry.operator not in self.costs:
            operator = self.timeline.operators[entry.operator - 1]
            self.costs[entry.operator] = operator_seconds(operator, self.machine)
        for name, seconds in self.costs[entry.operator].items():
            if seconds:
                share = seconds / self.timeline.kernels[entry.operator]
                self._run(entry.stream, share, name, computes=True)

    def _copy(self, entry: Entry) -> None:
        if entry.b == _TO_DEVICE:
            rate = self.machine.host_to_device_bytes_per_s
        elif entry.b == _TO_HOST:
            rate = self.machine.device_to_host_bytes_per_s
        else:  # read and written
            seconds = 2 * entry.a / self.machine.copy_bytes_per_s
            self._run(entry.stream, KERNEL_S + seconds, "moved", computes=True)
            return
        seconds = 0.0 if rate is None else entry.a / rate
        self._run(entry.stream, KERNEL_S + seconds, "transfers", computes=False)

    def _wait(self, entry: Entry) -> None:
        if entry.b:
            self.host_s = self.now_s
        elif entry.a:
            self.host_s = max(self.host_s, self.events.get(entry.a, 0.0))
        else:
            self.host_s = max(self.host_s, self.streams[entry.stream])

    def _message_s(self, entry: Entry) -> float:
        # timeline.h: 2^32 x kind + ranks
        kind, size = entry.b >> 32, entry.b & 0xFFFFFFFF
        of = self.timeline.operators[entry.operator - 1].ranks if entry.operator else None
        # a message of no known operator: the group is taken as consecutive ranks
        ranks = of if of is not None and len(of) == size else tuple(range(size))
        nodes = {rank // self.machine.ranks_per_node for rank in ranks}
        group = Group(size=size, per_node=-(-size // len(nodes)))
        collective = _COLLECTIVES[kind]
        if collective is None:  # what is sent and what is received go at the same time
            across = self.machine.network_bytes_per_s if len(nodes) > 1 else None
            return _pair_s(self.machine, entry.a, across) if kind == _SEND else 0.0
        # an all-gather's bytes are those of one rank, other kinds' those of the whole message
        whole = entry.a * size if kind == _ALL_GATHER else entry.a
        seconds = collective_s(self.machine, group, collective, whole)
        return seconds / 2 if kind in (_REDUCE, _BROADCAST) else seconds


def operator_seconds(operator: Operator, machine: Machine) -> dict[str, float]:
    """Return an operator's time on the device by what bounds it, its kernels' starts left out."""
    work, type_ = operator.work, operator.type_
    if type_ not in machine.matmul_flops_per_s:
        type_ = "fp16" if type_ == "bf16" and "fp16" in machine.matmul_flops_per_s else "fp32"
    return {
        "products": products_s(work, machine, type_),
        "attention": work.attention_flops / machine.attention_flops_per_s[type_],
        "moved": moved_s(work, machine),
    }


def _pair_s(machine: Machine, size_bytes: int, across: float | None) -> float:
    if machine.collectives is None:
        return 0.0
    rate = machine.collectives["all_to_all"]
    bytes_per_s = rate.bytes_per_s if across is None else min(across, rate.bytes_per_s)
    return rate.start_s + rate.hop_s + size_bytes / bytes_per_s


def _covered_s(spans: Sequence[tuple[float, float, bool]]) -> float:
    """Return the seconds in which any of these runs."""
    total = until = 0.0
    for begins, ends, _ in sorted(spans):
        total += max(0.0, ends - max(begins, until))
        until = max(until, ends)
    return total
