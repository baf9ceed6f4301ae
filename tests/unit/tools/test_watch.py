"""Programs that are watched, what is recorded of them, and what cannot be watched."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from watched_runs import ROOT, WATCH, records, start, status, watched

from launcher.__main__ import _run
from launcher.tools.watch.folder import WatchedRank, conclude


def test_the_programs_own_sitecustomize_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('own', __file__)\n")
    command = (sys.executable, "-c", "import sys; print(sys.modules['sitecustomize'].__file__)")
    paths = {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    process = start(*WATCH, str(tmp_path / "run"), "--", *command, more=paths)
    output, errors = process.communicate(timeout=60)
    own = str(tmp_path / "sitecustomize.py")
    assert output.splitlines()[-2:] == [f"own {own}", own]
    assert "nothing to report" in errors


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("watch",), "no program to start"),
        (("watch", "--", "no-such-program"), "no-such-program cannot be started"),
        (("watch", "--out", "/proc/x", "--", "true"), "cannot be made"),
        (("watch", "--out", "/tmp", "--", "true"), "exists already"),
        (("rehearse", "--gpu", "H100"), "no program to start"),
        (("rehearse", "--", "python"), "no --gpu"),
        (("rehearse", "--gpu", "X1", "--", "python"), "GPU 'X1' is not known"),
        (("rehearse", "--gpu", "H100", "--steps", "0", "--", "python"), "--steps 0"),
        (("rehearse", "--gpu", "H100", "--answer", "a=b", "--", "python"), "--answer 'a=b'"),
        (("rehearse", "--gpu", "H100", "--", "true"), "true is no program of Python"),
    ],
)
def test_bad_input_is_one_sentence(
    words: tuple[str, ...],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _run(words[0], words[1:]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.splitlines()) == 1


def test_report_reads_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    watched(folder, "alone")
    assert _run("report", [str(folder)]) == 0
    row = json.loads((folder / "report.json").read_text())["runs"][0]
    assert row["state"] == "completed"
    assert row["model"] == "Sequential"
    assert row["steps"] == 5
    assert row["resident_set_bytes"] > 10 * 2**20
    assert row["notes"] == []


STEP = {"kind": "step", "step": 1}
RAN_OUT = {
    **{"kind": "event", "name": "out_of_memory", "unix_s": 1.0, "step": 1},
    "detail": {"phase": "forward", "place": {"file": "train.py", "line": 3}},
}
EXITED = {"kind": "event", "name": "program_ended", "unix_s": 2.0, "detail": {"reason": "exit"}}
FAILED = {
    **{"kind": "event", "name": "uncaught", "unix_s": 1.5},
    "detail": {"out_of_memory": False, "phase": "other", "error": "ValueError", "place": None},
}


@pytest.mark.parametrize(
    ("ranks", "code", "state"),
    [
        ([[STEP, RAN_OUT, EXITED]], 1, "oom"),
        ([[FAILED, EXITED], [STEP, RAN_OUT, EXITED]], 1, "oom"),
        ([[RAN_OUT, STEP, EXITED]], 1, "failed"),  # which went on
        ([[RAN_OUT, FAILED, EXITED]], 1, "failed"),
        ([[RAN_OUT]], -15, "failed"),
        ([[RAN_OUT, EXITED]], 0, "completed"),
    ],
)
def test_out_of_memory_that_the_program_turns_into_an_exit_code(
    ranks: list[list[Any]], code: int, state: str, tmp_path: Path
) -> None:
    found = [WatchedRank(number, records) for number, records in enumerate(ranks)]
    conclude(tmp_path, found, code)
    assert status(tmp_path)["state"] == state
    if state == "oom":
        assert status(tmp_path)["reason"] == "exit code 1 after out of memory"
        assert status(tmp_path)["detail"]["place"]["line"] == 3


LOOP = """\
import torch
model = torch.nn.Embedding(8, 4, sparse={sparse})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
@torch.compile(backend="eager", disable={sparse})
def update():
    optimizer.step()
for _ in range(3):
    loss = model(torch.arange(6)).sum()
    optimizer.zero_grad()
    loss.backward()
    update()
"""


@pytest.mark.parametrize(("sparse", "size"), [(False, 8 * 4 * 4), (True, 6 * (4 * 4 + 8))])
def test_compiled_optimizers_and_sparse_gradients(sparse: bool, size: int, tmp_path: Path) -> None:
    program, folder = tmp_path / "loop.py", tmp_path / "run"
    program.write_text(LOOP.format(sparse=sparse))
    _, errors = start(*WATCH, str(folder), "--", sys.executable, str(program)).communicate()
    assert [step["duration_s"] > 0 for step in records(folder, "step")] == [True] * 3, errors
    held = [record["device"]["grads_bytes"] for record in records(folder, "ledger")]
    assert held == [size] * 2


REPTILE = """\
import copy, torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
model = torch.nn.Linear(4, 4)
outer = torch.optim.AdamW(model.parameters())
get_optimizer_state_dict(model, outer)  # whose step of zeros is none
for task in range(4):
    fast = copy.deepcopy(model)
    inner = torch.optim.SGD(fast.parameters(), lr=0.1)
    fast(torch.ones(2, 4)).sum().backward()
    inner.step()
    (fast(torch.ones(2, 4)).sum() + model(torch.ones(2, 4)).sum()).backward()
    outer.step()
"""


def test_optimizers_of_one_task_each(tmp_path: Path) -> None:
    program, folder = tmp_path / "reptile.py", tmp_path / "run"
    program.write_text(REPTILE)
    _, errors = start(*WATCH, str(folder), "--", sys.executable, str(program)).communicate()
    assert [step["lr"] for step in records(folder, "step")] == [0.1, 1e-3] * 4, errors
    (ended,) = (e["detail"] for e in records(folder, "event") if e["name"] == "program_ended")
    assert ended["turns"] <= 3  # a rehearsal takes as many times its steps


def test_a_program_that_looks_for_torch_first_is_watched(tmp_path: Path) -> None:
    """As transformers does, which imports torch only where it is."""
    program = tmp_path / "looks.py"
    program.write_text(
        "import importlib.util\n"
        "assert importlib.util.find_spec('torch')\n"
        "import torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(2):\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    process = start(*WATCH, str(tmp_path / "run"), "--", sys.executable, str(program))
    process.communicate(timeout=120)
    assert records(tmp_path / "run", "step")
