"""From a grid to named, checked cells."""

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from launcher.compare.sweep import grid, sweep
from launcher.compare.sweep.grid import cells_of, expand_strategy, flags_given, label
from launcher.compare.sweep.grid_source import (
    SHIPPED,
    SweepGrid,
    flags_of,
    parse_axes,
    parse_options,
    read_grid_file,
)
from launcher.compare.sweep.sweep_cli import main
from launcher.compare.sweep.sweep_folder import SweepFolder
from launcher.config.arguments import parse_run_config
from launcher.config.resolve import resolve
from launcher.measure.records import SweepRow
from launcher.strategies import variant_of
from launcher.util.errors import UserError


def cells(*axes: str, flags: tuple[str, ...] = (), nproc: int = 4) -> list[SweepRow]:
    typed, configured = flags_given(["--device=cpu", *flags])
    return cells_of(SweepGrid(base=configured, axes=parse_axes(axes)), typed, nproc=nproc)


def test_the_sweep_of_the_readme() -> None:
    found = cells(
        "strategy=ddp,fsdp,zero1,zero2,zero3,zero3+cpu",
        "precision=bf16",
        "activation_checkpointing=none,full",
        "micro_batch=8,16",
        flags=("--model", "gpt2"),
    )
    assert len(found) == 24
    assert all(cell.state == "pending" for cell in found)
    names = [cell.name for cell in found]
    assert "zero2-bf16-full-mb8" in names
    assert names[0] == "ddp-bf16-nockpt-mb8"
    assert len(set(names)) == 24
    last = found[-1]
    assert last.name == "zero3+cpu-bf16-full-mb16"
    assert last.flags == {
        "model": "gpt2",
        "activation_checkpointing": "full",
        "micro_batch": 16,
        "strategy": "zero",
        "zero": 3,
        "offload_optimizer": "cpu",
        "offload_param": "cpu",
        "precision": "bf16",
        "device": "cpu",
    }


@pytest.mark.parametrize(
    ("choice", "strategy_label", "offloaded"),
    [
        ("ddp", "ddp", []),
        ("fsdp", "fsdp", []),
        ("fsdp+cpu", "fsdp", ["optimizer", "param"]),
        ("fsdp-grad-op", "fsdp-grad-op", []),
        ("fsdp-hybrid", "fsdp-hybrid", []),
        ("fsdp-hybrid-grad-op+cpu", "fsdp-hybrid-grad-op", ["optimizer", "param"]),
        ("zero0", "zero0", []),
        ("zero1", "zero1", []),
        ("zero1+cpu", "zero1", ["optimizer"]),
        ("zero2+cpu", "zero2", ["optimizer"]),
        ("zero3", "zero3", []),
        ("zero3+cpu", "zero3", ["optimizer", "param"]),
    ],
)
def test_short_names_of_strategies(choice: str, strategy_label: str, offloaded: list[str]) -> None:
    config = parse_run_config(flags_of(expand_strategy(choice, {})))
    resolved = resolve(config, world_size=4, device_type="cpu")
    assert variant_of(resolved.config).label == strategy_label
    sharding = resolved.config.sharding
    assert [n for n in ("optimizer", "param") if getattr(sharding, f"offload_{n}") == "cpu"] == (
        offloaded
    )


def test_switches_are_varied_as_other_flags() -> None:
    found = cells("document_attention=on,off", "compensation=True", "compile=off")
    assert [cell.flags.get("document_attention", False) for cell in found] == [True, False]
    assert [cell.state for cell in found] == ["pending"] * 2


def test_a_combination_that_cannot_run_is_a_row() -> None:
    found = cells(
        "strategy=ddp,ddp+cpu,single,zero2", "micro_batch=2,3", flags=("--global-batch=8",)
    )
    runnable = [cell.name for cell in found if cell.state == "pending"]
    assert runnable == ["ddp-mb2", "zero2-mb2"]
    reasons = {cell.name: str(cell.reason) for cell in found}
    assert "--offload-optimizer cpu needs" in reasons["ddp+cpu-mb2"]
    assert "--strategy single runs in one process" in reasons["single-mb2"]
    assert "--global-batch 8 is not a multiple" in reasons["ddp-mb3"]


