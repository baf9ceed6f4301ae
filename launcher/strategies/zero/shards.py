"""The training state of DeepSpeed's ZeRO 0 to 3: fragments of flat fp32 partitions.

Reads DeepSpeed's own bookkeeping of which range of which parameter lies where in the flat
partition. States that DeepSpeed has swapped out are read and written in their files.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from torch import Tensor

from launcher.strategies.flat_shards import (
    PARAM,
    OwnShapes,
    Shard,
    TrainingState,
    counters,
    create_states,
    read_state,
    set_counters,
    state_kinds,
    write_state,
)
from launcher.strategies.native_shards import NativeState
from launcher.strategies.zero.swap import Swapped


def zero_state(engine: Any) -> TrainingState:
    """The state of a DeepSpeed engine of any stage."""
    stage = engine.zero_optimization_stage()
    if stage == 0:  # the optimizer is ours, over whole fp32 parameters
        return NativeState(engine.module, engine.optimizer)
    return _FragmentedState(engine, _slices if stage == 3 else _fragments)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fragment:
    """Elements [start, start + numel) of a parameter lie at flat[offset : offset + numel]."""

    name: str
    shape: tuple[int, ...]
    start: int
    flat: Tensor
    offset: int
    numel: int

    def shard(self, kind: str, flat: Tensor) -> Shard:
        """This range of `flat`, one of the states of the partition."""
        return Shard(
            name=self.name,
            kind=kind,
            shape=self.shape,
            start=self.start,
            data=flat[self.offset : self.offset + self.numel],
        )


class _FragmentedState:
    """`TrainingState` of stages 1, 2 and 3."""

    def __init__(self, engine: Any, fragments: Callable[[Any], Iterator[_Fragment]]) -> None:
        self._engine = engine
        self._outer = engine.optimizer
        self._inner = self._outer.optimizer
        self._find_fragments = fragments
        self._masters = _masters(self._outer)
        groups = self._inner.param_groups
        # At stage 3 a parameter group has several flat partitions.
        group_of = getattr(self._outer, "sub_group_to_group_id", range(len(self._masters)))
        self._swapped = Swapped(self._outer)
        self._swapped.create_states()
        create_states(
            self._inner,
            [
                (groups[group_of[i]], [flat])
                for i, flat in enumerate(self._masters)
                if flat not in self._swapped
            ],
        )
        self.shapes = {
            name: tuple(getattr(p, "ds_shape", p.shape))
            for name, p in engine.module.named_parameters()
        }
        self.kinds = (PARAM, *state_kinds(self._inner, self._masters[0]))
        self.own_shapes: OwnShapes = {}  # what is factored cannot be cut anywhere

    def saved(self) -> Iterator[Shard]:
        """The fp32 master weights and optimizer states of this rank's partition."""
        for _, shards in self._flat_states():
            yield from shards

    def _flat_states(self) -> Iterator[tuple[Callable[[], None], Iterator[Shard]]]:
        """(what to call when they are filled, the shards) of every flat tensor of the state."""
        pieces: dict[Tensor, list[_Fragment]] = {master: [] for master in self._masters}
        for piece in self._find_fragments(self._engine):
            pieces[piece.flat].append(piece)
        for master, kind in product(self._masters, self.kinds):
            if master in self._swapped:
                flat = self._swapped.read(master, kind)
                write = partial(self._swapped.write_through, master, kind)
            else:
                flat = read_state(self._inner, master, kind).detach()
                write = partial(write_state, self._inner, master, kind, flat)
            yield write, (piece.shard(kind, flat) for piece in pieces[master])

    def loaded(self) -> Iterator[Shard]:
        """The same and, at stages 1 and 2, the whole parameters that the model computes with."""
        for write, shards in self._flat_states():
            yield from shards
            write()
        if self._engine.zero_optimization_stage() < 3:
            for name, parameter in self._engine.module.named_parameters():
                data = parameter.detach().view(-1)
                yield Shard(name=name, kind=PARAM, shape=self.shapes[name], start=0, data=data)

    def counters(self) -> dict[str, float]:
        """Adam's step; SGD has none."""
        return counters(self._inner, self._masters[0])

    def finish_load(self, counters: Mapping[str, float]) -> None:
        """Set the counters and, at stage 3, derive the computing slices from the masters."""
        for flat in self._masters:
            set_counters(self._inner.state[flat], counters)
        if self._engine.zero_optimization_stage() == 3:
            # Whole copies of small parameters may be around; the next forward gathers new ones.
            self._outer._partition_all_parameters()
            for number in range(len(self._masters)):
                with self._swapped.in_memory(number):
                    self._outer._reassign_or_swap_out_partitioned_parameters(number)


def _masters(outer: Any) -> list[Tensor]:
    """The flat fp32 partitions, under the name that this one of DeepSpeed's optimizers uses."""
    for name in (
        "fp32_partitioned_groups_flat",  # stage 3
        "single_partition_of_fp32_groups",  # stages 1, 2
        "fp32_groups_flat_partition",  # stage 1 in bf16 with fp32 accumulation
    ):
        if hasattr(outer, name):
            return list(getattr(outer, name))
    raise AssertionError(f"{type(outer).__name__} keeps its fp32 partitions under another name")


def _fragments(engine: Any) -> Iterator[_Fragment]:
    """Stages 1 and 2: the flat group is cut between ranks, anywhere in a parameter."""
    masters = _masters(engine.optimizer)
    for name, parameter in engine.module.named_parameters():
        mapping = parameter._hp_mapping
        if mapping is not None:
            yield _Fragment(
                name=name,
                shape=tuple(parameter.shape),
                start=mapping.lp_fragment_address.start,
                flat=masters[mapping.param_group_index],
                offset=mapping.hp_fragment_address.start,
                numel=mapping.hp_fragment_address.numel,
            )


def _slices(engine: Any) -> Iterator[_Fragment]:
    """Stage 3: every parameter is cut into equal slices, the last one padded."""
    outer = engine.optimizer
    masters = _masters(outer)
    for name, parameter in engine.module.named_parameters():
        group, offset, slice_elements = outer.grad_position[outer.get_param_id(parameter)]
        start = outer._get_param_partition_rank(parameter) * parameter.ds_tensor.ds_numel
        yield _Fragment(
            name=name,
            shape=tuple(parameter.ds_shape),
            start=start,
            flat=masters[group],
            offset=offset,
            numel=max(0, min(slice_elements, parameter.ds_numel - start)),
        )
