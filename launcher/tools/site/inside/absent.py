"""Placeholders for packages that a browser lacks, so that modules which import them load.

The planner's modules import some that train. Planning calls nothing of these packages; of torch it
only reads the sizes of data types.
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
    """A class whose attributes and call results are such classes again: usable as a base class,
    decorator and annotation."""

    def __getattr__(cls, name: str) -> "Absent":
        return _attribute(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> "Absent":
        return Absent("result", (), {})

    def __getitem__(cls, key: Any) -> "Absent":
        return cls

    def __bool__(cls) -> bool:
        return False  # torch.cuda.is_available() and the like

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


def _attribute(name: str) -> Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(name, (), {})


class DType:
    """A torch data type."""

    def __init__(self, name: str, itemsize: int) -> None:
        self.name, self.itemsize = name, itemsize

    def __repr__(self) -> str:
        return f"torch.{self.name}"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Iterable[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        """Fill a placeholder: it has no code."""
        vars(module)["__getattr__"] = _attribute
        if module.__name__ == "torch":
            vars(module).update({name: DType(name, size) for name, size in _ITEM_BYTES.items()})
            vars(module).update(dtype=DType, __version__="absent")


def stand_in(packages: Iterable[str]) -> None:
    """Make these packages importable, ahead of installed ones."""
    sys.meta_path.insert(0, _Finder(packages))
