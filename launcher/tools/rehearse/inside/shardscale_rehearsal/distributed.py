"""Support torch.distributed in a rehearsal: values of small tensors, and a world of one rank.

torch's object collectives send sizes, add them up on the device, and read them: with a wrong sum
they fail.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

OBJECT_COLLECTIVES = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
METHODS = {
    # DTensor sends rank 0's state of the generator, and gives what arrives to its own.
    "torch.distributed.tensor._random": ("OffsetBasedRNGTracker", "__init__"),
    # Stages of a pipeline vote whether all know their inputs' shapes.
    "torch.distributed.pipelining.schedules": ("_PipelineSchedule", "_warmup_p2p"),
    # Ranks of Lightning agree on an end, on the best checkpoint, and on whether a file is there.
    "lightning.pytorch.strategies.parallel": ("ParallelStrategy", "reduce_boolean_decision"),
    "pytorch_lightning.strategies.parallel": ("ParallelStrategy", "reduce_boolean_decision"),
}
"""Module -> its class, and the method that sends values and reads them."""


def prepare(module: Any) -> None:
    """Follow the object collectives; start a group alone where the environment says so."""
    for function in OBJECT_COLLECTIVES:
        if hasattr(module, function):
            setattr(module, function, _followed(getattr(module, function)))
    if os.environ.get("SHARDSCALE_NULL_GPU_ALONE") == "1":
        module.init_process_group = _alone(module.init_process_group)
        module.new_group = _without_gloo(module.new_group)
        if hasattr(module, "split_group"):
            module.split_group = _by_new_groups(module)
        # torch allows it for Gloo groups only, and these are fake here
        module.monitored_barrier = _passes
        module.ProcessGroup.monitored_barrier = _passes


def prepare_methods(module: Any) -> None:
    """Follow the module's method that reads what ranks have sent, if its torch has that one."""
    owner, name = METHODS[module.__name__]
    class_ = getattr(module, owner, None)
    if hasattr(class_, name):
        setattr(class_, name, _followed(getattr(class_, name)))


def _followed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def follow(*args: Any, **kwargs: Any) -> Any:
        library = ctypes.CDLL(None)
        library.shardscale_follow(True)
        try:
            from shardscale_rehearsal.follow import Follow

            with Follow(library):
                return function(*args, **kwargs)
        finally:
            library.shardscale_follow(False)

    return follow


def _alone(init_process_group: Callable[..., Any]) -> Callable[..., Any]:
    """Start a group without the other ranks of the environment's world."""

    @functools.wraps(init_process_group)
    def init(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        from torch.distributed import HashStore

        backend = _fake_gloo(backend or "cpu:gloo,cuda:nccl")
        for name in ("init_method", "store"):
            # a TCPStore waits for the other ranks; the HashStore below is of this process alone
            kwargs.pop(name, None)
        for name in ("rank", "world_size"):
            if kwargs.get(name, -1) == -1:  # DeepSpeed gives -1 for "as the environment says"
                kwargs[name] = int(os.environ[name.upper()])
        return init_process_group(backend, store=HashStore(), **kwargs)

    return init


def _without_gloo(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """Open groups of the host's memory without Gloo, which connects to every rank."""

    @functools.wraps(new_group)
    def group(ranks: Any = None, timeout: Any = None, backend: Any = None, **kwargs: Any) -> Any:
        return new_group(ranks, timeout, backend and _fake_gloo(backend), **kwargs)

    return group


def _by_new_groups(module: Any) -> Callable[..., Any]:
    """Open the groups that NCCL would split from another: the fake ones have no split."""

    @functools.wraps(module.split_group)
    def split(
        parent_pg: Any = None, split_ranks: Any = None, timeout: Any = None, *_: Any, **kwargs: Any
    ) -> Any:
        own = None
        for part in split_ranks:
            ranks = [module.get_global_rank(parent_pg, r) for r in part] if parent_pg else part
            group = module.new_group(ranks, timeout, group_desc=kwargs.get("group_desc"))
            if module.get_rank() in ranks:
                own = group
        return own

    return split


def _fake_gloo(backend: str) -> str:
    """Name torch's own backend that sends nothing, in which ranks answer as this one does."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    return str(backend).lower().replace("gloo", "fake")


def _passes(*_: Any, **__: Any) -> None:
    """Be a barrier that all ranks have reached."""
