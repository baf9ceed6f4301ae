"""The training state of DeepSpeed's ZeRO 0 to 3: fragments of flat fp32 partitions.

Reads DeepSpeed's own bookkeeping of which range of which parameter lies where in the flat
partition. Optimizer states that DeepSpeed has swapped out to NVMe are not in memory to be read.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from launcher.strategies.flat_shards import (
    PARAM,
    Shard,
    TrainingState,
    counters,
    create_states,
    set_counters,
    state_kinds,
)
from launcher.strategies.native_shards import NativeState


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
        create_states(
            self._inner, [(groups[group_of[i]], [flat]) for i, flat in enumerate(self._masters)]
        )
        self.shapes = {
            name: tuple(getattr(p, "ds_shape", p.shape))
            for name, p in engine.module.named_parameters()
        }
        self._state_kinds = state_kinds(self._inner, self._masters[0])
        self.kinds = (PARAM, *self._state_kinds)

    def saved(self) -> Iterator[Shard]:
        """The fp32 master weights and optimizer states of this rank's partition."""
        for piece in self._find_fragments(self._engine):
            state = self._inner.state[piece.flat]
            flats = {PARAM: piece.flat, **{kind: state[kind] for kind in self._state_kinds}}
            for kind, flat in flats.items():
                yield Shard(
                    name=piece.name,
                    kind=kind,
                    shape=piece.shape,
                    start=piece.start,
                    data=flat.detach()[piece.offset : piece.offset + piece.numel],
                )

    def loaded(self) -> Iterator[Shard]:
        """The same and, at stages 1 and 2, the whole parameters that the model computes with."""
        yield from self.saved()
        if self._engine.zero_optimization_stage() < 3:
            for name, parameter in self._engine.module.named_parameters():
                data = parameter.detach().view(-1)
                yield Shard(name=name, kind=PARAM, shape=self.shapes[name], start=0, data=data)

    def counters(self) -> dict[str, float]:
        """Adam's step."""
        return counters(self._inner, self._masters[0])

    def finish_load(self, counters: Mapping[str, float]) -> None:
        """Set the counters and, at stage 3, derive the computing slices from the masters."""
        for flat in self._masters:
            set_counters(self._inner.state[flat], counters)
        if self._engine.zero_optimization_stage() == 3:
            # Whole copies of small parameters may be around; the next forward gathers new ones.
            self._outer._partition_all_parameters()
            for number in range(len(self._masters)):
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
