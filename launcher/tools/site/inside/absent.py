"""Stands for packages that a browser does not have, so that modules which name them can be loaded.

The planner's modules stand beside those that train, and import what these need. Nothing of it is
called while a run is planned; of torch only the sizes of its types are asked for.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

_ITEM_BYTES: Final = {
    **{"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
    **{"float8_e4m3fn": 1, "float8_e5m2": 1},
}


class Absent(type):
    """A class whose attributes, and what a call of it gives, are such classes, too: it can be a
    base class, a decorator and an annotation."""

    def __getattr__(cls, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(name, (), {})

    def __call__(cls, *args: Any, **kwargs: Any) -> "Absent":
        return Absent("result", (), {})

    def __getitem__(cls, key: Any) -> "Absent":
        return cls

    def __bool__(cls) -> bool:
        return False  # torch.cuda.is_available() and the like

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class DType:
    """One of torch's types of numbers."""

    def __init__(self, name: str, itemsize: int) -> None:
        self.name, self.itemsize = name, itemsize

    def __repr__(self) -> str:
        return f"torch.{self.name}"


class _Package(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Iterable[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Package(spec.name)
        if spec.name == "torch":
            vars(module).update({name: DType(name, size) for name, size in _ITEM_BYTES.items()})
            vars(module).update(dtype=DType, __version__="absent")
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """It has nothing to run."""


def stand_in(packages: Iterable[str]) -> None:
    """From now on these can be imported, before any that are really there."""
    sys.meta_path.insert(0, _Finder(packages))