def test_hybrid_needs_groups_of_more_than_one() -> None:
    assert cells("strategy=ddp,fsdp-hybrid", nproc=4)[1].state == "pending"
    assert "has one process per group" in str(cells("strategy=ddp,fsdp-hybrid", nproc=2)[1])


@pytest.mark.parametrize(
    ("axes", "flags", "says"),
    [
        (["stratagem=ddp"], [], "unknown flag --stratagem"),
        (["strategy=ddp,zero4"], [], "strategy=zero4: use one of"),
        (["strategy=zero3+gpu"], [], "strategy=zero3+gpu: use one of"),
        (["micro_batch=8,many"], [], "micro_batch=many"),
        (["precision=bf17"], [], "--precision bf17 must be one of auto, fp32, tf32, bf16"),
        (["model=gpt5"], [], "'gpt5' is unknown"),
        (["micro_batch=8,8"], [], "8 is given twice"),
        (["lr=1e-3,0.001"], [], "0.001 is given twice"),
        (["lr=1e-3", "lr=1e-4"], [], "lr is given twice"),
        (["strategy"], [], "write KEY=VALUE,VALUE"),
        (["micro_batch="], [], "write KEY=VALUE,VALUE"),
        (["out=a,b"], [], "each cell has its own run folder"),
        (["betas=0.9,0.95"], [], "--betas"),
        (["strategy=ddp"], ["--stepz=3"], "did you mean --steps?"),
        (["strategy=ddp"], ["--zero=2"], "--zero 2 is also set by the grid"),
        (["steps=1,2"], ["--epochs=1"], "--epochs 1.0 is also set by the grid"),
        (["strategy=single,ddp+cpu"], [], "no cell of this sweep can run; single: --strategy"),
    ],
)
def test_what_can_only_be_wrong_is_refused(axes: list[str], flags: list[str], says: str) -> None:
    with pytest.raises(UserError) as refused:
        cells(*axes, flags=tuple(flags))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_flags_beat_the_file_and_cells_beat_its_base(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(
        "base: {device: cpu, zero: 2, steps: 5, precision: bf16}\n"
        "grid: {micro-batch: [1, 2]}\n"
        "cells:\n"
        "  - {strategy: ddp}\n"
        "  - {name: my best/run, steps: 7}\n"
        "  - {name: later, attention: rocket, unavailable: needs a rocket}\n",
        encoding="utf-8",
    )
    typed, configured = flags_given(["--precision", "fp32", "--seed=3"])
    assert configured == {}
    found = cells_of(read_grid_file(str(path)), typed, nproc=2)
    assert [(cell.name, cell.state) for cell in found] == [
        ("ddp-mb1", "pending"),
        ("ddp-mb2", "pending"),
        ("my-best-run-mb1", "pending"),
        ("my-best-run-mb2", "pending"),
        ("later-mb1", "unavailable"),
        ("later-mb2", "unavailable"),
    ]
    assert found[0].flags == {
        **{"strategy": "ddp", "steps": 5, "seed": 3, "micro_batch": 1, "device": "cpu"},
        "precision": "fp32",
    }
    assert found[3].flags == {
        **{"zero": 2, "steps": 7, "seed": 3, "micro_batch": 2, "device": "cpu"},
        "precision": "fp32",
    }
    assert found[4].reason == "needs a rocket"


@pytest.mark.parametrize(
    ("flags", "said"),
    [("", None), ("--global-batch 24", 6), ("--global-batch 32 --micro-batch 8", 8)],
)
def test_cells_of_a_global_batch_say_their_micro_batch(flags: str, said: int | None) -> None:
    """On a GPU the plan of each would choose another one, and memory would be no comparison."""
    (cell,) = cells("strategy=ddp", flags=(*flags.split(),))
    assert cell.flags.get("micro_batch") == said


def test_a_default_tokenizer_beside_a_model_with_its_own_stays(tmp_path: Path) -> None:
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 512}
    document = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **shape}
    (tmp_path / "config.json").write_text(json.dumps(document))
    (tmp_path / "tokenizer.json").touch()
    found = cells("tokenizer=bpe,byte", flags=("--model", f"hf:{tmp_path}"))
    trained = [parse_run_config(flags_of(cell.flags)).data.tokenizer for cell in found]
    assert trained == ["bpe", "byte"]


