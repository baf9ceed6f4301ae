"""The house rules that a reader relies on: imports point one way, files and functions are short,
and nothing heavy is loaded before somebody asks for it."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from launcher.model.attention import KERNELS
from launcher.model.parts import ATTENTION, MLP
from launcher.optim.registry import OPTIMIZERS

ROOT = Path(__file__).parents[3]
MOST_LINES_PER_FILE = 300
MOST_LINES_PER_FUNCTION = 60

# The wings, from the ground up, one layer per line. A module may import its own layer and those
# below it.
UTIL = (("launcher", "launcher.util"), ("launcher.model",))
CORE = (
    ("launcher.config.families",),
    ("launcher.optim",),
    ("launcher.config",),
    ("launcher.parallel",),
    ("launcher.strategies",),
    ("launcher.data",),
    ("launcher.checkpoint",),
    ("launcher.measure",),
    ("launcher.run",),
)
STRATEGIES = ("single", "ddp", "fsdp", "zero")
FORECAST = (
    ("launcher.forecast", *(f"launcher.strategies.{name}.forecast" for name in STRATEGIES)),
)
COMPARE = (("launcher.compare", "launcher.compare.report"), ("launcher.compare.sweep",))
TOOLS = (("launcher.tools",),)
DOORS = (
    ("launcher.train", "launcher.torchrun", "launcher.torchrun_options"),
    ("launcher.probe",),
    ("launcher.__main__",),
    ("launcher.tools.completion",),
    ("shardscale",),
    ("bench",),
)
OTHERS_WORDS = "launcher.tools.plan_from"
"""A table from the words of other trainers to ours has to name both."""
ROOMS = (*UTIL, *CORE, *FORECAST, *COMPARE, *TOOLS, *DOORS)
LAYER_OF = {name: number for number, names in enumerate(ROOMS) for name in names}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "model":  # launcher/model is a link to it
        parts = ("launcher", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = sorted(
    path
    for room in ("launcher", "model", "shardscale", "bench")
    for path in ROOT.glob(f"{room}/**/*.py")
)
NAMES = frozenset(map(module_name, FILES))


@cache
def modules() -> dict[str, ast.Module]:
    """Return all of our modules, parsed: not by every worker that collects this file."""
    return {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def imports_of(tree: ast.Module) -> Iterator[str]:
    """Our own modules that are imported anywhere in a file, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            # `from launcher.data import corpus` can mean a module or something inside one.
            inside = (f"{node.module}.{alias.name}" for alias in node.names)
            names = [name if name in NAMES else str(node.module) for name in inside]
        else:
            continue
        # A script of bench/ imports its neighbours by their bare names.
        names = [f"bench.{name}" if f"bench.{name}" in NAMES else name for name in names]
        yield from (
            name for name in names if name.split(".")[0] in ("launcher", "shardscale", "bench")
        )


@cache
def imports() -> dict[str, set[str]]:
    """Return the modules of ours that each imports."""
    return {name: set(imports_of(tree)) for name, tree in modules().items()}


def layer(module: str) -> int:
    name = module
    while name not in LAYER_OF and "." in name:
        name = name.rpartition(".")[0]
    assert name != "launcher" or module == "launcher", f"{module} has no layer: give it one above"
    return LAYER_OF[name]


def test_there_is_something_to_check() -> None:
    assert {"launcher.train", "launcher.strategies.zero.engine", "launcher.model.gpt"} <= NAMES
    assert "launcher.run.prepare" in imports()["launcher.train"]
    assert "bench.bare_loops" in imports()["bench.peer_loops"]
    assert sum(map(len, imports().values())) > 50


def test_imports_point_one_way() -> None:
    upwards = [
        f"{module} stands below {name}"
        for module, names in imports().items()
        for name in sorted(names)
        if layer(name) > layer(module)
    ]
    assert upwards == []


def test_no_cycles() -> None:
    # Raises CycleError, which shows the cycle.
    ordered = list(graphlib.TopologicalSorter(imports()).static_order())
    assert set(ordered) >= NAMES


def test_files_are_short() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {path: count for path, count in lines.items() if count > MOST_LINES_PER_FILE} == {}


