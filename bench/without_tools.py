"""Remove each tool from a copy of the tree and check that everything else still works.

    python bench/without_tools.py             # every tool
    python bench/without_tools.py serve prune # these

A tool is a folder of launcher/tools/ (or a single file there). Without it, `--help`, `plan --help`,
`report --help` and two training steps on the CPU must succeed, all other modules must import, and
the verbs of the tool, and no other, must be refused with one sentence. Prints a table; exit code 1
if anything failed.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = Path("launcher", "tools")
NEEDED_BY = {"watch": ("rehearse",)}
"""Tool -> those that go with it."""
TRAINING = (
    *("-m", "launcher.train", "--model", "nano", "--layers", "1", "--steps", "2"),
    *("--d-model", "32", "--heads", "2", "--seq-len", "32", "--micro-batch", "2"),
    *("--test-batches", "1", "--device", "cpu", "--log-level", "warning", "--out"),
)
VERBS_PROBE = "import json, launcher.__main__ as m; print(json.dumps([m.ALL_VERBS, m.VERBS]))"
# Prints the modules that cannot be imported: of the whole tree, those that need a GPU's compiler.
IMPORT_ALL = """
import importlib, sys
from pathlib import Path
import torch
root = Path.cwd()
for path in sorted(root.glob("launcher/**/*.py")) + sorted(root.glob("model/**/*.py")):
    parts = path.relative_to(root).with_suffix("").parts
    parts = ("launcher", *parts) if parts[0] == "model" else parts
    name = ".".join(parts).removesuffix(".__init__")
    try:
        importlib.import_module(name)
    except Exception as error:
        print("broken:", name, type(error).__name__, error)
"""


def tools() -> Iterator[Path]:
    """Yield what stands alone in launcher/tools/, relative to the root."""
    for path in sorted((ROOT / TOOLS).iterdir()):
        is_folder = (path / "__init__.py").exists()
        if is_folder or (path.suffix == ".py" and path.name != "__init__.py"):
            yield path.relative_to(ROOT)


def copy_tree(target: Path) -> None:
    """Copy the package and the folders that links inside it point to."""
    for name in ("launcher", "model", "slurm", "ds_configs"):
        shutil.copytree(
            ROOT / name, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the copy, which its imports come from."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )


def failures(tree: Path, expected_broken: Sequence[str]) -> list[str]:
    """Check the copy; one entry per failed check."""
    checks = {
        "--help": ("-m", "launcher", "--help"),
        "plan --help": ("-m", "launcher", "plan", "--help"),
        "report --help": ("-m", "launcher", "report", "--help"),
        "training": (*TRAINING, str(tree / "run")),
    }
    failed = []
    for name, arguments in checks.items():
        done = run(tree, *arguments)
        if done.returncode:
            failed.append(f"{name}: {(done.stderr.splitlines() or ['?'])[-1]}")
    failed += [line for line in broken_imports(tree) if line not in expected_broken]
    present = json.loads(run(tree, "-c", VERBS_PROBE).stdout)
    for verb in present[0].keys() - present[1].keys():
        done = run(tree, "-m", "launcher", verb)
        if done.returncode != 2 or len(done.stderr.splitlines()) != 1 or done.stdout:
            failed.append(f"{verb}: not refused with one sentence")
    return failed


def broken_imports(tree: Path) -> list[str]:
    """List the modules of a tree that cannot be imported, with the errors."""
    done = run(tree, "-c", IMPORT_ALL)
    if done.returncode:
        return [f"imports ended with {done.returncode}: {done.stderr[-300:]}"]
    return [line for line in done.stdout.splitlines() if line.startswith("broken:")]


def removed_verbs(tree: Path) -> list[str]:
    """Name the verbs that the copy has lost."""
    all_verbs, verbs = json.loads(run(tree, "-c", VERBS_PROBE).stdout)
    return [verb for verb in all_verbs if verb not in verbs]


def main(names: Sequence[str]) -> int:
    """Check a copy without each tool, or without each of those named."""
    any_failed = False
    expected = broken_imports(ROOT)
    print(f"{'without':28} {'verbs removed':28} result")
    for tool in tools():
        if names and tool.stem not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder)
            copy_tree(tree)
            if (tree / tool).is_dir():
                shutil.rmtree(tree / tool)
            else:
                (tree / tool).unlink()
            for other in NEEDED_BY.get(tool.stem, ()):
                shutil.rmtree(tree / TOOLS / other)
            failed = failures(tree, expected)
            verbs = ", ".join(removed_verbs(tree))
        any_failed = any_failed or bool(failed)
        print(f"{tool!s:28} {verbs:28} {'; '.join(failed) or 'all works'}", flush=True)
    return int(any_failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
