"""Suggestions after out of memory: the cheapest changes that would have fitted, as flags."""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from launcher.config.compile_choice import is_tested
from launcher.config.resolve import Resolved
from launcher.config.sharding import MODEL_PARALLEL
from launcher.forecast.candidates import run_of
from launcher.forecast.fit import Room, needed_bytes, verdict
from launcher.forecast.machine import Machine
from launcher.forecast.order import Merit, best_first, simplicity
from launcher.forecast.timing import step_seconds
from launcher.measure.hardware import find_gpu
from launcher.measure.host_memory import host_bytes
from launcher.strategies import STRATEGIES, strategy_of, variant_of
from launcher.util.errors import UserError
from launcher.util.flags import as_flags
from launcher.util.sizes import gib, parse_bytes

MOST: Final = 3
LORA_RANK: Final = 8
"""Rank of suggested adapters when fine-tuning: a common choice."""
PATIENCE_S: Final = 8.0
"""CPU time of the search; it ends with the suggestions found by then."""

Changes = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """One or two changes that would have fitted."""

    flags: str
    needed_bytes: int
    memory_bytes: int
    slower: float | None
    """Predicted step seconds relative to the failed run, less 1; None if the machine's speed is
    unknown."""

    def line(self) -> str:
        """Format it with flags to paste."""
        room = f"{gib(self.needed_bytes)} of {gib(self.memory_bytes)}"
        cost = ""
        if self.slower is not None:
            change = "slower" if self.slower >= 0 else "faster"
            cost = f", about {abs(self.slower):.0%} {change}"
        return f"would fit: {self.flags} ({room}{cost})"


def suggestions(
    failed: Resolved, device: torch.device, *, ranks_per_node: int
) -> list[tuple[str, dict[str, Any]]]:
    """Find changes with which a run that was out of memory on this device would have fitted; return
    each as a line for the console and as an entry of `status.json`."""
    room = room_there_was(failed, device, ranks_per_node=ranks_per_node)
    found = suggest(failed, room, ranks_per_node=ranks_per_node)
    return [(each.line(), asdict(each)) for each in found]


def suggest(failed: Resolved, room: Room, *, ranks_per_node: int) -> list[Suggestion]:
    """Find at most three in the order of a plan: single changes, then pairs if those are few."""
    search = _Search(failed, room, ranks_per_node)
    kinds = list(_kinds(failed, room))
    found = [each for kind in kinds for each in search.first_that_fits(kind)]
    for one, other in itertools.combinations(kinds, 2):
        if len(found) >= MOST:
            break
        found += search.first_that_fits([a | b for a in one for b in other])
    return [found[number][1] for number in best_first([merit for merit, _ in found])][:MOST]


class _Search:
    def __init__(self, failed: Resolved, room: Room, ranks_per_node: int) -> None:
        self._failed = failed
        self._room = room
        self._ranks_per_node = ranks_per_node
        gpu = find_gpu(room.gpu)
        self._machine: Machine | None = None
        if gpu is not None:
            self._machine = Machine.of_gpu(gpu.name, ranks_per_node=ranks_per_node)
        # The run needed more than there was: if its prediction is lower, scale all of them.
        needed = needed_bytes(failed, room)
        self._correction = max(1.0, room.size_bytes / needed)
        self._fitting: list[Changes] = []
        self._deadline_s = time.thread_time() + PATIENCE_S

    def first_that_fits(self, alternatives: Sequence[Changes]) -> list[tuple[Merit, Suggestion]]:
        """Return the first that fits, if any, unless a part of it has fitted alone."""
        for changes in alternatives:
            if time.thread_time() > self._deadline_s:
                break
            if any(fitting.items() <= changes.items() for fitting in self._fitting):
                break
            suggestion = self._try(changes)
            if suggestion is not None:
                self._fitting.append(changes)
                return [suggestion]
        return []

    def _try(self, changes: Changes) -> tuple[Merit, Suggestion] | None:
        try:
            # What `auto` has chosen is to be chosen again.
            again: Changes = {"compile": None} if self._failed.compile_reason else {}
            again |= {"cuda_graphs": None} if self._failed.graphs_reason else {}
            config = self._failed.config.replace(**again | changes)
            run = run_of(
                config,
                config.data.micro_batch,
                self._failed.world_size,
                self._failed.device_type,
                elsewhere=False,
            )
        except UserError:  # incompatible with the other flags of the run
            return None
        needed = int(self._correction * needed_bytes(run, self._room))
        if verdict(needed, self._room.size_bytes) != "fits":
            return None
        slower = None
        if self._machine is not None:
            slower = self._step_s(run) / self._step_s(self._failed) - 1
        merit = Merit(
            verdict="fits",
            tokens_per_s=1 / (1 + (slower or 0.0)),  # relative to the failed run
            used_bytes=0,  # all fit: ties keep the order of the kinds
            simplicity=simplicity(run.config),
        )
        suggestion = Suggestion(
            flags=as_flags(changes),
            needed_bytes=needed,
            memory_bytes=self._room.size_bytes,
            slower=slower,
        )
        return merit, suggestion

    def _step_s(self, run: Resolved) -> float:
        assert self._machine is not None
        return step_seconds(
            run,
            gpus_per_node=self._ranks_per_node,
            machine=self._machine,
        ).total_s


