"""Where modules of transformers call its attention functions."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Any, Final

from torch import nn

_CALLED: Final = "attention_interface"
"""Local name of the function that transformers looks up by the name of an implementation."""


def calls_attention(module: nn.Module) -> bool:
    """Return whether a module calls transformers' attention functions."""
    return bool(attention_calls(module))


def attention_calls(module: nn.Module) -> list[ast.Call]:
    """Return where the forward of a module calls an attention function."""
    # transformers 5.24 wraps most forwards, to rename an argument.
    return _calls_in(inspect.unwrap(type(module).forward))


@cache
def _calls_in(forward: Any) -> list[ast.Call]:
    if _CALLED not in forward.__code__.co_varnames:
        return []
    nodes = ast.walk(tree_of(forward))
    return [n for n in nodes if isinstance(n, ast.Call) and getattr(n.func, "id", "") == _CALLED]


def tree_of(function: Any) -> ast.AST:
    """Return the syntax tree of a function's source."""
    return ast.parse(textwrap.dedent(inspect.getsource(function)))
