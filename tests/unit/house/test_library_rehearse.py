"""`shardscale.rehearse()` and `%%rehearse`, as far as they need no CUDA build of torch."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.testing.globalipapp import start_ipython

import shardscale
from shardscale.rehearsing import program_text

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)


def test_cells_become_one_program_whose_lines_stay_where_they_are() -> None:
    cells = [
        "%load_ext shardscale\n!pip install peft\nimport torch",
        "get_ipython().run_line_magic('matplotlib', 'inline')\nwidth = (7\n%4)",
        "for _ in range(3):\n    %time width += 1\n    width += 1",
    ]
    assert program_text(cells).split("\n") == [
        *("", "", "import torch"),
        *("", "width = (7", "%4)"),
        *("for _ in range(3):", "    width += 1", "    width += 1", ""),
    ]


def test_what_magics_run_of_python_stays() -> None:
    cells = [
        "%%time\nfirst()",
        "get_ipython().run_cell_magic('time', '', '%matplotlib inline\\nsecond()\\n')\n",
        "%time third()\nget_ipython().run_line_magic('time', 'fourth()')\nfifth()",
        "if width:\n    !pip install peft\nget_ipython().run_cell_magic('bash', '', 'ls\\n')",
    ]
    assert program_text(cells).split("\n") == [
        *("", "first()"),
        *("", "", "second()", ""),
        *("third()", "fourth()", "fifth()"),
        *("if width:", "    pass", "", ""),
    ]


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("", "has no code to run"),
        ("%matplotlib inline", "has no code to run"),
        ("a = 1\nb = = 2", r"line 2 of a cell is not Python \(invalid syntax\): b = = 2"),
        (print, "takes text, or a list of texts"),
        ([print], "takes text, or a list of texts"),
    ],
)
def test_code_that_is_none_is_refused(code: Any, sentence: str) -> None:
    with pytest.raises(shardscale.UserError, match=sentence):
        shardscale.rehearse(code, gpu="H100")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"steps": 0}, "--steps 0 must be 1 or more"),
        ({"gpus": 65}, "--gpus 65 "),
        ({"answers": {"here": 1}}, "--answer 'here=1' is none"),
        ({"out": "taken", "command": ["python"]}, "--out taken exists already"),
        ({"command": ["no-such-launcher", "--nproc", "2"]}, "no-such-launcher cannot be started"),
    ],
)
def test_values_reach_the_command_whose_sentence_refuses_them(
    values: dict[str, Any], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("taken").mkdir()
    with pytest.raises(shardscale.UserError, match=sentence):
        shardscale.rehearse("pass", **{"gpu": "H100", **values})
    assert capsys.readouterr() == ("", "")


def test_a_rehearsal_inside_of_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDSCALE_OBSERVER", "{}")
    with pytest.raises(shardscale.UserError, match="leave that cell out"):
        shardscale.rehearse("pass", gpu="H100")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_cpu_build_is_one_sentence_in_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    shell = start_ipython()
    shell.run_cell("%load_ext shardscale")
    done = shell.run_cell("%%rehearse --gpu H100 --steps 2\nimport torch")
    sentence = rf"torch {torch.__version__} of {sys.executable} is a CPU build"
    assert sentence in str(done.error_in_exec)
    assert "Traceback" not in capsys.readouterr().err
    done = shell.run_cell("%%rehearse --gpu X1 -- python\nimport torch")
    assert "X1" in str(done.error_in_exec)
