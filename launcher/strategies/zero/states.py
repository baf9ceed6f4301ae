"""The training state of DeepSpeed's ZeRO 0 to 3: what it holds, and as fragments of flat fp32
partitions.

Reads DeepSpeed's own bookkeeping of which range of which parameter lies where in the flat
partition. States that DeepSpeed has swapped out are read and written in their files.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from torch import Tensor

from launcher.parallel.model_parallel import ModelShards
from launcher.strategies.engine import StorageCount
from launcher.strategies.flat_shards import (
    PARAM,
    OwnShapes,
    Shard,
    TrainingState,
    Updated,
    UpdatedRange,
    counters,
    create_states,
    reads_in_pieces,
    set_counters,
    state_kinds,
    state_of,
)
from launcher.strategies.native_state import ModelShardState, native_state
from launcher.strategies.zero.swap import Swapped, count_swapped

MASTER_WEIGHTS = (
    "single_partition_of_fp32_groups",  # stages 1, 2
    "fp32_partitioned_groups_flat",  # stage 3
    "fp32_groups_flat_partition",  # stage 1 with fp32 accumulation
)
GRADIENTS = (
    "averaged_gradients",
    "grad_partitions_flat_buffer",
    "all_grad_tensors",
    "fp32_groups_gradients_flat",
    "accumulated_grads_in_cpu",
    "temp_grad_buffer_for_cpu_offload",
    "temp_grad_buffer_for_gpu_offload",
    "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",
)
PARAMETERS = ("bit16_groups_flat", "fp16_partitioned_groups_flat", "lp_param_buffer")


def masters_of(outer: Any) -> list[Tensor]:
    """Return the flat fp32 partitions of one of DeepSpeed's optimizers."""
    return list(next(getattr(outer, name) for name in MASTER_WEIGHTS if hasattr(outer, name)))


def count_states(engine: Any) -> StorageCount:
    """Return everything that a DeepSpeed engine holds between two steps."""
    count = StorageCount()
    outer = engine.optimizer
    inner = getattr(outer, "optimizer", outer)  # stage 0 has one optimizer
    parameters = list(engine.module.parameters())
    count_swapped(engine, count)  # first: states that were swapped out may still name its buffers
    masters = list(_held(outer, MASTER_WEIGHTS))
    updated = [p for group in inner.param_groups for p in group["params"]]
    count.add("optimizer", _tensors(inner.state))
    count.add("master", masters)
    for parameter in parameters:
        mapping = getattr(parameter, "_hp_mapping", None)
        count.add("master", _tensors(getattr(mapping, "hp_fragment", None)))
    count.add("grads", _held(outer, GRADIENTS))
    count.add("grads", [p.grad for p in (*parameters, *updated, *masters)])
    count.add("grads", [getattr(p, "grad_accum", None) for p in parameters])
    for bucket in (getattr(outer, "ipg_buckets", None) or {}).values():
        count.add("buffers", _tensors(getattr(bucket, "buffer", None)))
    count.add("params", _held(outer, PARAMETERS))
    trained, frozen = (
        [p for p in parameters if p.requires_grad is wanted] for wanted in (True, False)
    )
    for category, own in (("params", trained), ("frozen", frozen)):
        count.add(category, [getattr(p, "ds_tensor", None) for p in own])
        count.add(category, [p.data for p in own])
    return count


def _held(outer: Any, names: Sequence[str]) -> Iterator[Tensor]:
    return _tensors([getattr(outer, name, None) for name in names])


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _tensors(item)


def zero_state(engine: Any, shards: ModelShards | None) -> TrainingState:
    """Return the state of a DeepSpeed engine of any stage."""
    stage = engine.zero_optimization_stage()
    if stage == 0:  # the optimizer is ours, over fp32 parameters that are not sharded
        return native_state(engine.module, engine.optimizer, shards)
    state = _FragmentedState(engine, _slices if stage == 3 else _fragments)
    return state if shards is None else ModelShardState(state, shards)


_Fragments = Callable[[Any, Sequence[Tensor]], Iterator[UpdatedRange]]
"""(engine, its flat fp32 partitions) -> the range of each parameter in a partition."""