def _kinds(failed: Resolved, room: Room) -> Iterator[list[Changes]]:
    """Yield kinds of changes, from the least to the most intrusive; in each, mildest first."""
    config = failed.config
    if config.model.attention != "auto":  # which avoids T x T scores and masks where it can
        yield [{"attention": "auto"}]
    if config.loop.cuda_graphs:  # whose recording has memory of its own
        yield [{"cuda_graphs": False}]
    size, total = config.data.micro_batch, failed.global_batch
    share, world_size = total // failed.data_ranks, failed.world_size
    halves = [size >> n for n in range(1, size.bit_length())]
    yield [{"micro_batch": n, "global_batch": total} for n in halves if share % n == 0]
    if size == 1 and world_size > 1:  # one sequence does not fit on one rank
        divisors = [n for n in range(2, world_size + 1) if world_size % n == 0]
        for dimension in MODEL_PARALLEL:
            yield [{dimension: n, "global_batch": total} for n in divisors]
    modes = ("none", "selective", "full")
    kept = config.model.activation_checkpointing
    if kept in modes:
        yield [{"activation_checkpointing": mode} for mode in modes[modes.index(kept) + 1 :]]
    elif kept != "offload":  # only some blocks or products
        yield [{"activation_checkpointing": "full"}]
    yield list(_adapters(failed))
    if config.optim.arithmetic.computed == "fp32":
        yield [{"precision": "bf16"}]
    if world_size > 1:
        yield list(_shardings(failed))
    if room.gpu is not None:  # on a CPU the host is the device
        yield [dict(changes) for changes in variant_of(config).offloads.values()]
        if not config.loop.compiles and is_tested(failed):
            yield [{"compile": True}]  # last, since it takes seconds of the patience


def _adapters(failed: Resolved) -> Iterator[Changes]:
    """Yield adapters and quantized bases, for fine-tuning only: adapters on random weights learn
    little."""
    model = failed.config.model
    bits: tuple[Changes, ...] = ({"quantize_base": "int8"}, {"quantize_base": "nf4"})
    if model.lora_rank is not None and model.quantize_base == "none":
        yield from bits
    elif model.lora_rank is None and model.init_from is not None:
        yield {"lora_rank": LORA_RANK}
        yield from ({"lora_rank": LORA_RANK, **changes} for changes in bits)


def _shardings(failed: Resolved) -> Iterator[Changes]:
    """Yield variants that shard more than the run did.

    The user appends the flags, which cannot undo --zero: after it only --zero can follow.
    """
    here, own = variant_of(failed.config), strategy_of(failed.config)
    others = [s for s in STRATEGIES.values() if s is not own]
    free = here.level == 0 and failed.config.sharding.zero is None
    turned_on = {name: True for name, value in here.fields.items() if value is False}
    for strategy in (own, *(reversed(others) if free else ())):
        for variant in strategy.variants:
            if variant.level > here.level and not variant.replicates:
                yield turned_on or dict(variant.fields)


def room_there_was(failed: Resolved, device: torch.device, *, ranks_per_node: int) -> Room:
    """Return the memory of the failed run: --memory-limit, the GPU's, or a rank's share of the
    host's."""
    on_gpu = device.type == "cuda"
    gpu = torch.cuda.get_device_name(device) if on_gpu else None
    limit = failed.config.measure.memory_limit
    if limit is not None:
        size_bytes = parse_bytes(limit, "--memory-limit")
    elif on_gpu:
        size_bytes = torch.cuda.get_device_properties(device).total_memory
    else:
        size_bytes = host_bytes() // ranks_per_node
    return Room(size_bytes=size_bytes, gpu=gpu, capped=limit is not None)
