"""The table of what goes with what is what the code refuses by."""

from pathlib import Path
from typing import get_args

import pytest

from launcher.__main__ import VERBS
from launcher.compare.sweep import matrix, matrix_cli
from launcher.compare.sweep.matrix import (
    BEGIN,
    END,
    ROPE_DECODER,
    TECHNIQUES,
    Cell,
    cell,
    merged,
)
from launcher.config.model import ModelChoice
from launcher.config.sharding import Offload
from launcher.model.checkpointing import NAMES
from launcher.optim.choice import OptimizerName, Precision
from launcher.strategies import VARIANTS
from launcher.util.errors import ExitCode

TABLE = Path(__file__).parents[3] / "docs" / "matrix.md"


def test_the_readme_holds_todays_table() -> None:
    text = TABLE.read_text(encoding="utf-8")
    assert matrix.with_matrix(text) == text, "run: shardscale matrix docs/matrix.md"


def test_writing_the_table_leaves_the_rest_alone(tmp_path: Path) -> None:
    assert VERBS["matrix"][0] == matrix_cli.__name__
    file = tmp_path / "file.md"
    file.write_text(f"before\n{BEGIN}old\n{END}after\n")
    assert matrix_cli.main([str(file)]) == ExitCode.DONE
    assert file.read_text() == f"before\n{BEGIN}{matrix.markdown()}{END}after\n"


@pytest.mark.parametrize("content", [None, "no markers\n", f"{BEGIN} only\n"])
def test_a_file_without_markers_is_refused(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.md"
    if content is not None:
        file.write_text(content)
    assert matrix_cli.main([str(file)]) == ExitCode.REFUSED
    said = capsys.readouterr().err
    assert said.startswith("shardscale: shardscale matrix")
    assert len(said.splitlines()) == 1


def test_letters_go_on_behind_z(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = {name: length for length, name in enumerate(TECHNIQUES, 1)}

    def refused(technique: str, _: str) -> Cell:
        return Cell(cpu="so " * lengths[technique], cuda=None)

    monkeypatch.setattr(matrix, "cell", refused)
    rows, notes = matrix._rows()
    assert len(rows) == len(notes) == len(TECHNIQUES) > 26
    assert list(notes)[25:28] == ["z", "aa", "ab"]


def test_every_choice_that_has_a_name_is_in_the_table() -> None:
    def values(name: str) -> set[object]:
        return {changes[name] for changes in TECHNIQUES.values() if name in changes}

    def choices(section: type, name: str) -> set[object]:
        return set(get_args(section.__annotations__[name]))

    assert values("precision") == set(get_args(Precision)) - {"auto"}
    assert values("optimizer") == set(get_args(OptimizerName))
    assert (
        values("offload_optimizer") == values("offload_param") == set(get_args(Offload)) - {"none"}
    )
    kernels = {str(name).partition("-")[0] for name in choices(ModelChoice, "attention")}
    assert values("attention") == kernels - {"auto"}
    assert {*NAMES} - {"none"} < values("activation_checkpointing")
    for option in ("position", "norm", "qk_norm", "kv_heads", "head_dim", "bias"):
        assert values(option) == {ROPE_DECODER[option]}


def test_the_table_is_the_same_for_every_decoder() -> None:
    for technique in TECHNIQUES:
        for strategy in VARIANTS:
            told = cell(technique, strategy)
            assert cell(technique, strategy, ROPE_DECODER) == told, (technique, strategy)


def test_cells_are_what_a_run_is_told() -> None:
    assert cell("--precision bf16", "zero3") == Cell(cpu=None, cuda=None)
    fp16 = cell("--precision fp16", "zero2")
    assert (fp16.cuda, "DeepSpeed trains in fp16 on GPUs only" in str(fp16.cpu)) == (None, True)
    # Where their packages are missing, that is not held against them.
    for technique in ("--attention flash", "--attention flex", "--precision fp8"):
        found = cell(technique, "fsdp")
        assert (found.cuda, "cpu" in str(found.cpu).lower()) == (None, True)


def test_each_technique_runs_somewhere_and_each_refusal_is_one_sentence() -> None:
    for technique in TECHNIQUES:
        cells = [cell(technique, strategy) for strategy in VARIANTS]
        assert any(found.cuda is None for found in cells)
        for found in cells:
            for sentence in (found.cpu, found.cuda):
                assert sentence is None or "\n" not in sentence


def test_sentences_that_differ_in_one_word_are_one() -> None:
    said = ["--a x needs 1, not 2", "--a x needs 1, not 3", "--b x needs 1, not 2", "else"]
    said += ["--b x needs 1, not 3", "--c x needs 2, not 1"]
    assert merged(said) == {
        "--a/--b x needs 1, not 2/3": [said[n] for n in (0, 1, 2, 4)],
        "else": ["else"],
        "--c x needs 2, not 1": [said[5]],
    }
