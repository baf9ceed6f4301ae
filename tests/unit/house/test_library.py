"""`import shardscale`: its page's examples, its notebooks, and what it promises."""

import contextlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from notebooks import EXAMPLES, run_cells
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import shardscale
from launcher.forecast import plan_cli
from launcher.measure.records import EvalRecord

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "api" / "library.md"
FENCE = re.compile(r"^```(python|sh|text title=\"shows\")\n(.*?)^```$", re.M | re.S)
ASKED = {"gpus": 2, "gpu": "A100-80GB", "precision": "bf16", "strategy": "fsdp"}
ASKED |= {"micro_batch": 4, "activation_checkpointing": "none"}


def test_importing_it_loads_nothing_heavy() -> None:
    code = (
        "import sys, shardscale; names = dir(shardscale); "
        "print(sorted(set(sys.modules) & {'torch', 'numpy', 'pydantic', 'launcher'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_examples_of_its_page_show_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bench").symlink_to(ROOT / "bench")
    printed, names = io.StringIO(), dict[str, Any]()
    for kind, text in FENCE.findall(PAGE.read_text(encoding="utf-8")):
        if kind == "sh":
            more = {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
            subprocess.run(["bash", "-ec", text], env=os.environ | more, check=True, timeout=300)
        elif kind == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(text, names)
        else:
            assert printed.getvalue() == text
    assert names["run"].summary.perplexity > 1
    assert not any(parameter.requires_grad for parameter in names["model"].parameters())
    assert names["frame"]["sharding"].tolist()[0] == "fsdp"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_and_holds_what_its_cells_show(path: Path) -> None:
    stored = json.loads(path.read_text(encoding="utf-8"))
    shown = [cell["outputs"] for cell in run_cells(path)["cells"] if "outputs" in cell]
    kept = [cell["outputs"] for cell in stored["cells"] if "outputs" in cell]
    assert len(kept) >= 3
    for now, before in zip(shown, kept, strict=True):
        assert [output["output_type"] for output in now] == [o["output_type"] for o in before]
        for output, other in zip(now, before, strict=True):
            text = output.get("text") or output["data"]["text/plain"]
            old = other.get("text") or other["data"]["text/plain"]
            if "mean_s" not in old[0]:  # seconds are another machine's
                assert text == old


def test_a_plan_has_the_records_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    plan = shardscale.plan("gpt2", every=True, **ASKED)  # type: ignore[arg-type]
    flags = [
        w for name, value in ASKED.items() for w in (f"--{name.replace('_', '-')}", str(value))
    ]
    assert plan_cli.main(["gpt2", *flags, "--all", "--json"]) == 0
    assert json.loads(json.dumps(plan.records)) == json.loads(capsys.readouterr().out)
    assert plan.fits
    assert plan.best is plan[0]
    assert len(plan.to_pandas()) == len(plan) == len(plan[:])
    assert plan._repr_html_().count("<tr>") == len(plan) + 1


def test_bad_values_are_the_command_lines_sentences() -> None:
    with pytest.raises(shardscale.UserError, match="--gpus 0 must be at least 1"):
        shardscale.plan("gpt2", gpus=0)
    with pytest.raises(shardscale.UserError, match="no-such-model"):
        shardscale.plan("no-such-model", gpu="H100")
    with pytest.raises(shardscale.UserError, match="micro-batch"):
        shardscale.plan("gpt2", gpu="H100", micro_batch="many")
    with pytest.raises(shardscale.UserError, match="dtype 'int8' is unknown"):
        shardscale.load_model("anywhere", dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(shardscale.UserError, match="device 'cuda:1' is unknown: give auto, cpu"):
        shardscale.load_model("anywhere", device="cuda:1")  # type: ignore[arg-type]


def test_tables_escape_what_they_show() -> None:
    table = shardscale.Table([{"name": "<b>", "size_bytes": 2048, "rate": 12345.6, "more": {}}])
    assert "&lt;b&gt;" in table._repr_html_()
    assert repr(table).splitlines() == ["name  size    rate", "<b>   2.0KiB  12,346"]
    assert repr(shardscale.Table([])) == ""


def steps(model: nn.Module, count: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(count):
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_measured_loop_trains_as_it_does_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    alone = steps(model, 4)
    before = (
        torch.save,
        vars(torch.autograd)["_engine_run_backward"],
        nn.Module.__call__,
    )
    torch.manual_seed(0)
    with shardscale.measure(tmp_path / "run") as measured:
        losses = steps(nn.Linear(8, 8), 4)
        with pytest.raises(RuntimeError, match="once its block has ended"):
            _ = measured.phases
        with pytest.raises(shardscale.UserError, match="going on already"), shardscale.measure():
            pass
    after = (
        torch.save,
        vars(torch.autograd)["_engine_run_backward"],
        nn.Module.__call__,
    )
    assert after == before
    assert losses == alone == [step["loss"] for step in measured.steps]
    held = {row["line"]: row["size_bytes"] for row in measured.ledger if row["step"] == 3}
    assert held["params"] == 4 * 72
    assert held["optimizer"] == 2 * held["params"] + 2 * 4  # and a step for each of two tensors
    steady = {row["phase"]: row for row in measured.phases if row["period"] == "steady"}
    assert {"forward", "backward", "step"} <= steady.keys()
    kept = shardscale.load(tmp_path / "run")
    assert kept.steps.records == measured.steps.records
    assert kept.phases.records == measured.phases.records
    steps(model, 2)
    with (tmp_path / "run" / "rank0.jsonl").open("a", encoding="utf-8") as file:
        for step, loss in ((2, 3.0), (4, 2.0), (4, 1.5)):  # the last one after a restart
            found = EvalRecord(
                step=step, split="validation", loss=loss, perplexity=1.0, tokens=8, duration_s=0.1
            )
            file.write(json.dumps({"kind": found.kind, **asdict(found)}) + "\n")
    again = shardscale.load(tmp_path / "run")
    assert len(again.steps) == 4
    assert [(each["step"], each["loss"]) for each in again.evaluations] == [(2, 3.0), (4, 1.5)]


def test_a_loop_under_a_dispatch_mode_is_measured() -> None:
    with FlopCounterMode(display=False) as counter, shardscale.measure() as measured:
        steps(nn.Linear(8, 8), 4)
    assert counter.get_total_flops() > 0
    assert {"forward", "backward", "step"} <= {phase["phase"] for phase in measured.phases}
    assert measured.summary.model == "Linear"


class Scaled(torch.utils.data.Dataset[torch.Tensor]):
    """Samples through a module, as torchvision's transforms are."""

    transform = nn.Sequential(nn.Flatten(0), nn.ReLU())

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.transform(torch.full((2, 4), float(index)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("workers", [0, 1])
def test_modules_that_prepare_samples_are_no_forward(workers: int) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    with shardscale.measure() as measured:
        Scaled()[0]
        for batch in torch.utils.data.DataLoader(Scaled(), batch_size=2, num_workers=workers):
            model(batch).square().mean().backward()
            optimizer.step()
    assert (measured.summary.model, len(measured.steps)) == ("Linear", 3)
    assert "data" in {phase["phase"] for phase in measured.phases}


def test_a_loop_that_fails_is_measured_up_to_there() -> None:
    with pytest.raises(RuntimeError, match="shapes"), shardscale.measure() as measured:  # noqa: PT012
        model = nn.Linear(8, 8)
        steps(model, 2)
        model(torch.ones(1, 3))
    assert (measured.state, len(measured.steps)) == ("failed", 2)
    assert re.match("RuntimeError: .*mat1 and mat2 shapes", str(measured.reason))
    with shardscale.measure() as nothing:
        pass
    assert len(nothing.steps) == 0


def test_load_wants_one_run(tmp_path: Path) -> None:
    with pytest.raises(shardscale.UserError, match="no run in it"):
        shardscale.load(tmp_path)
    for name in ("a", "b"):
        with shardscale.measure(tmp_path / name):
            steps(nn.Linear(8, 8), 1)
    with pytest.raises(shardscale.UserError, match=r"holds 2 runs: load one of them \(a, b\)"):
        shardscale.load(tmp_path)


def test_what_is_promised_is_documented() -> None:
    assert set(dir(shardscale)) == {*shardscale.__all__, "__version__"}
    for name in ("plan", "rehearse", "measure", "load", "load_model"):
        function = getattr(shardscale, name)
        assert f"`{name}(" in PAGE.read_text(encoding="utf-8")
        assert inspect.getdoc(function)
    with pytest.raises(AttributeError, match="has no attribute 'train'"):
        _ = shardscale.train