class _FragmentedState:
    """`TrainingState` of stages 1, 2 and 3."""

    def __init__(self, engine: Any, fragments: _Fragments) -> None:
        self._engine = engine
        self._outer = engine.optimizer
        self._inner = self._outer.optimizer
        self._find_fragments = fragments
        self._masters = masters_of(self._outer)
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
        self._parameters = dict(engine.module.named_parameters())
        self.shapes = {
            name: tuple(getattr(p, "ds_shape", p.shape))
            for name, p in self._parameters.items()
            if p.requires_grad
        }
        self.kinds = (PARAM, *state_kinds(self._inner, self._masters[0]))
        self.own_shapes: OwnShapes = {}  # factored states cannot be partitioned

    def saved(self) -> Iterator[Shard]:
        """Yield the fp32 master weights and optimizer states of this rank's partition."""
        return self._partitions(filled=False)

    def _partitions(self, *, filled: bool) -> Iterator[Shard]:
        """Yield the fragments of every flat tensor of the state; `filled`: with other values before
        the next one is asked for."""
        fragments = list(self._find_fragments(self._engine, self._masters))
        for master, kind in product(self._masters, self.kinds):
            here = [fragment for fragment in fragments if fragment.tensor is master]
            for begin, flat in self._pieces(master, kind, filled=filled):
                for fragment in here:
                    low = max(fragment.offset, begin)
                    high = min(fragment.offset + fragment.numel, begin + flat.numel())
                    if low < high:
                        yield Shard(
                            name=fragment.name,
                            kind=kind,
                            start=fragment.start + low - fragment.offset,
                            data=flat[low - begin : high - begin],
                        )

    def _pieces(self, master: Tensor, kind: str, *, filled: bool) -> Iterator[tuple[int, Tensor]]:
        if master in self._swapped:
            yield 0, self._swapped.read(master, kind)
            if filled:
                self._swapped.write_through(master, kind)
        elif reads_in_pieces(self._inner):
            yield from self._inner.pieces(master, kind, filled=filled)
        else:
            yield 0, state_of(self._inner, master, kind).detach()

    def loaded(self) -> Iterator[Shard]:
        """Yield the ranges of `saved` and, at stages 1 and 2, the full parameters that compute."""
        yield from self._partitions(filled=True)
        if self._engine.zero_optimization_stage() < 3:
            for name in self.shapes:
                data = self._parameters[name].detach().view(-1)
                yield Shard(name=name, kind=PARAM, start=0, data=data)

    def frozen(self) -> Iterator[Shard]:
        """Yield full parameters at stages 1 and 2, slices at stage 3."""
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                continue
            if self._engine.zero_optimization_stage() < 3:
                yield Shard(name=name, kind=PARAM, start=0, data=parameter.detach().view(-1))
            else:
                local = parameter.ds_tensor
                start = self._outer._get_param_partition_rank(parameter) * local.ds_numel
                numel = max(0, min(local.ds_numel, parameter.ds_numel - start))
                yield Shard(name=name, kind=PARAM, start=start, data=local.data.view(-1)[:numel])

    def updated(self) -> Updated:
        """Return the master weights; DeepSpeed copies from them what is computed with."""
        return self._inner, list(self._find_fragments(self._engine, self._masters))

    def counters(self) -> dict[str, float]:
        """Return Adam's step; SGD has none."""
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


def _fragments(engine: Any, masters: Sequence[Tensor]) -> Iterator[UpdatedRange]:
    """Stages 1 and 2: the flat group is partitioned between ranks, anywhere in a parameter."""
    for name, parameter in engine.module.named_parameters():
        mapping = getattr(parameter, "_hp_mapping", None)  # none of what is frozen
        if mapping is not None:
            start, held = mapping.lp_fragment_address.start, mapping.hp_fragment_address
            tensor = masters[mapping.param_group_index]
            yield UpdatedRange(
                name=name, start=start, numel=held.numel, tensor=tensor, offset=held.start
            )


def _slices(engine: Any, masters: Sequence[Tensor]) -> Iterator[UpdatedRange]:
    """Stage 3: every parameter is partitioned into equal slices, the last one padded."""
    outer = engine.optimizer
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        number, offset, slice_elements = outer.grad_position[outer.get_param_id(parameter)]
        start = outer._get_param_partition_rank(parameter) * parameter.ds_tensor.ds_numel
        numel = max(0, min(slice_elements, parameter.ds_numel - start))
        tensor = masters[number]
        yield UpdatedRange(name=name, start=start, numel=numel, tensor=tensor, offset=offset)
