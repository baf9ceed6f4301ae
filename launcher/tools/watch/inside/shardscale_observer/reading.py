"""Read off a module's inputs and outputs what the records say of a step."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any


def _tensors(args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) of a call's arguments, and of dictionaries among them."""
    for name, value in [*(("", value) for value in args), *kwargs.items()]:
        inner = value.items() if hasattr(value, "items") else [(name, value)]
        for key, one in inner:
            if hasattr(one, "is_floating_point") and hasattr(one, "dim"):
                yield str(key), one


def _tokens(args: Any, kwargs: Any) -> Any:
    """Return the tensor of token ids [B, T]: `input_ids`, or the first of integers; else None.

    Integers after an unnamed tensor of numbers are something else: edges of a graph, indices.
    """
    found = list(_tensors(args, kwargs))
    for name, tensor in found:
        if name == "input_ids" and tensor.dim() == 2:
            return tensor
    for name, tensor in found:
        if not name and tensor.is_floating_point():
            return None
        if tensor.dim() == 2 and not tensor.is_floating_point():
            return tensor
    return None


def batch_shape(args: Any, kwargs: Any) -> tuple[int | None, int | None]:
    """Return (micro-batch, sequence length) of a forward's inputs; None where there are none."""
    ids = _tokens(args, kwargs)
    if ids is not None:
        return int(ids.shape[0]), int(ids.shape[1])
    first = next((tensor for _, tensor in _tensors(args, kwargs) if tensor.dim() > 1), None)
    return (None if first is None else int(first.shape[0])), None


def tokens_in(before: int | None, args: Any, kwargs: Any, ranks: int) -> int | None:
    """Return the tokens of a step so far, with those of one more forward on each of `ranks`."""
    ids = _tokens(args, kwargs)
    return before if ids is None else (before or 0) + ranks * int(ids.numel())


def loss_of(output: Any) -> Callable[[], float | None] | None:
    """Return a function that reads a loss later, without making the device wait; None for other
    outputs than one number.

    On a GPU it copies on a stream of its own, and is called when the device has passed the step.
    """
    torch: Any = sys.modules["torch"]
    if type(output) is not torch.Tensor or output.numel() != 1:
        return None
    if output.device.type == "cpu":
        value = float(output.detach())
        return lambda: value
    kept = output.detach()

    def read() -> float | None:
        with torch.cuda.stream(torch.cuda.Stream(kept.device)):
            return float(kept)

    return read


def describe(torch: Any, module: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return fields of the run's record, read off a root module and its first inputs.

    `strategy` are the names of the modules that wrap the model.
    """
    wrappers, inner = [], getattr(module, "_orig_mod", module)  # of torch.compile
    while inner is not None and inner is not getattr(inner, "module", inner):
        wrappers.append(type(inner).__name__)
        inner = getattr(inner.module, "_orig_mod", inner.module)
    # fully_shard puts FSDP in front of the name of the class
    if inner is not None and type(inner).__name__.startswith("FSDP"):
        wrappers.append("FSDP2")
    parameters = [] if module is None else list(module.parameters())
    dtypes = {str(p.dtype).rpartition(".")[2] for p in parameters if p.is_floating_point()}
    precision = " and ".join(sorted(dtypes)) or "unknown"
    if torch.is_autocast_enabled():
        precision += ", autocast"
    micro_batch, seq_len = batch_shape(args, kwargs)
    return {
        "micro_batch": micro_batch,
        "seq_len": seq_len,
        "strategy": " over ".join(wrappers),
        "strategy_also_called": "",
        "precision": precision,
        "model": "unknown" if inner is None else type(inner).__name__.removeprefix("FSDP"),
        "parameters": 0 if module is None else parameters_of(module),
    }


def parameters_of(module: Any) -> int:
    """Return how many parameters a module has, of all ranks where they are sharded."""
    handles: list[Any] = [getattr(one, "_handle", None) for one in module.modules()]  # of FSDP1
    flat = [one.flat_param for one in handles if hasattr(one, "flat_param")]
    inside = {id(p) for one in flat for p in (one, *(one._params or ()))}
    others = [p for p in module.parameters() if id(p) not in inside]
    return sum(sum(one._numels) for one in flat) + sum(
        int(getattr(p, "ds_numel", p.numel())) for p in others
    )


def is_trainable(module: Any) -> bool:
    """Return False for a module whose parameters are all frozen, such as a text encoder's."""
    parameters = list(module.parameters())
    return not parameters or any(parameter.requires_grad for parameter in parameters)


def data_ranks(module: Any, strategy: str, world_size: int) -> int | None:
    """Return how many ranks read different samples: those of the wrapper's own group, as ranks of
    tensor parallelism share theirs; None without a wrapper that is known to shard batches."""
    if world_size == 1 or not strategy:
        return world_size if world_size == 1 else None
    outer = getattr(module, "_orig_mod", module)
    if strategy.endswith("FSDP2"):
        sharded = [one for one in outer.modules() if hasattr(one, "_get_fsdp_state")]
        states = [one._get_fsdp_state() for one in sharded]
        # torch 2.11 has at most one.
        several = [getattr(s, "_fsdp_param_groups", None) or [s._fsdp_param_group] for s in states]
        sizes = [group.mesh_info.mesh.size() for groups in several for group in groups if group]
        return int(sizes[0]) if sizes else world_size
    if type(outer).__name__ == "DistributedDataParallel":
        return int(outer.process_group.size())
    return int(getattr(outer, "dp_world_size", world_size))  # DeepSpeed's


def makes_optimizers(torch: Any) -> bool:
    """Return True if the program has an optimizer, which has perhaps not stepped yet."""
    return any(issubclass(type(one), torch.optim.Optimizer) for one in gc.get_objects())


def alive(turns: set[frozenset[int]], optimizers: Any) -> set[frozenset[int]]:
    """Return those sets of optimizers, by their ids, that are there still: Reptile, for one, makes
    a new optimizer for each task."""
    ids = set(map(id, optimizers))
    return {turn for turn in turns if turn <= ids}


LIBRARIES = {
    "trl": "trl.trainer",
    "transformers": "transformers.trainer",
    "deepspeed": "deepspeed",
    "lightning": "lightning.fabric",
    "accelerate": "accelerate.accelerator",
}
"""Library that trains -> the module that is imported where it does; the outermost first."""


def libraries_in_use() -> list[str]:
    """Return the libraries that train, of those that the program has imported."""
    return [name for name, module in LIBRARIES.items() if module in sys.modules]


def recurrent_networks() -> list[str]:
    """Return the kinds of networks that a rehearsal has run by other kernels than cuDNN's."""
    module: Any = sys.modules.get("shardscale_rehearsal.recurrent")
    return sorted(module.used) if module is not None else []


def prepares_data(recorder: Any, module: Any) -> bool:
    """Return True for a transform of samples, in a loader's process or this one, and for one of a
    weight, such as its norm."""
    if type(module).__name__ == "ParametrizationList":
        return True
    if recorder.torch.utils.data.get_worker_info() is not None:
        return True
    before = recorder.file is None or recorder.phase == "data"
    return before and next(module.parameters(), None) is None
