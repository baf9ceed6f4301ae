"""Share out elements among the alternatives that a loop goes through, such as levels or classes.

`for level in range(4): rows[levels == level]` selects each row in one turn, so each turn gets an
equal share.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator
from typing import Any

from shardscale_observer.rules import variables_of

_AROUND = ("enumerate", "zip", "reversed", "tqdm")
"""Functions whose first argument has as many elements as their result."""
_LOOKS_UP = (
    *(ast.Expression, ast.Name, ast.Attribute, ast.Constant, ast.Load, ast.Call),
    *(ast.BinOp, ast.operator, ast.Subscript),
)
"""Parts of an expression that may be evaluated once more; of calls those of `len` and `range`."""


def share_of_turn(frame: Any, most: int) -> tuple[int, int] | None:
    """Return (elements that one turn has, turns) where the frame's line selects those of `most`
    that are equal to a loop's variable; None elsewhere."""
    variables = variables_of(frame)
    for loop in _loops(frame.f_code.co_filename, frame.f_lineno):
        alternatives = {name for name in _names(loop.target) if _is_one(variables.get(name))}
        for compared in _compared(loop, frame.f_lineno, alternatives):
            turns = _length(loop.iter, frame.f_globals, variables)
            values: Any = variables.get(compared.id) if isinstance(compared, ast.Name) else None
            # a mask of tokens is smaller than the choices that it was made of
            count = max(values.numel() if hasattr(values, "numel") else most, most)
            if turns and (share := -(-count // turns)) < most:
                return share, turns
    return None


@functools.cache
def _tree(file: str) -> Any:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


@functools.cache
def _loops(file: str, line: int) -> list[ast.For]:
    """Return the loops around a line, the innermost first."""
    loops = [node for node in ast.walk(_tree(file)) if isinstance(node, ast.For)]
    around = [loop for loop in loops if loop.body[0].lineno <= line <= (loop.end_lineno or 0)]
    return sorted(around, key=lambda loop: -loop.lineno)


def _compared(loop: ast.For, line: int, variables: set[str]) -> Iterator[ast.expr]:
    """Yield what a line, or what it uses of the lines before it, compares with the loop's
    variables."""
    names = None
    inside = [one for part in loop.body for one in ast.walk(part) if isinstance(one, ast.stmt)]
    for statement in sorted(inside, key=lambda one: -one.lineno):
        if statement.lineno > line or hasattr(statement, "body"):
            continue
        if names is None:  # the line itself
            names = _names(statement)
        elif isinstance(statement, ast.Assign) and names & _names(*statement.targets):
            names |= _names(statement.value)
        else:
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
                sides = (node.left, node.comparators[0])
                for one, other in (sides, sides[::-1]):
                    if isinstance(one, ast.Name) and one.id in variables:
                        yield other


def _is_one(value: Any) -> bool:
    """Return True for a number or a name, which one element may be equal to."""
    return isinstance(value, (int, str)) or (hasattr(value, "numel") and value.numel() == 1)


def _names(*nodes: ast.AST) -> set[str]:
    every = (one for node in nodes for one in ast.walk(node))
    return {one.id for one in every if isinstance(one, ast.Name)}


def _length(node: ast.expr, *names: dict[str, Any]) -> int | None:
    while isinstance(node, ast.Call) and node.args and _called(node) in _AROUND:
        node = node.args[0]
    try:
        return len(_value(node, *names))
    except TypeError:  # a generator, or not known
        return None


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _value(node: ast.expr, *names: dict[str, Any]) -> Any:
    """Return an expression's value, if to evaluate it changes nothing; else None."""
    for one in ast.walk(node):
        if not isinstance(one, _LOOKS_UP):
            return None
        if isinstance(one, ast.Call) and _called(one) not in ("len", "range"):
            return None
    code = compile(ast.Expression(node), "<loop>", "eval")
    try:
        return eval(code, *names)
    except Exception:
        return None
