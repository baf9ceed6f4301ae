"""Whatever a verb writes at its end, a path that cannot be written is refused at its beginning."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

from launcher.__main__ import VERBS
from launcher.compare.sweep.matrix import BEGIN, END


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """An output of a verb, and the work that must not begin where it cannot be written."""

    argv: str
    """OUT stands for the path."""
    work: str
    bad: tuple[str, ...]


FILE = ("absent/x", "/proc/x", "folder", "file", "file/x")
NEW_FOLDER = ("/proc/x", "folder", "file", "file/x")
FOLDER = ("/proc/x", "file", "file/x")
OUTPUTS = {
    "plan --json": Output(
        argv="plan --json OUT --model gpt2 --gpu A100-80GB",
        work="launcher.forecast.plan_answer.plan",
        bad=FILE,
    ),
    "plan --page": Output(
        argv="plan --page OUT --model gpt2 --gpu A100-80GB",
        work="launcher.forecast.plan_answer.plan",
        bad=FILE,
    ),
    "plan --apply": Output(
        argv="plan --apply OUT --model gpt2 --gpu A100-80GB",
        work="launcher.forecast.plan_answer.plan",
        bad=FILE,
    ),
    "profile": Output(
        argv="profile --device cpu --out OUT", work="launcher.forecast.profile.measure", bad=FILE
    ),
    "matrix": Output(
        argv="matrix OUT",
        work="launcher.compare.sweep.matrix.markdown",
        bad=("absent/x", "/proc/x", "folder", "file/x", "/proc/version"),
    ),
    "snapshot": Output(
        argv="snapshot file --page OUT",
        work="launcher.tools.snapshot.snapshot_cli.read_snapshot",
        bad=FILE,
    ),
    "report": Output(
        argv="report runs --out OUT",
        work="launcher.compare.report.report_cli.find_runs",
        bad=FOLDER,
    ),
    "site": Output(
        argv="site OUT", work="launcher.tools.site.runtime.load", bad=("folder", *FOLDER)
    ),
    "sweep": Output(
        argv="sweep --model gpt2 --grid micro_batch=1,2 --out OUT",
        work="launcher.compare.sweep.sweep.cells_of",
        bad=("folder", *FOLDER),
    ),
    "sweep --prepare": Output(
        argv="sweep --prepare --nproc 2 --model gpt2 --grid micro_batch=1,2 --out OUT",
        work="launcher.compare.sweep.sweep.cells_of",
        bad=("folder", *FOLDER),
    ),
    "infer-bench": Output(
        argv="infer-bench run --out OUT",
        work="launcher.tools.serve.infer_bench.open_run",
        bad=NEW_FOLDER,
    ),
    "prune": Output(
        argv="prune run --sparsity 0.5 --out OUT",
        work="launcher.tools.prune.prune._open",
        bad=NEW_FOLDER,
    ),
    "export": Output(
        argv="export run --out OUT",
        work="launcher.tools.exchange.export.open_stored",
        bad=NEW_FOLDER,
    ),
    "import": Output(
        argv="import model --out OUT",
        work="launcher.tools.exchange.import_.TransformersWeights",
        bad=NEW_FOLDER,
    ),
}
ELSEWHERE = {
    *("train", "run", "submit"),  # test_bad_input and test_submit hold their --out
    *("generate", "doctor", "completion", "recipe"),  # write to the screen alone
    *("watch", "rehearse"),  # test_watch holds their --out
}


def test_every_verb_with_an_output_is_here() -> None:
    assert {name.split()[0] for name in OUTPUTS} | ELSEWHERE == set(VERBS)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").write_text("kept")
    (tmp_path / "file").write_text(BEGIN + END)
    yield tmp_path
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "kept"]


@pytest.mark.parametrize(
    ("name", "bad"), [(name, bad) for name, output in OUTPUTS.items() for bad in output.bad]
)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    name: str,
    bad: str,
    places: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = OUTPUTS[name]
    monkeypatch.setattr(output.work, lambda *_, **__: pytest.fail("it has begun"))
    verb, *argv = shlex.split(output.argv.replace("OUT", bad))
    assert import_module(VERBS[verb][0]).main(argv) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert bad in shown.err
