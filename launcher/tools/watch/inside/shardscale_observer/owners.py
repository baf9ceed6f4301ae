"""Storages of parameters, gradients and optimizer states, with the modules that they belong to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

STATES = ("params", "frozen", "master", "masks", "grads", "optimizer", "buffers")
WRAPPERS = (
    *("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"),
    "_forward_module",  # Lightning Fabric's
)


class Owners:
    """Who holds which storage: category and module per storage, each storage once."""

    are_sought = False
    """True meanwhile: a tensor of a library's own kind, as torchao's, may read a value to say what
    it consists of, which the program does not."""

    def __init__(
        self,
        modules: Iterable[Any],
        optimizers: Iterable[Any],
        prefixes: Mapping[Any, str] = MappingProxyType({}),
    ) -> None:
        """`prefixes` stand in front of the names in a module."""
        self.entries: dict[int, tuple[str, str, str, int]] = {}
        """Address -> (category, module, device type, bytes)."""
        Owners.are_sought = True
        try:
            self._seek(modules, optimizers, prefixes)
        finally:
            Owners.are_sought = False

    def _seek(
        self, modules: Iterable[Any], optimizers: Iterable[Any], prefixes: Mapping[Any, str]
    ) -> None:
        names: dict[int, str] = {}
        for module in modules:
            prefix = prefixes.get(module, "")
            for name, parameter in module.named_parameters():
                owner = module_of(prefix + name)
                names.setdefault(id(parameter), owner)
                self._add("params" if parameter.requires_grad else "frozen", owner, parameter)
                # ZeRO-3's shard; the parameter itself is empty between uses
                self._add("params", owner, getattr(parameter, "ds_tensor", None))
                self._add("grads", owner, parameter.grad)
            for name, buffer in module.named_buffers():
                self._add("frozen", module_of(prefix + name), buffer)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    owner = names.get(id(parameter), "(optimizer)")
                    self._add("master", owner, parameter)  # where the module does not hold it
                    self._add("grads", owner, parameter.grad)
            for parameter, state in optimizer.state.items():
                owner = names.get(id(parameter), "(optimizer)")
                for value in state.values() if isinstance(state, dict) else ():
                    self._add("optimizer", owner, value)

    def bytes_by_category(self, device_type: str) -> dict[str, int]:
        """Return category -> bytes on a kind of device."""
        totals: dict[str, int] = {}
        for category, _, device, size in self.entries.values():
            if device == device_type:
                totals[category] = totals.get(category, 0) + size
        return totals

    def ledger(self, *, on_gpu: bool) -> dict[str, dict[str, int]]:
        """Return place -> line of the ledger -> bytes."""
        kinds = {"device": "cuda" if on_gpu else "cpu", "host": "cpu" if on_gpu else "", "disk": ""}
        nothing = {f"{name}_bytes": 0 for name in STATES}
        return {
            place: {
                **nothing,
                **{f"{name}_bytes": n for name, n in self.bytes_by_category(kind).items()},
            }
            for place, kind in kinds.items()
        }

    def on_device(self, device_type: str) -> dict[int, tuple[str, str]]:
        """Return address -> (category, module) on a kind of device."""
        return {
            address: (category, module)
            for address, (category, module, device, _) in self.entries.items()
            if device == device_type
        }

    def _add(self, category: str, module: str, value: Any) -> None:
        for tensor in _plain(value):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # no storage
                storage = tensor.untyped_storage()
                size = storage.nbytes()
                if size and tensor.device.type != "meta":
                    entry = (category, module, tensor.device.type, size)
                    # the first owner stays, so tied weights and views count once
                    self.entries.setdefault(storage.data_ptr(), entry)


def module_of(parameter: str) -> str:
    """Return the module of a parameter, without the wrappers of libraries."""
    return unwrapped(parameter).rpartition(".")[0] or "(the model itself)"


def unwrapped(name: str) -> str:
    """Return a name in a model without the wrappers of libraries."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _plain(value: Any) -> Iterator[Any]:
    """Yield the tensors with memory of their own that a value consists of."""
    if isinstance(value, (list, tuple)):  # the history of LBFGS, the factors of Shampoo
        for one in value:
            yield from _plain(one)
        return
    if value is None or not hasattr(value, "untyped_storage"):
        return
    local = getattr(value, "_local_tensor", None)
    if local is not None:
        yield from _plain(local)
    elif value.is_sparse:  # an embedding's gradient
        yield from (value._indices(), value._values())
    elif hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from _plain(getattr(value, name))
    else:
        yield value
