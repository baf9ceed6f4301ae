"""The calculator's page without a browser: its stored traces, and its planner without torch."""

import ast
import json
import random
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.forecast import plan_cli as plan_cli
from launcher.forecast.trace import blocks
from launcher.forecast.trace.events import Trace
from launcher.forecast.trace.stored import DATA, ORIGIN, kind_of, origin
from launcher.forecast.trace.template import Template
from launcher.forecast.trace.template_json import from_json
from launcher.model.sizes import NAMED
from launcher.strategies import STRATEGIES
from launcher.tools.site import generate
from launcher.tools.site import site_cli as cli
from launcher.tools.site.build import planner_files
from launcher.tools.site.generate import record_template

FRESH = 6
"""Of the stored templates, recorded again."""


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    """Structure -> what is stored of it."""
    found: dict[str, Any] = {}
    with zipfile.ZipFile(DATA) as archive:
        for name in set(archive.namelist()) - {ORIGIN}:
            of_kind = json.loads(archive.read(name))
            found |= {
                structure: of_kind["templates"][number]
                for structure, number in of_kind["structures"].items()
            }
    return found


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a browser's Python has."""
    folder = tmp_path_factory.mktemp("planner")
    for name, content in planner_files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def without_torch(planner: Path, argv: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The page's answers, by a Python that has nothing but the standard library."""
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1])\n"
        "from launcher.tools.site.inside import start\n"
        "found = json.loads(start.choices_of(sys.argv[2]))\n"
        "rows = [json.loads(start.assessed(sys.argv[2], n)) "
        "for n in range(len(found.get('choices', ())))]\n"
        "print(json.dumps([found, rows]))"
    )
    command = [sys.executable, "-I", "-S", "-c", code, str(planner), json.dumps(argv)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found, rows = json.loads(run.stdout)
    return found, rows


def normal(template: Template) -> Counter[tuple[Any, ...]]:
    """Return what matters of a template. In which order a CPU's autocast forgets its casts, all at
    once, is by chance, and so are the numbers of these events."""
    trace: Trace = template.trace
    lives: Counter[tuple[Any, ...]] = Counter(
        (
            "life",
            each.allocation[0],
            template.sizes[each.size_bytes],
            each.saved,
            each.end and each.end[0],
        )
        for each in trace.lifetimes
    )
    lives += Counter(
        ("gradient", name, birth[0], where) for name, birth, where, _ in trace.gradients
    )
    return lives + Counter(("mark", str(mark), where) for mark, where, _ in trace.marks)


def imports_of(content: bytes) -> Iterator[str]:
    """Modules that a file may import at any time, and names of modules in its texts."""
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def room_of(name: str) -> str:
    return "/".join(name.split("/")[: 3 if name.startswith("launcher/tools") else 2])


def test_nothing_is_packed_that_the_page_cannot_import() -> None:
    packed = {name: content for name, content in planner_files().items() if name.endswith(".py")}
    waiting = ["launcher.tools.site.inside.start"]
    waiting += [f"launcher.strategies.{name}.forecast" for name in STRATEGIES]
    reached: set[str] = set()
    while waiting:
        path = waiting.pop().replace(".", "/")
        for parent in (Path(path), *Path(path).parents):
            for name in {f"{parent}.py", f"{parent}/__init__.py"} & packed.keys() - reached:
                reached.add(name)
                waiting += imports_of(packed[name])
    assert {room_of(name) for name in packed} == {room_of(name) for name in reached}


@pytest.mark.skipif(torch.version.cuda is not None, reason="stored with torch's CPU build")
def test_traces_are_those_of_today(stored: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    again = "python -m launcher.tools.site.generate writes them anew"
    with zipfile.ZipFile(DATA) as archive:  # else plans record what they could have read
        assert json.loads(archive.read(ORIGIN))["sources"] == origin()["sources"], again
    # All would take minutes. One model stands for what all have in common, another for windows.
    configs = list(generate._configs())
    drawn = [random.Random(8).choice(configs)]
    drawn += [next(config for config in configs if config.model.build().window is not None)]
    monkeypatch.setattr(generate, "_configs", lambda: drawn)
    today = generate.structures()
    missing = today.keys() - stored.keys()
    assert not missing, again
    for structure in random.Random(9).sample(sorted(today), FRESH):
        fresh = record_template(*today[structure])
        assert normal(fresh) == normal(from_json(stored[structure])), f"{structure}: {again}"


def test_every_named_model_is_stored() -> None:
    with zipfile.ZipFile(DATA) as archive:
        kinds = {name.removesuffix(".json") for name in archive.namelist()}
    assert {kind_of(model) for model in NAMED.values()} <= kinds


@pytest.mark.parametrize(
    "flags",
    [
        "--model gpt2 --gpu A100-80GB --gpus 4 --strategy ddp --activation-checkpointing none",
        # Dimensions of its own, one chunk of the loss; a vocabulary that is padded.
        "--model llama-3.2-1b --layers 7 --d-model 1024 --d-ff 3000 --vocab-size 30001 "
        "--gpu H100 --gpus 8 --zero 3 --micro-batch 1 --seq-len 256 "
        "--activation-checkpointing selective",
        # More chunks than a template has.
        "--model qwen3-0.6b --gpu H200 --gpus 2 --zero 2 --offload-optimizer cpu --micro-batch 40 "
        "--activation-checkpointing full",
        "--model qwen2.5-1.5b --kv-heads 12 --gpu L4 --gpus 2 --strategy fsdp --lora-rank 16 "
        "--activation-checkpointing full",
    ],
    ids=["gpt2", "own-dimensions", "many-chunks", "lora"],
)
def test_page_says_what_plan_says(
    planner: Path,
    flags: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocks, "stored_trace", lambda *_: None)  # both are recorded anew
    monkeypatch.setattr(blocks, "stored_work", lambda *_: None)
    argv = [*flags.split(), "--tensor-parallel", "1", "--context-parallel", "1"]
    argv += ["--precision", "bf16"]
    assert plan_cli.main([*argv, "--no-calibration", "--json"]) == 0
    planned = {row["sharding"]: row for row in json.loads(capsys.readouterr().out)}
    _, rows = without_torch(planner, argv)
    assert {row["sharding"] for row in rows} == planned.keys()
    for row in rows:
        expected = planned[row["sharding"]]
        assert row["verdict"] == expected["verdict"]
        assert row["micro_batch"] == expected["micro_batch"]
        assert row["used_bytes"] == pytest.approx(expected["used_bytes"], rel=0.01)
        assert row["host_bytes"] == pytest.approx(expected["host_bytes"], rel=0.01)
        if row["tokens_per_s"] is not None:
            assert row["tokens_per_s"] == pytest.approx(expected["tokens_per_s"], rel=0.01)
        for name, size in row["lines"].items():
            held = expected["ledger"]["device"].get(name)
            if held is not None:
                assert size == pytest.approx(held, abs=0.01 * expected["used_bytes"])


def test_page_refuses_as_plan_does(planner: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", "gpt2", "--gpu", "A100-80GB", "--gpus", "3", "--global-batch", "32"]
    assert plan_cli.main([*argv, "--no-calibration"]) == 2
    sentence = capsys.readouterr().err.strip().removeprefix("shardscale: ")
    found, _ = without_torch(planner, argv)
    assert found == {"refused": sentence}


def test_folder_that_is_not_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert cli.main([str(tmp_path)]) == 2
    assert "is not empty, and nothing is overwritten" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_other_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = tmp_path / "pyodide.tgz"
    archive.write_bytes(b"something else")
    assert cli.main([str(tmp_path / "out"), "--pyodide", str(archive)]) == 2
    assert f"--pyodide {archive} is not Pyodide" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