def test_functions_are_short() -> None:
    lines = {
        f"{name}.{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert len(lines) > 1000
    assert {name: count for name, count in lines.items() if count > MOST_LINES_PER_FUNCTION} == {}


@pytest.mark.parametrize(
    ("names", "homes"),
    [
        # The config says which strategy an unset one is, and rules name what they refuse.
        ({"single", "ddp", "fsdp"}, ("launcher.strategies", "launcher.config")),
        (set(OPTIMIZERS), ("launcher.optim", "launcher.config")),
        (set(KERNELS), ("launcher.model", "launcher.config")),
        # Other rooms ask launcher.model.parts; the port of ZeRO-3's order follows names of modules.
        (
            {*ATTENTION, *MLP, "wte", "wpe", "ln_f"},
            ("launcher.model", "launcher.config.families", "launcher.strategies.zero.forecast"),
        ),
    ],
    ids=["strategies", "optimizers", "attention kernels", "parts of the decoder"],
)
def test_a_choice_is_named_where_it_lives(names: set[str], homes: tuple[str, ...]) -> None:
    elsewhere = [
        f"{module}:{node.lineno}: {node.value}"
        for module, tree in modules().items()
        if not module.startswith((*homes, "bench", OTHERS_WORDS))
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert elsewhere == []


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (
            "from launcher import __main__ as door\ndoor._run('--help', [])",
            ("torch", "deepspeed", "numpy", "rich", "yaml"),
        ),
        (
            "import contextlib, runpy; sys.argv = ['train', '--help']\n"
            "with contextlib.suppress(SystemExit):\n"
            "    runpy.run_module('launcher.train', run_name='__main__')",
            ("torch", "deepspeed", "numpy"),
        ),
        (
            "import launcher.train\n"
            "from launcher.strategies.parameters import parameters_of\n"
            "from launcher.model.sizes import named\n"
            "[parameters_of(named(size)) for size in ('nano', 'qwen3-0.6b')]",
            (
                *("deepspeed", "transformers", "datasets", "tokenizers", "pyarrow", "tensorboard"),
                *("torch._dynamo", "torch.distributed.tensor", "sympy"),
            ),
        ),
        (
            "import contextlib, io\n"
            "from launcher import __main__ as door\n"
            "verbs = [[verb] for verb in door.VERBS if verb != 'run']\n"  # torchrun's own help
            "verbs += [['plan', option] for option in door.BY_OPTION['plan']]\n"
            "with contextlib.redirect_stdout(io.StringIO()):\n"
            "    for verb, *more in verbs:\n"
            "        with contextlib.suppress(SystemExit):\n"
            "            door._run(verb, [*more, '--help'])",
            ("torch", "deepspeed", "transformers"),
        ),
        (
            "import launcher.tools.watch.folder, launcher.compare.report.report_cli",
            ("torch", "deepspeed", "transformers"),
        ),
        ("import launcher.model.config, launcher.config.schema", ("torch", "yaml", "tyro")),
    ],
    ids=[
        "shardscale --help",
        "launcher.train --help",
        "import launcher.train and count parameters",
        "VERB --help",
        "import watch and report",
        "import the configs",
    ],
)
def test_heavy_libraries_stay_out(code: str, heavy: tuple[str, ...]) -> None:
    report = f"import sys\n{code}\nprint('loaded:', *sorted(set(sys.modules) & {set(heavy)}))"
    done = subprocess.run(
        [sys.executable, "-c", report], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_no_room_imports_a_tool() -> None:
    """Each is a folder that can be deleted; only formats of `export` are another tool's, and the
    observer of `rehearse`."""
    tools = "launcher.tools."
    found = {
        (module, name)
        for module, names in imports().items()
        for name in names
        if name.startswith(tools)
        and not module.startswith(("bench", "shardscale", ".".join(name.split(".")[:3])))
        and (module.split(".")[2], name.split(".")[2]) != ("rehearse", "watch")
    }
    assert found == {
        ("launcher.tools.exchange.export", "launcher.tools.serve.export"),
    }
