"""`report`: what it says about runs, finished or not, and that it says it everywhere."""

import csv
import errno
import itertools
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import yaml
from report_folder import GIB, write_run

from launcher.compare.report.comparison import Report
from launcher.compare.report.find import FoundRun, find_runs
from launcher.compare.report.output import escaped, markdown_text, report_page
from launcher.compare.report.report_cli import main
from launcher.compare.report.runs import load_run
from launcher.util.errors import UserError

LOSSES = [8 - 0.1 * step for step in range(20)]


def report_of(*folders: Path, reference: str | None = None, budget: int = 24 * GIB) -> Report:
    found = find_runs([str(folder) for folder in folders])
    runs = [load_run(name, run) for name, run in found.items()]
    return Report(runs, reference=reference, memory_budget_bytes=budget)


def rows_of(report: Report) -> dict[str, dict[str, Any]]:
    return {row["run"]: row for row in report.data["runs"]}


def goals_of(report: Report) -> dict[str, str]:
    return {
        goal["goal"]: goal["text"].partition(" (")[0]
        for goal in report.data["settings"][0]["goals"]
    }


def test_finds_runs_in_folders_and_globs_once_each(tmp_path: Path) -> None:
    write_run(tmp_path / "a" / "zero2", losses=LOSSES)
    write_run(tmp_path / "b" / "zero2", losses=LOSSES)
    write_run(tmp_path / "b" / "ddp", losses=LOSSES)
    (tmp_path / "b" / "sweep.json").write_text("{}")
    found = find_runs([str(tmp_path), str(tmp_path / "*" / "ddp")])
    assert sorted(found) == ["a/zero2", "b/zero2", "ddp"]


def test_a_linked_run_is_found_and_a_loop_is_not_walked(tmp_path: Path) -> None:
    elsewhere = write_run(tmp_path / "disk" / "zero2", losses=LOSSES)
    write_run(tmp_path / "runs" / "ddp", losses=LOSSES)
    (tmp_path / "runs" / "linked").symlink_to(elsewhere)
    (tmp_path / "runs" / "loop").symlink_to(tmp_path)
    assert sorted(find_runs([str(tmp_path / "runs")])) == ["ddp", "zero2"]


