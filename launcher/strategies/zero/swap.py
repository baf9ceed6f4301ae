"""Training states that DeepSpeed has swapped out to files, read and written where they lie.

DeepSpeed updates one sub-group of parameters after the other: reads its states into page-locked
buffers, steps, writes them back. In between they are in the rank's swap folder only.
"""

import contextlib
import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launcher.strategies.build_inputs import fill_flat_slice
from launcher.strategies.engine import StorageCount
from launcher.strategies.flat_shards import PARAM, create_states
from launcher.strategies.zero import nvme_build
from launcher.strategies.zero.nvme_folder import swap_folder


class Swapped:
    """The sub-groups of a DeepSpeed optimizer whose states are in files; none without NVMe offload.

    Sub-groups below DeepSpeed's least size stay in host memory; they are none of these.
    """

    def __init__(self, outer: Any) -> None:
        self._outer = outer
        self._number_of: dict[Tensor, int] = {}
        if getattr(outer, "swap_optimizer", False):
            self._swapper = outer.optimizer_swapper
            self._number_of = {
                master: number
                for number, master in enumerate(outer.fp32_partitioned_groups_flat)
                if outer._swappable_optimizer_subgroup(number)
            }

    def __contains__(self, master: Tensor) -> bool:
        return master in self._number_of

    def create_states(self) -> None:
        """Make the optimizer states that the first step would make, one sub-group at a time."""
        inner = self._outer.optimizer
        for master, number in self._number_of.items():
            if not inner.state.get(master):
                group = inner.param_groups[self._outer.sub_group_to_group_id[number]]
                self._outer._optimizer_states_and_gradient_swap_in(number)
                create_states(inner, [(group, [master])])
                self._outer._optimizer_states_and_gradient_swap_out(number)

    def read(self, master: Tensor, kind: str) -> Tensor:
        """Return a flat fp32 state of a sub-group, mapped from its file: nothing is in memory yet,
        and what is written to it goes into the file."""
        path = self._path(master, kind)
        # Pages of an earlier read may be older than what direct I/O has written since.
        _forget_cached(path)
        numel = self._swapper.swap_params_info[self._swapper.parameter_id(master)].numel()
        return torch.from_file(str(path), shared=True, size=numel, dtype=torch.float32)

    def write_through(self, master: Tensor, kind: str) -> None:
        """Put on disk what was written to the mapped file: DeepSpeed reads past the page cache."""
        path = self._path(master, kind)
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        _forget_cached(path)

    @contextlib.contextmanager
    def in_memory(self, number: int) -> Iterator[None]:
        """The master weights of sub-group `number` in memory, to be read only."""
        swapped = number in self._number_of.values()
        if swapped:
            self._outer._optimizer_states_and_gradient_swap_in(number)
        yield
        if swapped:
            self._outer._release_swap_buffers(number)

    def _path(self, master: Tensor, kind: str) -> Path:
        state = master if kind == PARAM else self._outer.optimizer.state[master][kind]
        info = self._swapper.swap_params_info[self._swapper.parameter_id(master)]
        paths: Mapping[int, str] = {id(t.compute_tensor): t.swap_path for t in info.tensors}
        return Path(paths[id(state)])


def place_swap_files(ds_config: dict[str, Any], parent: Path) -> None:
    """Have DeepSpeed swap into a folder of this process's own in `parent`."""
    nvme_build.use_own_ninja()
    _, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (most, most))  # its staging buffers are locked
    folder = swap_folder(parent)
    for name in ("offload_optimizer", "offload_param"):
        section = ds_config["zero_optimization"].get(name, {})
        if section.get("device") == "nvme":
            section["nvme_path"] = str(folder)


def keep_gradients_in_memory(outer: Any) -> None:
    """Have optimizer states swapped, and gradients not.

    A rank's gradients stay in a buffer in host memory all the same, so that writing them to
    files and reading them back would only cost time; and DeepSpeed reads them to where a gradient
    begins in its buffer, which direct I/O may refuse for its alignment, unnoticed: DeepSpeed
    looks at no I/O operation's result.
    """
    swapper = outer.optimizer_swapper
    partitions = outer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
    gradient_at = {
        (group, offset): partitions[ds_id]
        for ds_id, (group, offset, _) in outer.grad_position.items()
    }
    number_of = {
        swapper.parameter_id(master): number
        for number, master in enumerate(outer.fp32_partitioned_groups_flat)
    }

    def note(
        parameter: Tensor, gradient_offsets: list[int], gradient_tensors: list[Tensor]
    ) -> None:
        ds_id = swapper.parameter_id(parameter)
        number = number_of[ds_id]
        info = swapper.swap_params_info[ds_id]
        for offset, gradient in zip(gradient_offsets, gradient_tensors, strict=True):
            held = gradient_at[number, offset][: gradient.numel()]
            info.unswapped_gradients[offset] = held

    swapper.swap_out_gradients = note


def prefetch_each_once(engine: Any) -> None:
    """Have a parameter read once that DeepSpeed asks for twice in one call.

    It looks ahead over the end of the forward, where the last block's parameters come twice, and
    then ends with `param already assigned swap buffer id`.
    """
    swappers = {id(p.nvme_swapper): p.nvme_swapper for p in engine.module.parameters()}
    for swapper in swappers.values():

        def swap_in(params: list[Any], _original: Any = swapper.swap_in, **more: Any) -> None:
            _original(list(dict.fromkeys(params)), **more)

        swapper.swap_in = swap_in


def is_swapped(parameter: Any) -> bool:
    """Return whether a stage 3 parameter's slice is in a file, and not in memory now."""
    swapper = parameter.nvme_swapper
    return swapper is not None and parameter.ds_id in swapper.id_to_path


def fill_swapped(parameter: Any, value: Tensor, offset: int) -> None:
    """Write `value`'s flat range from `offset` into a stage 3 slice that is in a file."""
    swapper = parameter.nvme_swapper
    swapper.swap_in([parameter], async_op=False)
    fill_flat_slice(parameter.ds_tensor.data, value, offset)
    swapper.swap_out_and_release([parameter])


def count_swapped(engine: Any, count: StorageCount) -> None:
    """Add a rank's swap files, and the page-locked buffers they go through, to `count`."""
    outer = engine.optimizer
    optimizer_swapper = getattr(outer, "optimizer_swapper", None)
    if optimizer_swapper is not None:
        count.add("buffers", optimizer_swapper.swap_buffer_manager.all_buffers)
        for info in optimizer_swapper.swap_params_info.values():
            master, *states = info.get_swap_paths()  # the parameter comes first
            count.add_file("master", master)
            for path in states:
                count.add_file("optimizer", path)
    for parameter in engine.module.parameters():
        swapper = getattr(parameter, "nvme_swapper", None)
        if swapper is not None:
            count.add("buffers", [swapper.buffers, swapper.partitioned_swap_buffer])
            for path in swapper.id_to_path.values():
                count.add_file("params", path)


def _forget_cached(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