def test_a_config_file_is_a_base(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("zero: 2\nmicro_batch: 4\nsteps: 9\nout: old/run\n", encoding="utf-8")
    typed, configured = flags_given(["--config", str(path), "--device=cpu"])
    grid = SweepGrid(base=configured, axes=parse_axes(["strategy=ddp,zero1", "micro_batch=1,2"]))
    first = cells_of(grid, typed, nproc=2)[0]
    assert first.flags == {"strategy": "ddp", "micro_batch": 1, "steps": 9, "device": "cpu"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("grids: {strategy: [ddp]}", "unknown key 'grids'"),
        ("grid: {strategy: [zero9]}", "strategy=zero9: use one of"),
        ("base: {stepz: 4}", "unknown flag --stepz"),
        ("cells: {strategy: ddp}", "cells is {'strategy': 'ddp'}"),
        ("cells: [ddp]", "'ddp'"),
        ("- 1", "must hold lines of `key: value`"),
        ("grid: [", "not valid YAML"),
        ("grid: {lr: []}", "lr has no values"),
        ("grid: {lr: [1.0], lr: [2.0]}", "'lr' is given twice"),
    ],
)
def test_a_bad_grid_file_is_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as refused:
        read_grid_file(str(path))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_many_cells_are_counted_and_too_many_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "SILENT_CELLS", 2)
    cells("seed=1,2,3", nproc=1)
    assert capsys.readouterr().err == "sweep: checking 3 cells\n"
    cells("seed=1,2", nproc=1)
    assert capsys.readouterr().err == ""
    many = SweepGrid(axes={"seed": list(range(500)), "steps": list(range(1, 500))})
    with pytest.raises(UserError, match="249,500 cells, more than the limit of 100,000"):
        cells_of(many, {}, nproc=1)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--nproc=\u0663", "--nproc: invalid int value"),
        ("--nproc=" + "9" * 5000, "--nproc: invalid int value"),
        ("--nproc=9223372036854775808", "must be at most 65,536"),
        ("--timeout-minutes=nan", "must be 0.001 or more"),
        ("--timeout-minutes=1e400", "must be at most 525,600"),
        ("--out=~nouser/x", "there is no such user"),
        ("--out=" + "x" * 256, "is too long"),
        ("--out=a\nb", "holds a control character"),
    ],
)
def test_options_of_a_verb_are_read_as_flags_are(option: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_options([option])
    assert says in str(refused.value)
    assert len(str(refused.value)) < 290


def test_a_missing_grid_file_names_the_shipped_ones() -> None:
    with pytest.raises(UserError, match="shipped grids are seed, sharding"):
        read_grid_file("nothing")


def test_shipped_sharding_grid_has_every_choice() -> None:
    found = cells_of(read_grid_file("sharding"), {"device": "cpu"}, nproc=4)
    assert [cell.state for cell in found] == ["pending"] * 13
    resolved = [
        resolve(parse_run_config(flags_of(cell.flags)), world_size=4, device_type="cpu")
        for cell in found
    ]
    assert {variant_of(each.config).label for each in resolved} == {
        *("ddp", "fsdp", "fsdp-grad-op", "fsdp-hybrid", "fsdp-hybrid-grad-op"),
        *("zero0", "zero1", "zero2", "zero3"),
    }


def test_shipped_seed_grid_is_the_studys_nine() -> None:
    found = cells_of(read_grid_file("seed"), {"device": "cpu"}, nproc=1)
    assert len(found) == 9
    sizes = {cell.name: cell.flags["micro_batch"] for cell in found}
    assert sizes["fp32"] == 125
    assert sizes["bf16-largest-batch"] == 195
    assert sizes["fp32-checkpointing-largest-batch"] == 303
    for cell in found:
        assert cell.state == ("refused" if cell.flags.get("attention") == "flash" else "pending")
        if cell.state == "pending":
            config = parse_run_config(flags_of(cell.flags))
            resolved = resolve(config, world_size=1, device_type="cpu")
            assert resolved.model.parameter_count == 134_367_744
            assert (resolved.config.data.seq_len, config.loop.epochs) == (256, 1)
            assert (config.optim.lr, config.optim.weight_decay) == (5e-4, 0.1)
        else:
            assert "attention flash needs a GPU" in str(cell.reason)


def test_every_shipped_grid_is_a_file_of_the_package() -> None:
    for path in SHIPPED.glob("*.yaml"):
        assert yaml.safe_load(path.read_text(encoding="utf-8"))
        assert read_grid_file(path.stem) == read_grid_file(str(path))


def test_labels() -> None:
    assert label("micro_batch", "8") == "mb8"
    assert label("activation_checkpointing", "none") == "nockpt"
    assert label("lr", "1e-4") == "lr1e-4"
    assert label("tied", False) == "no-tied"
    assert label("attention", "sdpa") == "attention-sdpa"
    assert label("data", "some/folder/text.txt") == "text.txt"


def test_names_of_cells_are_short_enough_for_files() -> None:
    long = [f"{'deep/' * 60}{end}" for end in ("one", "two")]
    assert len({label("init_from", path) for path in long}) == 2
    found = cells(f"data={'a' * 246}.txt", "seed=1,2", "strategy=ddp,fsdp")
    assert len({cell.name for cell in found}) == 4
    assert max(len(f"{cell.name}.attempt10.json") for cell in found) <= 255


def test_names_do_not_change_when_a_value_is_added() -> None:
    few = {cell.name for cell in cells("strategy=ddp,zero2", "precision=bf16")}
    more = {cell.name for cell in cells("strategy=ddp,zero2,zero3", "precision=bf16,fp32")}
    assert few < more
    assert len(more) == 6


def test_cells_that_end_before_the_lock_is_taken_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(sweep, "open_corpora", lambda rows, nproc: None)
    monkeypatch.setattr(sweep, "run_cell", lambda row, *_, **__: ran.append(row.name))
    monkeypatch.setattr(sweep, "_report", lambda *_: None)
    monkeypatch.setattr(sweep, "install_signal_handlers", lambda: None)  # they would stay
    out = tmp_path / "sweep"
    asked = ["--nproc=1", "--grid", "micro_batch=1,2", f"--out={out}", "--device=cpu"]
    main(asked)
    assert len(ran) == 2

    def another(rows: list[SweepRow], nproc: int) -> None:
        SweepFolder(out).write_row(replace(rows[0], state="completed", duration_s=7.0))

    monkeypatch.setattr(sweep, "open_corpora", another)
    main(asked)
    assert ran[2:] == ["mb2"]
    found = SweepFolder(out).read()
    assert found is not None
    assert (found.cells[0].state, found.cells[0].duration_s) == ("completed", 7.0)


def test_a_disk_that_fills_while_cells_run_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("launcher.compare.sweep.sweep_folder.replace_text", fail)
    argv = ["--prepare", "--nproc=1", f"--out={tmp_path / 's'}", "--device=cpu", "--grid", "seed=1"]
    assert main(argv) == 2
    assert "sweep.json cannot be written (No space left on device)" in capsys.readouterr().err
