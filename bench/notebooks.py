"""Runs the notebooks of examples/ and stores what their cells show, without Jupyter.

python bench/notebooks.py [NOTEBOOK ...]
"""

import argparse
import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_cells(path: Path) -> dict[str, Any]:
    """Return the notebook with the outputs of its cells, run in order."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": path.stem}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        cell["execution_count"] = number
        cell["outputs"] = run_cell("".join(cell["source"]), names, number)
    return notebook


def run_cell(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Run a cell; return what it prints and the value of its last expression, as outputs."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines_of(text)})
    if value is not None:
        data = {"text/plain": lines_of(repr(value))}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = lines_of(value._repr_html_())
        result = {"output_type": "execute_result", "execution_count": number}
        outputs.append({**result, "data": data, "metadata": {}})
    return outputs


def lines_of(text: str) -> list[str]:
    """Split text as notebooks store it."""
    return text.splitlines(keepends=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="all of examples/ if none")
    for path in parser.parse_args().notebooks or sorted(EXAMPLES.glob("*.ipynb")):
        text = json.dumps(run_cells(path), indent=1, ensure_ascii=False) + "\n"
        path.write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
