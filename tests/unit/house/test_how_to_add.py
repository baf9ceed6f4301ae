"""CONTRIBUTING.md counts how many files name an example of each thing that can be added."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import mutations
import pytest

ROOT = Path(__file__).parents[3]
ROW = re.compile(r"^\| (an? .+?) \| .+ \| `([\w-]+)`: (\d+) \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))


def names_in(path: Path) -> Iterator[str]:
    """Identifiers and strings of a module, without docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and id(node) not in docstrings:
                yield node.value
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or ""


OTHERS_WORDS = ROOT / "launcher" / "tools" / "plan_from"
"""Turns the names that other trainers give into ours; nothing new of ours has to be added there."""


@pytest.fixture(scope="module")
def names() -> dict[Path, list[str]]:
    files = [path for top in ("launcher", "model") for path in (ROOT / top).rglob("*.py")]
    others = {ROOT / "launcher" / "model", OTHERS_WORDS}
    ours = [path for path in files if others.isdisjoint(path.parents)]
    return {path.relative_to(ROOT): list(names_in(path)) for path in ours}


def test_the_table_counts_every_kind_of_thing() -> None:
    assert len(ROWS) >= 7


@pytest.mark.parametrize(("what", "example", "count"), ROWS)
def test_as_many_files_name_it(
    what: str, example: str, count: str, names: dict[Path, list[str]]
) -> None:
    word = re.compile(rf"(?<![\w-]){re.escape(example)}(?![\w-])")
    found = [
        path for path, own in names.items() if path.stem == example or any(map(word.search, own))
    ]
    assert 1 <= len(found) <= int(count), f"{what} stands in {', '.join(map(str, found))}"


@pytest.mark.parametrize("name", mutations.FAULTS)
def test_a_fault_can_still_be_set(name: str) -> None:
    """The text that tests/mutations.py replaces is in the source, once."""
    fault = mutations.FAULTS[name]
    assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.right) == 1
