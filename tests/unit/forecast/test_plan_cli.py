"""`shardscale plan` as a user meets it."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import resolve
from launcher.forecast.assess import Assessment, assess
from launcher.forecast.candidates import Choice, choices, given_fields
from launcher.forecast.cluster import Cluster, find_cluster
from launcher.forecast.evaluation import Search
from launcher.forecast.fit import Room, needed_bytes
from launcher.forecast.machine import Machine
from launcher.forecast.plan_answer import ProgressLine
from launcher.forecast.plan_cli import main, parse_options
from launcher.forecast.search import plan
from launcher.model.sizes import NAMED
from launcher.strategies import variant_of
from launcher.torchrun import split_command
from launcher.util.errors import ExitCode
from launcher.util.sizes import MIB, gib

NARROW = ["--model", "nano", "--activation-checkpointing", "none", "--precision", "bf16"]
CLUSTER = ["--gpus", "4", "--gpu", "A100-40GB", "--global-batch", "32"]


def test_the_command_of_the_best_is_ready_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / name for name in ("plan.json", "plan.html", "run.yaml")]
    written = [
        x
        for name, p in zip(("json", "page", "apply"), files, strict=True)
        for x in ("--" + name, str(p))
    ]
    assert main([*NARROW, *CLUSTER, *written, "--price-per-gpu-hour", "2"]) == 0
    shown = capsys.readouterr().out
    command = next(line for line in shown.splitlines() if line.startswith("  torchrun"))
    own, program, flags = split_command(shlex.split(command)[1:])
    assert (own, program) == (["--nproc-per-node", "4"], ["-m", "launcher.train"])
    config = parse_run_config(flags)
    assert not config.data.leaves_micro_batch_open  # which the run would choose again
    records = json.loads(files[0].read_text())
    best = records[0]
    assert config.data.micro_batch == best["micro_batch"] == best["largest_micro_batch"] == 8
    assert config.optim.precision == "bf16"
    # A run before it starts, and the suggestions after it ran out of memory, say the same.
    run = resolve(config, world_size=4, device_type="cuda")
    room = Room(size_bytes=best["memory_bytes"], gpu="A100-40GB", capped=False)
    assert best["used_bytes"] == needed_bytes(run, room)
    assert parse_run_config(["--config", str(files[2])]).sharding == config.sharding
    assert yaml.safe_load(files[2].read_text())["global_batch"] == 32
    # Every way of sharding is there once, each with a ledger whose lines add up.
    assert len({r["sharding"] for r in records}) == len(records) >= 10
    for record in records:
        lines = record["ledger"]["device"]
        parts = [v for k, v in lines.items() if k != "used_bytes" and v]
        assert sum(parts) == lines["used_bytes"]
        assert record["used_bytes"] >= lines["used_bytes"] + record["fixed_bytes"]
    page = files[1].read_text()
    assert page.count("<script") == 2
    assert "default-src 'none'" in page
    assert all(record["sharding"] in page for record in records)


def test_the_largest_model_is_named_and_has_the_adapters_that_are_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {name: NAMED[name] for name in ("gpt2", "gpt2-medium")}
    monkeypatch.setattr("launcher.forecast.search.NAMED", few)
    training = ["--micro-batch", "1", "--seq-len", "64", "--activation-checkpointing", "full"]
    training += ["--strategy", "single"]
    cluster = ["--gpus", "1", "--gpu-memory", "3GiB", "--goal", "largest-model"]
    fitting = []
    for adapters in ([], ["--lora-rank", "8"]):
        assert main([*training, "--precision", "bf16", *adapters, *cluster]) == 0
        shown = capsys.readouterr().out
        command = next(line for line in shown.splitlines() if line.startswith("  torchrun"))
        flags = split_command(shlex.split(command)[1:])[2]
        if adapters:  # beside weights that the planner has not seen
            assert "MODEL_FOLDER: the folder with the weights of gpt2-medium" in shown
            del flags[(at := flags.index("--init-from")) : at + 2]
        config = parse_run_config(flags)
        assert config.model.lora_rank == (8 if adapters else None)
        fitting.append(config.model.model)
    assert fitting == ["gpt2", "gpt2-medium"]


def test_sizes_that_a_flag_rules_out_are_passed_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """25 heads of gpt2-xl are not divided by 4; 16 of gpt2-medium are."""
    few = {name: NAMED[name] for name in ("gpt2-medium", "gpt2-xl")}
    monkeypatch.setattr("launcher.forecast.search.NAMED", few)
    ulysses = "--context-parallel 4 --context-parallel-method ulysses --strategy ddp"
    asked = f"{ulysses} --micro-batch 1 --seq-len 256 --gpus 4 --gpu-memory 24GiB --quiet"
    assert main([*asked.split(), "--goal", "largest-model"]) == 0
    assert capsys.readouterr().out.startswith("gpt2-medium: ")
    few.pop("gpt2-medium")
    assert main([*asked.split(), "--goal", "largest-model"]) == 2
    assert "25 heads" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "more", "weights"),
    [
        ("config.json", [], "FOLDER"),
        ("other.json", ["--lora-rank=2"], "MODEL_FOLDER"),
        ("config.json", ["--layers=2"], None),  # no weights have this shape
        ("config.json", ["--layers=2", "--lora-rank=2"], "MODEL_FOLDER"),
        ("config.json", ["--lora-rank=2", "--random-base"], None),
    ],
)
def test_a_command_for_an_hf_config_begins_with_its_weights(
    file: str,
    more: list[str],
    weights: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 512}
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **shape}
    (tmp_path / file).write_text(json.dumps(config))
    cluster = ["--gpu=A10", "--quiet", f"--hf-config={tmp_path / file}"]
    cluster += [f"--apply={tmp_path / 'run.yaml'}"]
    kind = ["--strategy=single", "--precision=bf16", "--activation-checkpointing=none"]
    assert main([*kind, "--micro-batch=1", "--global-batch=1", *more, *cluster]) == 0
    shown = capsys.readouterr().out
    command = next(line for line in shown.splitlines() if line.startswith("  torchrun"))
    flags = split_command(shlex.split(command)[1:])[2]
    applied = yaml.safe_load((tmp_path / "run.yaml").read_text())
    if weights is None:
        assert "--init-from" not in flags
        assert "init_from" not in applied
        assert flags[flags.index("--d-model") + 1] == "32"
        return
    folder = str(tmp_path) if weights == "FOLDER" else weights
    assert flags[flags.index("--init-from") + 1] == applied["init_from"] == folder
    assert "--d-model" not in flags
    assert applied["lr"] == (2e-4 if "--lora-rank=2" in more else 2e-5)
    assert (f"{weights}: the folder with the weights" in shown) is (weights == "MODEL_FOLDER")


def test_given_flags_are_not_varied(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*NARROW, *CLUSTER, "--zero", "3", "--micro-batch", "2", "--json", "-"]
    assert main(flags) == 0
    records = json.loads(capsys.readouterr().out)
    assert {r["config"]["zero"] for r in records} == {3}
    assert {r["micro_batch"] for r in records} == {2}


@pytest.mark.parametrize(
    ("flags", "label"),
    [
        ("--gpus 1 --strategy ddp", "ddp"),
        ("--gpus 2 --strategy ddp --activation-checkpointing offload", "ddp"),
    ],
)
def test_what_is_asked_for_is_planned_though_no_search_would_try_it(
    flags: str, label: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--model nano --gpu H100 --micro-batch 1 --precision bf16 --json -"
    assert main([*options.split(), *flags.split()]) == 0
    assert {r["sharding"] for r in json.loads(capsys.readouterr().out)} == {label}


def test_what_fits_nowhere_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "gpt2-xl", *NARROW[2:], "--gpus", "1", "--gpu-memory", "2GiB"]
    assert main([*flags, "--micro-batch", "1", "--global-batch", "1"]) == ExitCode.NOTHING_FITS
    shown = capsys.readouterr().out
    assert "nothing fits: the smallest" in shown
    assert "torchrun" not in shown
    assert "--lora-rank 8" not in shown  # frozen weights alone are 3 GB


@pytest.mark.parametrize(
    ("memory", "flags"),
    [("5GiB", "--lora-rank 8"), ("3GiB", "--lora-rank 8 --quantize-base nf4")],
)
def test_where_nothing_fits_adapters_that_would_are_named(
    memory: str, flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "--model gpt2-xl --seq-len 256 --global-batch 1 --activation-checkpointing full"
    options = f"{asked} --precision bf16 --strategy single --gpus 1 --gpu-memory {memory}"
    assert main(options.split()) == ExitCode.NOTHING_FITS
    shown = " ".join(capsys.readouterr().out.split())
    assert "nothing fits: the smallest, single" in shown
    assert f"fits, to fine-tune weights that you have: --init-from FOLDER {flags} trains" in shown


def assessed(memory_bytes: int) -> Assessment:
    options = ["--model", "nano", "--vocab-size", "50304", "--precision", "bf16"]
    options += ["--micro-batch", "8", "--strategy", "fsdp", "--activation-checkpointing", "none"]
    machine = Machine.of_gpu("A100-40GB", ranks_per_node=2)
    cluster = Cluster(
        machine=machine, world_size=2, ranks_per_node=2, memory_bytes=memory_bytes, fixed_bytes=MIB
    )
    config = parse_run_config(options)
    given = given_fields(options, config)
    found = choices(config, given, world_size=2, ranks_per_node=2, device_type="cuda")
    return assess(next(c for c in found if c.label == "fsdp"), cluster)


def test_what_the_allocator_makes_of_less_memory_is_told() -> None:
    """Between its tensors and what the allocator likes to keep, a run takes what there is."""
    with_room = assessed(64 << 30)
    assert with_room.with_room_bytes == with_room.used_bytes
    least = with_room.prediction.peak_bytes + MIB
    assert with_room.used_bytes - least > 8 * MIB
    verdicts = set()
    for memory_bytes in range(least, with_room.used_bytes + 2 * MIB, 2 * MIB):
        a = assessed(memory_bytes)
        verdicts.add(a.verdict)
        assert a.with_room_bytes in (with_room.used_bytes, a.used_bytes)
        if a.verdict == "does not fit":
            assert gib(-a.margin_bytes) not in ("0", "1B")
            assert -a.margin_bytes >= min(2**10, with_room.used_bytes - memory_bytes)
        else:
            assert a.used_bytes <= memory_bytes
    assert "does not fit" in verdicts
    assert verdicts & {"tight", "fits"}


def test_progress_is_told_and_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    waiting = ProgressLine()
    waiting._said_s -= 100
    waiting(1, 12)  # which records what others share: nothing follows from it
    assert capsys.readouterr().err == "planning: 1 of 12 choices, 0 s\n"
    waiting._said_s -= 100
    waiting(3, 12)
    waiting(4, 12)  # sparse where nobody looks on
    waiting.close()
    said = capsys.readouterr().err
    assert said.startswith("planning: 3 of 12 choices, 0 s, about 0 s left")
    assert said.count("\n") == 1
    told: list[tuple[int, int]] = []
    options = [*NARROW, "--strategy", "fsdp", "--micro-batch", "1"]
    config = parse_run_config(options)
    cluster, _ = find_cluster(parse_options(CLUSTER)[0])
    found = plan(
        config,
        given_fields(options, config),
        Search(cluster=cluster, goal="fastest", evaluate_all=False),
        progress=lambda done, total: told.append((done, total)),
    )
    assert told[0][0] == 0
    assert {total for _, total in told} == {found.choices} == {len(found.best_first)}


def test_the_planner_reads_the_labels_that_it_prints() -> None:
    """Every sharding of several clusters, long sequences and wide models among them."""
    seen = set()
    for model, world_size, seq_len in (("nano", 1, 64), ("llama-3.1-8b", 16, 16_384)):
        flags = ["--model", model, "--seq-len", str(seq_len), "--micro-batch", "1"]
        flags += ["--global-batch", "64"]
        config = parse_run_config([*flags, "--precision", "bf16"])
        for choice in choices(
            config,
            {"precision"},
            world_size=world_size,
            ranks_per_node=8,
            device_type="cuda",
        ):
            own = choice.runs[0].config.sharding
            more = [] if own.replicate == 1 else ["--replicate", str(own.replicate)]
            read = resolve(
                parse_run_config([*flags, "--strategy", choice.label, *more]),
                world_size=world_size,
                device_type="cuda",
                elsewhere=True,
            )
            assert read.config.sharding == own, choice.label
            seen.add(choice.label)
    assert {"single", "ddp", "zero3+cpu+param", "fsdp-grad-op+each", "fsdp-hybrid"} <= seen
    assert any("-context" in label for label in seen)
    assert any("-tensor" in label for label in seen)


def test_a_model_without_its_flag_and_memory_without_a_unit() -> None:
    options, training = parse_options(["gpt2-xl", "--gpu-memory", "24", "--micro-batch", "8"])
    assert training == ["--model", "gpt2-xl", "--micro-batch", "8"]
    assert find_cluster(options)[0].memory_bytes == 24 * 2**30
    options, training = parse_options(["--gpu-memory=24G", "--gpus", "2", "Qwen/Qwen3-8B"])
    assert parse_run_config(training).model.model == "qwen3-8b"
    assert find_cluster(options)[0].memory_bytes == 24 * 2**30


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--gpu H9000", "GPU 'H9000' is not known: the nearest names are H"),
        ("", "which GPU? give --gpu NAME"),
        ("--gpu-memory 4MB", "beside its tensors: give more"),
        ("--gpu-memory lots", "--gpu-memory"),
        ("--gpus 0 --gpu H100", "--gpus 0 must be at least 1"),
        ("--gpu H100 --model gpt9", "model 'gpt9' is unknown"),
        ("run.yaml --gpu H100 --model gpt2", "run.yaml and --model: give one of them"),
        ("--gpu H100 --goal cheapest", "cheapest"),
        ("--gpu H100 --layers 0", "layers"),
        ("--gpu T4 --precision bf16", "T4 has no rate for bf16: it has fp32"),
        ("--gpus 3 --gpu H100 --global-batch 32", "cannot be spread evenly over 3 ranks"),
        ("--gpu H100 --json .", "nothing is overwritten"),
        ("--gpus 2 --gpu H100 --strategy single", "runs in one process, but there are 2"),
    ],
)
def test_bad_input_is_one_sentence(
    argv: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert says in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--optimizer-in-backward", "cannot clip to 1.0: give --clip 0"),
        ("--replicate 3", "--replicate 3 does not divide 4 ranks"),
        ("--precision fp8 --micro-batch 1 --seq-len 100", "micro-batch x tokens is 100"),
        (
            "--strategy ddp --offload-param cpu",
            "needs --strategy fsdp or --zero 3, not --strategy ddp",
        ),
    ],
)
def test_flags_that_nothing_goes_with_are_refused_for_what_they_say(
    flags: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model=gpt2", "--gpus=4", "--gpu=H100", *flags.split()]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "labels"),
    [
        (("--no-reshard-after-forward",), ["fsdp-grad-op", "fsdp-grad-op+cpu"]),
        (
            ("--replicate=2",),
            ["fsdp-hybrid", "fsdp-hybrid-grad-op", "fsdp-hybrid+cpu"],
        ),
    ],
)
def test_a_choice_is_called_what_the_fixed_flags_make_of_it(
    flags: tuple[str, ...], labels: list[str]
) -> None:
    options = ["--strategy=fsdp", "--precision=fp32", "--activation-checkpointing=none", *flags]
    config = parse_run_config(options)
    given = given_fields(options, config)
    found = choices(config, given, world_size=4, ranks_per_node=4, device_type="cuda")
    assert sorted(choice.label for choice in found) == sorted(labels)
    for choice in found:
        assert {variant_of(run.config).label for run in choice.runs} == {choice.label.split("+")[0]}


def test_reducing_each_micro_batch_is_tried_where_some_are_accumulated() -> None:
    def tried(*flags: str) -> list[Choice]:
        options = ["--precision=bf16", "--activation-checkpointing=none", *flags]
        config = parse_run_config(options)
        given = given_fields(options, config)
        found = choices(config, given, world_size=4, ranks_per_node=4, device_type="cuda")
        return [choice for choice in found if choice.label.endswith("+each")]

    found = tried("--global-batch=16")
    assert [choice.label for choice in found] == ["fsdp+each", "fsdp-grad-op+each"]
    for run in found[0].runs:
        assert run.config.sharding.reduce_each_micro_batch
        assert run.accumulation > 1
    assert [run.config.data.micro_batch for run in found[0].runs] == [1, 2]  # 4 accumulates nothing
    assert not tried()
    assert not tried("--global-batch=16", "--micro-batch=4")
    assert not tried("--global-batch=16", "--strategy=fsdp", "--reduce-each-micro-batch")


def test_speeds_are_a_range_in_which_ties_are_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert main([*NARROW, *CLUSTER, "--zero", "1", "--quiet", "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if line.startswith("zero1 "))
    ((slow, fast),) = re.findall(r" ([\d.]+k?)-([\d.]+k?)= ", row)
    (record, *_) = json.loads(path.read_text())
    tokens = record["tokens_per_s"] * (
        record["forward_s"] + record["backward_s"] + record["step_s"]
    )
    for text, key in ((slow, "most_total_s"), (fast, "least_total_s")):
        rate = float(text.removesuffix("k")) * (1000 if text.endswith("k") else 1)
        assert rate == pytest.approx(tokens / record[key], rel=0.06)
    assert "= the range overlaps the fastest one's; of these the simplest is first" in shown


def test_seconds_of_different_batches_are_not_side_by_side(
    capsys: pytest.CaptureFixture[str],
) -> None:
    narrow = ["--model", "nano", "--precision", "bf16", "--gpus", "2", "--gpu", "A100", "--quiet"]
    assert main([*narrow, "--strategy", "ddp", "--all", "--gpu-memory", "2GiB"]) == 0
    several = capsys.readouterr().out
    assert main([*narrow, "--strategy", "ddp", "--all", "--global-batch", "8"]) == 0
    one = capsys.readouterr().out
    assert ("s/step" in one, "global batch 8 x" in one) == (True, True)
    batches = {row.split()[1] for row in several.splitlines() if row.startswith("ddp ")}
    assert ("s/step" in several, "global batch" in several) == (len(batches) == 1,) * 2


@pytest.mark.parametrize("option", ["--json", "--apply", "--page"])
def test_an_output_that_cannot_be_written_is_refused_before_the_search(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "launcher.forecast.plan_answer.plan", lambda *_, **__: pytest.fail("searched")
    )
    for path in (tmp_path / "nope" / "x", Path("/proc/x")):
        assert main([*NARROW, *CLUSTER, option, str(path)]) == 2
        said = capsys.readouterr().err
        assert f"{path}: cannot be written" in said
        assert len(said.splitlines()) == 1


def test_gpus_that_do_not_fill_their_nodes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*NARROW, "--gpu", "A100", "--gpus", "8", "--gpus-per-node", "3"]) == 2
    assert "--gpus 8 is no multiple of 3 GPUs per node" in capsys.readouterr().err


def test_one_gpu_is_not_told_to_offload_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "gpt2", "--gpus", "1", "--gpu", "A100", "--quiet"]) == 0
    assert "--strategy single" in capsys.readouterr().out


@pytest.mark.parametrize("gpu", ["V100-32GB", "T4"])
def test_fp16_is_planned_where_there_is_no_bf16(
    gpu: str, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = ["--model", "nano", "--activation-checkpointing", "none", "--quiet"]
    assert main([*narrow, "--gpus", "1", "--gpu", gpu]) == 0
    assert " --precision fp16 " in capsys.readouterr().out  # tried without being asked for
    assert main([*narrow, "--gpus", "1", "--gpu", gpu, "--precision", "bf16"]) == 2


def test_the_command_of_a_config_for_the_cpu_trains_on_the_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trial.yaml").write_text("device: cpu\nmicro_batch: 4\n")
    config = ["--config", str(tmp_path / "trial.yaml"), "--strategy", "single"]
    assert main([*config, *NARROW, "--gpu", "A100-40GB"]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    flags = command.partition("launcher.train ")[2]
    assert parse_run_config(shlex.split(flags)).loop.device == "cuda"


def test_a_plan_is_for_one_kind_of_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*NARROW, "--gpus", "8", "--gpu", "A100,H100"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "shardscale: GPU 'A100,H100' names several: a plan is for one kind of GPU, so plan once "
        "for each"
    ]


def test_a_precision_that_does_not_go_with_the_flags_gives_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """fp16, the first choice for a GPU without bf16, does not go with --zero 0."""
    asked = "--model nano --gpus 4 --gpu V100-16GB --zero 0 --no-calibration"
    assert main(asked.split()) == 0
    assert "--precision fp32" in capsys.readouterr().out