@pytest.mark.parametrize("runs", [["nowhere"], ["nowhere/*"], ["."], []])
def test_nothing_to_report_is_one_sentence(
    runs: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(runs) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("shardscale: ")
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "flags",
    [["--memory-budget", "much"], ["--reference", "nobody"], ["--surprise"], ["--out", "file"]],
)
def test_bad_flags_are_one_sentence(
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    write_run(tmp_path / "runs" / "ddp", losses=LOSSES)
    assert main(["runs", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("shardscale: ")
    assert captured.err.count("\n") == 1
    assert flags[-1].removeprefix("--") in captured.err


def test_writes_all_files_and_regenerates_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "single", losses=LOSSES, strategy="single", ranks=1)
    write_run(tmp_path / "zero2", losses=LOSSES, strategy="zero2")
    write_run(tmp_path / "oom", strategy="ddp", state="oom", reason="CUDA out of memory")
    for _ in range(2):
        assert main([str(tmp_path)]) == 0
        printed = capsys.readouterr().out
        assert "oom in backward of step 1, rank 1: CUDA out of memory" in printed
        assert "fastest under 24 GiB" in printed
        names = {path.name for path in tmp_path.iterdir() if path.is_file()}
        assert names == {"report.html", "report.csv", "report.md", "report.json"}
    with open(tmp_path / "report.csv", newline="") as file:
        table = {row["run"]: row for row in csv.DictReader(file)}
    assert table["oom"]["state"] == "oom"
    assert table["oom"]["tokens_per_s"] == "n/a"
    assert float(table["zero2"]["tokens_per_s"]) == 4096.0
    assert "FSDP shard grad op" in (tmp_path / "report.md").read_text()
    assert json.loads((tmp_path / "report.json").read_text())["runs"][-1]["run"] == "oom"


def test_a_report_that_a_full_disk_cut_short_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "ddp", losses=LOSSES)
    write_text = Path.write_text

    def half(path: Path, text: str, encoding: str) -> None:
        write_text(path, text[: len(text) // 2], encoding=encoding)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", half)
        assert main([str(tmp_path)]) == 2
    assert main([str(tmp_path)]) == 0


def test_a_run_without_a_summary_is_a_row_with_what_its_steps_say(tmp_path: Path) -> None:
    write_run(tmp_path / "ddp", losses=LOSSES, state="failed", reason="NCCL", step_s=0.25)
    row = rows_of(report_of(tmp_path))["ddp"]
    assert row["tokens_per_s"] == pytest.approx(2048 / 0.25)
    assert row["step_time_s"] == pytest.approx(0.25)
    assert (row["perplexity"], row["test_loss"], row["position"]) == (None, None, None)
    assert (row["state"], row["reason"]) == ("failed", "NCCL")


def test_a_killed_run_is_lost_and_one_that_may_live_is_running(tmp_path: Path) -> None:
    ours, elsewhere = (write_run(tmp_path / n, state="running") for n in ("ours", "elsewhere"))
    (elsewhere / ".lock").write_text("process 4 on another.host\n")
    take = "import sys, pathlib; from launcher.util.files import FolderLock\n"
    take += "lock = FolderLock(pathlib.Path(sys.argv[1])); assert lock.take(); print(flush=True)\n"
    command = [sys.executable, "-c", take + "input()", str(ours)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert rows_of(report_of(tmp_path))["ours"]["state"] == "running"
        process.kill()
    rows = rows_of(report_of(tmp_path))
    assert rows["ours"]["state"] == "lost"
    said = f"process {process.pid} on {socket.gethostname()} ended before it could write why"
    assert str(rows["ours"]["reason"]).startswith(said)
    assert rows["elsewhere"]["state"] == "running"


def test_damage_is_noted_and_never_a_crash(tmp_path: Path) -> None:
    cut = write_run(tmp_path / "cut", losses=LOSSES)
    text = (cut / "rank0.jsonl").read_text()
    steps_end = text.index('{"kind": "ledger"')
    (cut / "rank0.jsonl").write_text(text[: steps_end - 40])
    broken = write_run(tmp_path / "broken", losses=LOSSES)
    (broken / "status.json").write_text('{"state": "compl')
    (broken / "config.yaml").write_text("a: [")
    (broken / "summary.json").write_text("[]")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.yaml").write_text("strategy: zero\nzero: 3\nmodel: nano\n")
    rows = rows_of(report_of(tmp_path))
    assert rows["cut"]["steps"] == 19
    assert rows["cut"]["notes"] == ["rank0.jsonl: 1 damaged line left out"]
    assert rows["broken"]["state"] == "unknown"
    assert len(rows["broken"]["notes"]) == 3
    assert rows["bare"]["strategy"] == "zero3"
    assert rows["bare"]["steps"] == 0


BAD_NUMBERS: tuple[Any, ...] = ("x", [], {}, True, math.inf, -math.inf, math.nan, 10**400, 2**63)
BAD: dict[type, tuple[Any, ...]] = {
    bool: ("x", [], {}, 3),
    str: ([], {}, True, 3, math.nan),
    dict: ("x", [], True, {"params_bytes": "x"}, {"used_bytes": [1]}),
    type(None): ([], {}),
}


def damaged_lines(path: Path) -> list[str]:
    """For each kind of record, and each of its fields, the field as what it must not be."""
    sound = {record["kind"]: record for record in map(json.loads, path.read_text().splitlines())}
    assert set(sound) == {"run", "step", "ledger", "phase", "gpu"}
    lines = [
        f'{{"kind": "step", "step": {"9" * 5000}}}',
        "[" * 100_000,
        "null",
        "{}",
        '{"kind": 1}',
    ]
    return lines + [
        json.dumps({**record, name: bad})
        for record in sound.values()
        for name, value in record.items()
        for bad in BAD.get(type(value), BAD_NUMBERS)
        if name != "kind"
    ]


def test_a_damaged_record_costs_itself_and_nothing_else(tmp_path: Path) -> None:
    by_name: tuple[str, ...] = ("run", "path", "position", "reference", "loss_note")
    by_name += ("loss_difference", "loss_difference_step")
    for gpu in (False, True):
        write_run(tmp_path / f"whole{gpu}", losses=LOSSES, gpu=gpu)
        hurt = write_run(tmp_path / f"hurt{gpu}", losses=LOSSES, gpu=gpu)
        file = hurt / "rank0.jsonl"
        damage = damaged_lines(file)
        assert len(damage) > 200
        sound = file.read_text().splitlines()
        mixed = [*damage, *sound, *damage]  # neither the first nor the last of a kind may win
        file.write_text("\n".join(mixed) + "\n")
        report = report_of(tmp_path)
        rows = rows_of(report)
        told = {name: rows[f"{name}{gpu}"].copy() for name in ("whole", "hurt")}
        assert told["hurt"].pop("notes") == [
            f"rank0.jsonl: {2 * len(damage)} damaged lines left out"
        ]
        for name, value in told["hurt"].items():
            assert value == told["whole"][name] or name in by_name, name
        assert "damaged lines left out" in report_page(report)
        assert f"hurt{gpu}: rank0.jsonl: {2 * len(damage)} damaged" in markdown_text(report.data)


@pytest.mark.parametrize("file", ["summary.json", "status.json", "environment.json", "config.yaml"])
def test_a_damaged_value_of_any_file_is_left_out(tmp_path: Path, file: str) -> None:
    write_run(tmp_path / "whole", losses=LOSSES)
    wrong = (*BAD_NUMBERS, 3, [[1]], {"a": None})
    paths = [
        write_run(tmp_path / f"hurt{number}", losses=LOSSES) / file for number in range(len(wrong))
    ]
    content = yaml.safe_load(paths[0].read_text())
    for name in content:
        for path, bad in zip(paths, wrong, strict=True):
            path.write_text(json.dumps({**content, name: bad}))
        report = report_of(tmp_path)
        report_page(report)
        assert rows_of(report)["whole"]["tokens_per_s"] == 4096.0


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": 1}'])
def test_a_damaged_result_of_infer_bench_costs_no_report(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", losses=LOSSES)
    (tmp_path / "inference").mkdir()
    (tmp_path / "inference" / "inference.json").write_text(text)
    assert main([str(tmp_path)]) == 0
    assert '"inference":null' in (tmp_path / "report.html").read_text()
    assert "left out of the page: " in (said := capsys.readouterr().err)
    assert said.count("\n") == 1


def test_a_run_resumed_on_more_ranks_is_described_by_its_newest_start(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", losses=LOSSES, ranks=2, gpu=True)
    first, *_, last = (run / "rank0.jsonl").read_text().splitlines()
    newest = json.loads(first) | {"world_size": 4, "started_unix_s": 2.0}
    with (run / "rank0.jsonl").open("a") as file:
        file.write(f"{json.dumps(newest)}\n{json.dumps(json.loads(last) | {'t_s': 1.0})}\n")
    row = rows_of(report_of(run))["run"]
    assert row["world_size"] == 4
    assert row["tokens_per_s_per_rank"] == pytest.approx(row["tokens_per_s"] / 4)
    # its samples come behind those of the first start, which end at 4.9 s
    assert report_of(run).compared[0].run.timelines[0].t_s[-1] == pytest.approx(5.9)


def test_samples_of_all_ranks_are_never_held_at_once(tmp_path: Path) -> None:
    """A week of eight ranks has five million of them."""
    path, peaks = write_run(tmp_path / "run", losses=LOSSES, ranks=8, gpu=True), []
    for rank in range(8):
        with (path / f"rank{rank}.jsonl").open("r+") as file:
            sample = json.loads(file.read().splitlines()[-1])
            lines = (json.dumps({**sample, "t_s": float(5 + n)}) + "\n" for n in range(500))
            file.writelines(lines)
        if rank in (0, 7):
            tracemalloc.start()
            assert len(load_run("run", FoundRun(path=path)).timelines) == 8
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0]


def test_memory_headlines_are_not_mixed(tmp_path: Path) -> None:
    write_run(tmp_path / "gpu", losses=LOSSES, gpu=True)
    write_run(tmp_path / "cpu", losses=LOSSES, ledgers=False)
    write_run(tmp_path / "traced", losses=LOSSES)
    rows = rows_of(report_of(tmp_path))
    kinds: tuple[str, ...] = ("allocated_peak_bytes", "reserved_peak_bytes", "device_used_bytes")
    kinds += ("tracked_live_bytes", "resident_set_bytes")
    figures = {name: [row[kind] for kind in kinds] for name, row in rows.items()}
    assert figures["gpu"] == [GIB, 2 * GIB, 3 * GIB, None, None]
    assert figures["cpu"] == [None, None, None, None, GIB]
    assert figures["traced"] == [None, None, None, GIB, GIB]


def test_a_run_of_unknown_tokens_is_ranked_behind_the_others(tmp_path: Path) -> None:
    """As a watched program whose batches are no tokens."""
    for number, name in enumerate("abc"):
        run = write_run(tmp_path / name, losses=LOSSES, step_s=0.1 + 0.1 * number)
        (run / "summary.json").write_text("{}")
    for name in "ab":
        file = tmp_path / name / "rank0.jsonl"
        file.write_text(re.sub(r'"tokens": \d+', '"tokens": null', file.read_text()))
    report = report_of(tmp_path)
    assert next(iter(rows_of(report))) == "c"
    assert goals_of(report)["fastest"] == "c"


def test_goals_are_won_by_completed_runs_only(tmp_path: Path) -> None:
    write_run(tmp_path / "small", losses=LOSSES, step_s=1.0, peak_bytes=GIB)
    write_run(tmp_path / "fast", losses=LOSSES, step_s=0.1, peak_bytes=8 * GIB)
    write_run(tmp_path / "middle", losses=LOSSES, step_s=0.5, peak_bytes=4 * GIB)
    write_run(tmp_path / "dead", losses=LOSSES, step_s=0.01, state="oom", reason="oom")
    report = report_of(tmp_path, budget=5 * GIB)
    goals = goals_of(report)
    assert goals["least memory"] == "small"
    assert goals["fastest"] == "fast"
    assert goals["fastest under 5 GiB"] == "middle"
    assert report.data["runs"][-1]["run"] == "dead"
    assert (
        goals_of(report_of(tmp_path, budget=GIB // 2))["fastest under 0.5 GiB"]
        == "none of these runs"
    )


def test_a_tie_crowns_nobody_alone(tmp_path: Path) -> None:
    write_run(tmp_path / "ddp", losses=LOSSES, peak_bytes=GIB, step_s=0.5)
    write_run(tmp_path / "fsdp", losses=LOSSES, peak_bytes=GIB + 1000, step_s=0.25)
    report = report_of(tmp_path)
    goals = {goal["goal"]: goal for goal in report.data["settings"][0]["goals"]}
    assert goals["least memory"]["runs"] == ["ddp", "fsdp"]
    assert goals["least memory"]["text"] == "ddp, fsdp (a tie: 1.00 GiB tracked live peak)"
    assert goals["fastest"]["text"] == "fsdp (1.00 GiB tracked live peak, 8,192 tokens/s)"
    assert sorted(goals["lowest perplexity"]["runs"]) == ["ddp", "fsdp"]


def test_budget_is_held_against_all_that_the_device_uses(tmp_path: Path) -> None:
    write_run(tmp_path / "ddp", losses=LOSSES, gpu=True, peak_bytes=3 * GIB)
    assert goals_of(report_of(tmp_path, budget=5 * GIB))["fastest under 5 GiB"] == "ddp"
    assert (
        goals_of(report_of(tmp_path, budget=4 * GIB))["fastest under 4 GiB"] == "none of these runs"
    )


def test_runs_of_another_model_compete_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "nano", losses=LOSSES)
    write_run(tmp_path / "gpt2", losses=LOSSES, model="gpt2")
    report = report_of(tmp_path)
    assert len(report.data["settings"]) == 2
    assert [row["position"] for row in report.data["runs"]] == [1, 1]
    assert "setting" in report.data["columns"]


def test_largest_difference_is_found_on_every_step(tmp_path: Path) -> None:
    losses = [3.0 + 1 / step for step in range(1, 5001)]
    other = [loss + 1e-6 for loss in losses]
    other[3210] += 0.25
    write_run(tmp_path / "single", losses=losses, strategy="single", ranks=1)
    write_run(tmp_path / "fsdp", losses=other, strategy="fsdp")
    report = report_of(tmp_path)
    row = rows_of(report)["fsdp"]
    assert row["loss_difference"] == pytest.approx(0.25, abs=1e-5)
    assert (row["loss_difference_step"], row["reference"]) == (3211, "single")
    assert rows_of(report)["single"]["loss_note"] == "reference"


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"lr": 5e-4}, {"global_batch": 32}, {"document_attention": True}],
)
def test_runs_that_must_differ_are_not_compared(tmp_path: Path, change: dict[str, Any]) -> None:
    write_run(tmp_path / "single", losses=LOSSES, strategy="single", ranks=1)
    write_run(tmp_path / "ddp", losses=LOSSES, **change)
    row = rows_of(report_of(tmp_path / "single", tmp_path / "ddp"))["ddp"]
    assert row["loss_difference"] is None
    assert row["loss_note"] == f"differs from single in {next(iter(change))}"


def test_runs_that_differ_in_their_compilation_are_compared_and_say_so(tmp_path: Path) -> None:
    write_run(tmp_path / "off", losses=LOSSES, strategy="ddp", compile=False)
    write_run(tmp_path / "on", losses=LOSSES, strategy="ddp", compile=True)
    report = report_of(tmp_path)
    rows = rows_of(report)
    assert (rows["on"]["differs"], rows["off"]["differs"]) == ("compile True", None)
    assert len(report.data["settings"]) == 1


def test_adapters_compete_with_all_weights_but_have_losses_of_their_own(tmp_path: Path) -> None:
    write_run(tmp_path / "whole", losses=LOSSES, strategy="single", ranks=1)
    write_run(tmp_path / "lora", losses=LOSSES, lora_rank=8, quantize_base="nf4")
    report = report_of(tmp_path)
    assert len(report.data["settings"]) == 1
    assert rows_of(report)["lora"]["loss_difference"] is None


def test_another_kernel_of_the_same_maths_is_compared(tmp_path: Path) -> None:
    write_run(tmp_path / "single", losses=LOSSES, strategy="single", ranks=1)
    write_run(tmp_path / "ddp", losses=LOSSES, attention="eager")
    report = report_of(tmp_path)
    row = rows_of(report)["ddp"]
    assert (row["loss_difference"], row["loss_note"]) == (0, None)
    assert len(report.data["settings"]) == 1


def test_a_run_of_whole_sequences_is_the_reference_of_one_that_cuts_them(tmp_path: Path) -> None:
    write_run(tmp_path / "cut", losses=[3.0, 2.5], strategy="ddp", context_parallel=2)
    write_run(tmp_path / "whole", losses=[3.0, 2.5], strategy="ddp")
    rows = rows_of(report_of(tmp_path))
    assert rows["cut"]["reference"] == "whole"


def test_reference_can_be_named(tmp_path: Path) -> None:
    write_run(tmp_path / "single", losses=LOSSES, strategy="single", ranks=1)
    write_run(tmp_path / "zero2", losses=[loss + 1 for loss in LOSSES], strategy="zero2")
    rows = rows_of(report_of(tmp_path, reference="zero2"))
    assert rows["single"]["loss_difference"] == pytest.approx(1.0)
    with pytest.raises(UserError, match=r"--reference zero3: .*single, zero2"):
        report_of(tmp_path, reference="zero3")


def test_losses_that_are_no_numbers_are_said_and_survive_json(tmp_path: Path) -> None:
    write_run(tmp_path / "single", losses=LOSSES, strategy="single", ranks=1)
    write_run(tmp_path / "ddp", losses=[*LOSSES[:10], math.nan, math.inf, *LOSSES[12:]])
    assert main([str(tmp_path)]) == 0
    data = json.loads((tmp_path / "report.json").read_text())
    row = next(row for row in data["runs"] if row["run"] == "ddp")
    assert row["loss_difference"] == 0
    assert row["loss_note"] == "at 2 step(s) only one of the two losses is finite"


def test_the_failing_ranks_ledger_is_in_the_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "oom", state="oom", reason="no memory", ledgers=False)
    status = json.loads((folder / "status.json").read_text())
    lines = {"params_bytes": 100, "temporary_bytes": 50, "activations_bytes": None}
    status["detail"] = {"ledger": {"moment": "oom", "device": lines, "host": {}, "disk": {}}}
    (folder / "status.json").write_text(json.dumps(status))
    (entry,) = rows_of(report_of(tmp_path))["oom"]["ledgers"]
    assert (entry["rank"], entry["moment"]) == (1, "oom")
    assert entry["lines"] == {"params_bytes": 100, "temporary_bytes": 50}


def test_hostile_names_break_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [
        "=cmd()",
        "[red]x[/red]",
        "a|b`c",
        "\x1b[31mred\u202e",
        "$x^2$",
        "_hidden",
        "</script>",
    ]
    for number, name in enumerate(names):
        write_run(tmp_path / str(number) / name.replace("/", "\u2215"), losses=LOSSES)
    (tmp_path / "6" / "failure").mkdir()
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "[red]x[" in printed
    assert "\x1b" not in printed
    with open(tmp_path / "report.csv", newline="") as file:
        assert "'=cmd()" in [row["run"] for row in csv.DictReader(file)]
    table = (tmp_path / "report.md").read_text().splitlines()
    assert len({line.replace("\\|", "").count("|") for line in table if line[:1] == "|"}) == 1
    page = (tmp_path / "report.html").read_text()
    assert page.count("</script>") == 2
    assert "\x1b" not in page
    assert "\u202e" not in page


def test_markdown_shows_text_as_it_is() -> None:
    assert escaped("a|b *c* <d>") == r"a\|b \*c\* \<d\>"


def test_page_of_fifty_runs_is_small(tmp_path: Path) -> None:
    losses = [3 + math.sin(step) for step in range(1500)]
    write_run(tmp_path / "single", losses=losses, strategy="single", ranks=1)
    for number in range(49):
        write_run(tmp_path / f"ddp-{number}", losses=losses)
    assert main([str(tmp_path)]) == 0
    assert (tmp_path / "report.html").stat().st_size < 6e6


WRONG: tuple[Any, ...] = ("x", -1, 2**70, [1])


def with_one_wrong_value(folder: Path) -> int:
    """Runs of which each has one field of one file replaced; how many there are."""
    whole = write_run(folder / "whole", losses=[5.0, 4.0, 3.0, 2.5])
    count = 0
    for file in ("rank0.jsonl", "status.json", "summary.json", "environment.json"):
        lines = (whole / file).read_text().splitlines()
        seen: set[str] = set()
        for number, line in enumerate(lines):
            record = json.loads(line)
            if record.get("kind") in seen:
                continue  # one record of each kind
            seen.add(record.get("kind"))
            for key, wrong in itertools.product(record, WRONG):
                damaged = folder / f"damaged{count}"
                shutil.copytree(whole, damaged)
                changed = [*lines[:number], json.dumps(record | {key: wrong}), *lines[number + 1 :]]
                (damaged / file).write_text("\n".join(changed) + "\n")
                count += 1
    texts = ("model: {a: 1}", "steps: x", "[1]", "zero: []", "a: *b")
    for number, text in enumerate(texts, start=count):
        shutil.copytree(whole, folder / f"damaged{number}")
        (folder / f"damaged{number}" / "config.yaml").write_text(text)
    return count + len(texts)


def test_one_wrong_value_anywhere_breaks_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    count = with_one_wrong_value(tmp_path / "runs")
    assert count > 200
    # Not that many processes, where there are many cores.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "report")]) == 0
    shown = json.loads((tmp_path / "report" / "report.json").read_text())["runs"]
    assert len(shown) == count + 1
    (whole,) = [row for row in shown if row["run"] == "whole"]
    assert whole["notes"] == []
    assert whole["steps"] == 4
    noted = [row for row in shown if any("damaged" in note for note in row["notes"])]
    assert len(noted) > 100
