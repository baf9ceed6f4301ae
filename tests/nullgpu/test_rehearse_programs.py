"""Programs that know nothing of us, rehearsed and watched on the null GPU."""

import ast
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from nullgpu.runs import MIB, ROOT, SHORT, TINY, environment

from launcher.forecast.collectives import Group, collective_s
from launcher.forecast.machine import Machine
from launcher.measure.hardware import CONTEXT_BYTES, GPUS, NCCL_GROUP_BYTES
from launcher.strategies.ledger import CATEGORIES

LOOP = str(Path(__file__).parent / "programs" / "loop.py")
PARAMETERS = 4 * 12_596_224
PAIR = Group(size=2, per_node=2)
A40_PAIR = Machine.of_gpu("A40", ranks_per_node=2)
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


def shardscale(
    *words: str, more: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        (sys.executable, "-m", "launcher", *words),
        env={**os.environ, "PYTHONPATH": str(ROOT), **(more or {})},
        capture_output=True,
        text=True,
        timeout=300,
    )


def rehearse(folder: Path, gpu: str, how: str, *flags: str, ranks: bool = False) -> tuple[int, Any]:
    program = (sys.executable, *(TORCHRUN if ranks else ()), LOOP, how)
    words = ("--gpu", gpu, "--json", "--out", str(folder), *flags)
    done = shardscale("rehearse", *words, "--", *program)
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout) | {"stderr": done.stderr}


def test_a_program_that_fits(tmp_path: Path) -> None:
    code, found = rehearse(tmp_path / "run", "h100", "plain")
    assert (code, found["verdict"], found["steps"]) == (0, "fits", 3)
    (rank,) = found["ranks"]
    # What the program reads as its peak is its own, whatever is reset beside it.
    printed = [line.split() for line in found["stderr"].splitlines()]
    peaks = [line[1:] for line in printed if line[:1] == ["peak"]]
    assert len(peaks) == 4  # the last of a step whose seconds are counted
    allocated, reserved = map(int, peaks[2])
    assert rank["allocated_peak_bytes"] == allocated
    assert rank["reserved_peak_bytes"] == reserved
    (now,) = {line[1] for line in printed if line[:1] == ["now"]}
    peak, end = rank["peak"], rank["end"]
    assert end["total_bytes"] == int(now)
    # Blocks that are not split are larger than what was asked for.
    assert peak["total_bytes"] == pytest.approx(allocated, abs=16 * MIB)
    for category, copies in {"params": 1, "optimizer": 2}.items():
        assert peak["by_category"][category] == pytest.approx(4 * copies * PARAMETERS, rel=1e-3)
    assert peak["phase"].endswith("/backward")
    assert peak["by_category"]["activations"] > 2**30
    assert end["by_category"].get("grads", 0) == end["by_category"].get("activations", 0) == 0
    assert sum(peak["by_module"].values()) == peak["total_bytes"]
    periods = {(phase["period"], phase["phase"]) for phase in rank["phases"]}
    assert periods >= {("steady", phase) for phase in ("forward", "backward", "step")}
    forward = {p["period"]: p["peak_bytes"] for p in rank["phases"] if p["phase"] == "forward"}
    states = 8 * PARAMETERS  # which the first step makes, beside a workspace
    assert forward["steady"] == pytest.approx(forward["first_step"] + states, abs=64 * MIB)
    # The model of the allocator, fed what was recorded, reserves what the real one has.
    cards = {card["gpu"]: card for card in found["cards"]}
    assert set(cards) == {gpu.name for gpu in GPUS}
    assert cards["H100"]["used_bytes"] == pytest.approx(reserved + CONTEXT_BYTES, rel=0.01)
    seconds = rank["seconds"]
    tokens, machine = 8 * 512, Machine.of_gpu("H100", ranks_per_node=1)
    # Of four layers' matrices: forward, and twice as much backward but for the first one's input.
    flops = 6 * tokens * PARAMETERS
    assert seconds["products_s"] == pytest.approx(
        flops / machine.matmul_flops_per_s["fp32"], rel=0.1
    )
    assert seconds["messages_s"] == 0.0
    assert seconds["total_s"] > seconds["products_s"] + seconds["attention_s"]
    assert cards["H100"]["step_s"] == seconds["total_s"] < cards["T4"]["step_s"]


def test_a_compiled_program_is_priced_as_it_was_compiled(tmp_path: Path) -> None:
    found = {
        how: rehearse(tmp_path / how, "h100", how)[1]["ranks"][0]["seconds"]
        for how in ("plain", "compiled")
    }
    plain, compiled = found["plain"], found["compiled"]
    assert compiled["products_s"] == pytest.approx(plain["products_s"], rel=0.01)
    assert compiled["moved_s"] < 0.8 * plain["moved_s"]
    assert compiled["starts_s"] < plain["starts_s"]


def test_a_program_that_resets_its_peaks(tmp_path: Path) -> None:
    phases = []
    for how in ("plain", "resets"):
        _, found = rehearse(tmp_path / how, "h100", how)
        phases.append([(p["phase"], p.get("peak_bytes")) for p in found["ranks"][0]["phases"]])
    assert phases[0] == phases[1]


@pytest.mark.parametrize("how", ["early", "late"])
def test_a_program_that_records_a_history_of_its_own(how: str, tmp_path: Path) -> None:
    code, found = rehearse(tmp_path / "run", "h100", how)
    assert (code, found["verdict"]) == (0, "fits")
    (rank,) = found["ranks"]
    assert rank["peak"]["total_bytes"] == pytest.approx(rank["allocated_peak_bytes"], abs=16 * MIB)
    used = {card["gpu"]: card["used_bytes"] for card in found["cards"]}["H100"]
    assert used == pytest.approx(rank["reserved_peak_bytes"] + CONTEXT_BYTES, rel=0.01)
    assert ("own True" in found["stderr"]) == (how == "late")


def test_a_program_that_runs_out_of_memory(tmp_path: Path) -> None:
    words = ("rehearse", "--gpu", "T4", "--out", str(tmp_path / "run"))
    big = Path(LOOP).read_text().replace("inputs = torch.randn(8,", "inputs = torch.randn(160,")
    script = tmp_path / "big.py"
    script.write_text(big)
    done = shardscale(*words, "--", sys.executable, str(script), "plain")
    assert done.returncode == 1, done.stdout + done.stderr
    line = big[: big.index("loss = model(inputs)")].count("\n") + 1
    assert f"{script}:{line} in main: loss = model(inputs)" in done.stdout
    assert "Out of memory in forward, in " in done.stdout
    assert "alive then: activations" in done.stdout
    assert "try activations: torch.utils.checkpoint" in done.stdout
    verdicts = {row.split()[0]: row for row in done.stdout.splitlines() if "GiB" in row}
    assert "does not fit" in verdicts["T4"]
    assert float(verdicts["B200"].partition(" fits ")[2]) > 0
    report = shardscale("report", str(tmp_path / "run"))
    assert "oom" in report.stdout, report.stdout + report.stderr


def test_two_ranks(tmp_path: Path) -> None:
    code, found = rehearse(tmp_path / "run", "A40", "plain", ranks=True)
    assert (code, found["world_size"], found["gpus"]) == (0, 2, 2)
    assert found["outside_bytes"] == CONTEXT_BYTES + NCCL_GROUP_BYTES
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        states = {name: rank["end"]["by_category"][name] for name in ("params", "optimizer")}
        assert states["params"] == pytest.approx(2 * PARAMETERS, rel=0.01)
        assert states["optimizer"] == pytest.approx(4 * PARAMETERS, rel=0.01)
        # Gathered for the forward and, but for the last layer, for the backward; reduced once.
        once_s = collective_s(A40_PAIR, PAIR, "all_gather", 4 * PARAMETERS)
        assert 2.5 * once_s < rank["seconds"]["messages_s"] < 3.2 * once_s


def test_buckets_of_the_first_step_are_gone_in_the_second(tmp_path: Path) -> None:
    _, found = rehearse(tmp_path / "run", "h100", "ddp", ranks=True)
    for rank in found["ranks"]:
        peaks = {(p["period"], p["phase"]): p["peak_bytes"] for p in rank["phases"]}
        first, steady = (peaks[period, "backward"] for period in ("first_step", "steady"))
        states = 8 * PARAMETERS
        assert steady == pytest.approx(first + states, abs=PARAMETERS)
        machine = Machine.of_gpu("H100", ranks_per_node=2)
        reduced_s = collective_s(machine, PAIR, "all_reduce", 4 * PARAMETERS)
        seconds = rank["seconds"]
        assert seconds["messages_s"] == pytest.approx(reduced_s, rel=0.2)
        assert 0 < seconds["hidden_s"] < seconds["messages_s"]  # beside the backward


def test_rank_0_runs_alone_and_writes_a_snapshot(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot.pickle"
    flags = ("--only-rank", "0", "--snapshot", str(snapshot))
    code, found = rehearse(tmp_path / "run", "A40", "plain", *flags, ranks=True)
    assert (code, found["world_size"], len(found["ranks"])) == (0, 2, 1)
    shown = shardscale("snapshot", str(snapshot))
    assert "loop.py:" in shown.stdout, shown.stdout + shown.stderr


def test_rank_0_alone_opens_groups_of_the_host(tmp_path: Path) -> None:
    program = str(Path(LOOP).with_name("host_groups.py"))
    flags = ("--gpu", "H100", "--only-rank", "0", "--world-size", "2", "--json")

    def rehearsed(how: str) -> "subprocess.CompletedProcess[str]":
        out = ("--out", str(tmp_path / how))
        return shardscale("rehearse", *flags, *out, "--", sys.executable, program, how)

    with ThreadPoolExecutor() as pool:  # at once: each meets at a port of its own
        for done in pool.map(rehearsed, ("default", "nccl")):
            found = json.loads(done.stdout)
            counts = (found["verdict"], found["steps"], found["world_size"])
            assert counts == ("fits", 3, 2), done.stderr
            # one more for its seconds
            assert done.stderr.count("everybody ['here', 'here']") == 4


def test_values_are_answered_and_listed(tmp_path: Path) -> None:
    code, found = rehearse(tmp_path / "run", "h100", "values", "--answer", "loop.py:999=3")
    assert code == 0
    # The same in the step whose operators are written down.
    words = [line.split() for line in found["stderr"].splitlines() if line.startswith("answers")]
    assert [line[1:3] for line in words] == [["False", "True"]] * 4
    assert [float(line[3]) for line in words] == [0.99**step for step in range(4)]  # the loss falls
    assert "known [1, 2, 3]" in found["stderr"]
    (rank,) = found["ranks"]
    reads = {read["code"]: (read["times"], read["answer"]) for read in rank["values"]}
    assert reads == {
        "fails = bool(torch.isnan(loss))": (3, False),
        "holds = bool(torch.isfinite(loss))": (3, True),
        'print("answers", fails, holds, loss.item())': (3, 1.0),
    }


def test_each_rule_answers_its_reads(tmp_path: Path) -> None:
    program = str(Path(LOOP).with_name("reads.py"))
    words = ("rehearse", "--gpu", "H100", "--json", "--out", str(tmp_path / "run"), "--")
    done = shardscale(*words, sys.executable, program)
    (got,) = [line for line in done.stderr.splitlines() if line.startswith("got ")]
    assert ast.literal_eval(got.removeprefix("got ")) == {
        **{"inf": 0.0, "info": 1.0, "function": 0, "stop": False, "trigger": False},
        **{
            "finite": True,
            "not finite": False,
            "a line before its function": False,
            "a call before its line": False,
            "holds": True,
            "holds, by a sum": True,
            "checked": True,
            "boolean": False,
            "integer": 1,
            "number": 1.0,
        },
        **{"small": [1.0] * 4, "large": 0.0, "mask": 80 * 4 * 8, "mask of nan": 0},
        **{"known mask": 0, "nonzero": 32, "printed": True},
    }
    (rank,) = json.loads(done.stdout)["ranks"]
    # Of the large tensors, one copied and one printed, no element is read.
    assert [read["answer"] for read in rank["values"]] == [
        *(0.0, 1.0, 0, False, 0, True, False, True, False, True, False, True, True, True, True),
        *(False, 1, 1.0, 1.0, True, False, "all 32 elements"),
    ]


def mixture(folder: Path, how: str) -> tuple[int, list[str]]:
    """The allocated peak of a step, and the answers to what the program reads."""
    program = str(Path(LOOP).with_name("mixture.py"))
    words = ("rehearse", "--gpu", "H100", "--json", "--out", str(folder), "--")
    done = shardscale(*words, sys.executable, program, how)
    peaks = [line.split()[1] for line in done.stderr.splitlines() if line.startswith("peak ")]
    (rank,) = json.loads(done.stdout)["ranks"]
    return int(peaks[2]), [read["answer"] for read in rank["values"]]


@pytest.mark.parametrize(
    ("how", "answers"),
    [
        ("where", ["256 of 2048 elements: one of 8 experts"]),
        ("unnamed", ["256 of 2048 elements: one of 8 experts"]),
        ("function", ["256 of 1024 elements: one of 8 turns of its loop"] * 2),
        ("one_hot", ["all 8 experts", "256 of 2048 elements: one of 8 experts"]),
        ("tokens_of_any", ["256 of 1024 elements: one of 8 experts"] * 2),
        ("repeated", ["256 of 2048 elements: one of 8 experts"] * 2),
        ("counted", ["256 to each expert"]),
    ],
)
def test_each_expert_of_a_mixture_gets_an_equal_share(
    how: str, answers: list[str], tmp_path: Path
) -> None:
    balanced, _ = mixture(tmp_path / "balanced", "balanced")
    peak, found = mixture(tmp_path / how, how)
    assert found == answers
    # The ways keep other tensors; with all tokens for each expert they took three times as much.
    assert peak < 1.5 * balanced


def test_a_small_model_on_the_cpu_before_the_one_that_is_trained(tmp_path: Path) -> None:
    program = str(Path(LOOP).with_name("small_first.py"))
    words = ("rehearse", "--gpu", "H100", "--json", "--out", str(tmp_path / "run"), "--")
    found = json.loads(shardscale(*words, sys.executable, program).stdout)
    assert "Sequential, 4,196,352 parameters" in found["report"][0]
    (rank,) = found["ranks"]
    states = 4 * 4 * 4_196_352  # weights, gradients and two moments
    assert states <= rank["allocated_peak_bytes"] < 2.5 * states  # with cuBLAS's workspaces
    assert rank["seconds"] is not None


def test_a_process_on_two_gpus_needs_the_larger(tmp_path: Path) -> None:
    program = str(Path(LOOP).with_name("two_gpus.py"))
    words = ("rehearse", "--gpu", "H100", "--gpus", "2", "--json", "--out", str(tmp_path / "run"))
    found = json.loads(shardscale(*words, "--", sys.executable, program).stdout)
    (rank,), (other,) = found["ranks"], found["other_gpus"]
    output = 4096 * 8192 * 4  # and its square; the optimizer's states are a fourth of that
    assert (other["rank"], other["gpu"]) == (0, 1)
    assert rank["reserved_peak_bytes"] < 2 * output < other["allocated_peak_bytes"]
    assert other["reserved_peak_bytes"] >= other["allocated_peak_bytes"]
    cards = {card["gpu"]: card for card in found["cards"]}
    assert cards["H100"]["used_bytes"] == other["reserved_peak_bytes"] + CONTEXT_BYTES
    assert "rank 0 uses GPU 1, too: allocated" in "".join(found["report"])


def test_flex_attention_is_priced_by_its_products(tmp_path: Path) -> None:
    program = str(Path(LOOP).with_name("flex.py"))
    words = ("rehearse", "--gpu", "H100", "--out", str(tmp_path / "run"))
    done = shardscale(*words, "--", sys.executable, program)
    # One forward, and one backward, with a mask.
    assert "    2 calls of FlexAttention have masks, which are not known here" in done.stdout
    assert "Triton kernels multiply" not in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "fused attention" in line]
    products = (2 + 5) * (1 + 0.5)  # forward and backward, of all keys and of the causal half
    flops = products * 2 * 2 * 8192 * 8192 * 64
    rate = Machine.of_gpu("H100", ranks_per_node=1).attention_flops_per_s["bf16"]
    assert float(line.split()[-1]) == pytest.approx(flops / rate, abs=5e-5)


def test_an_answer_of_the_user(tmp_path: Path) -> None:
    line = Path(LOOP).read_text().splitlines().index("            while loss.item() < 5:") + 1
    code, found = rehearse(tmp_path / "run", "h100", "loop", "--answer", f"loop.py:{line}=7.5")
    assert code == 0
    assert [read["answer"] for read in found["ranks"][0]["values"]] == [7.5]


def test_a_loop_that_waits_for_a_value_ends(tmp_path: Path) -> None:
    code, found = rehearse(tmp_path / "run", "h100", "loop")
    assert (code, found["verdict"]) == (4, None)
    assert "has read a value 10,000 times in one step" in found["status"]["reason"]
    assert "--answer" in found["status"]["reason"]


def test_watched_on_a_gpu(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    program = (sys.executable, LOOP, "watch")
    alone = subprocess.run(
        program, env=environment(tmp_path / "alone"), capture_output=True, text=True
    )
    watched = shardscale(
        "watch", "--out", str(folder), "--", *program, more=environment(tmp_path / "cache")
    )
    assert watched.returncode == alone.returncode == 0, watched.stderr
    # Peaks that the program reads are its own, although the observer resets them.
    assert watched.stdout == alone.stdout
    records = [json.loads(line) for line in (folder / "rank0.jsonl").read_text().splitlines()]
    peaks = [r for r in records if r["kind"] == "ledger" and r["moment"] == "peak"]
    assert [ledger["step"] for ledger in peaks] == [1, 3]
    lines = peaks[-1]["device"]
    assert lines["optimizer_bytes"] == pytest.approx(8 * PARAMETERS, rel=1e-3)
    assert sum(lines[f"{name}_bytes"] for name in CATEGORIES) == lines["used_bytes"]
    allocated = int(alone.stdout.split("peak")[-1].split()[0])
    assert lines["used_bytes"] == pytest.approx(allocated, abs=16 * MIB)
    steps = [r for r in records if r["kind"] == "step"]
    assert max(step["allocated_peak_bytes"] for step in steps) == allocated
    assert [r for r in records if r.get("name") == "observer_fault"] == []


def test_an_unknown_gpu_is_one_sentence(tmp_path: Path) -> None:
    done = shardscale("rehearse", "--gpu", "X1", "--out", str(tmp_path / "r"), "--", "python")
    assert done.returncode == 2
    assert "X1" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_our_own_launcher_on_two_ranks(tmp_path: Path) -> None:
    flags = (*SHORT, *TINY, "--global-batch", "8", "--strategy=fsdp")
    training = (*TORCHRUN, "-m", "launcher.train", *flags)
    words = ("--gpu", "H100", "--json", "--out", str(tmp_path / "rehearsed"), "--", sys.executable)
    done = shardscale("rehearse", *words, *training, "--out", str(tmp_path / "run"))
    found = json.loads(done.stdout)
    # Requests to stop travel in a sum with losses, which nothing computes.
    assert (found["verdict"], found["steps"], found["world_size"]) == ("fits", 3, 2), done.stderr


def test_ranks_that_share_their_tokens_count_once(tmp_path: Path) -> None:
    program = str(Path(LOOP).with_name("matrices_and_shards.py"))
    command = (sys.executable, *TORCHRUN, program)
    done = shardscale("rehearse", "--gpu", "h100", "--out", str(tmp_path / "run"), "--", *command)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (tmp_path / "run" / "rank0.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record for record in map(json.loads, lines) if record["kind"] == "step"]
    assert [step["tokens"] for step in steps] == [2 * 32] * 3


def test_a_tied_embedding_is_built_once(tmp_path: Path) -> None:
    # The frozen one in bf16, and two fp32 values while the first is sharded.
    embedding = 50257 * 768
    flags = (
        *("--model=gpt2", "--layers=1", "--lora-rank=4", "--random-base", "--precision=bf16"),
        *("--seq-len=64", "--global-batch=1"),
    )
    training = ("-m", "launcher.train", *SHORT, *flags, "--strategy=fsdp", "--micro-batch=1")
    words = ("--gpu", "H100", "--json", "--out", str(tmp_path / "rehearsed"), "--", sys.executable)
    done = shardscale("rehearse", *words, *training, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    (rank,) = json.loads(done.stdout)["ranks"]
    reserved = max(p["reserved_peak_bytes"] for p in rank["phases"] if p["phase"] == "build")
    assert reserved < 2 * (embedding + 9 * 10**6) + 2 * 4 * embedding + 44 * MIB


@pytest.mark.parametrize("how", ["plain", "recomputed"])
def test_sizes_of_images_are_known_on_the_device(tmp_path: Path, how: str) -> None:
    program = (sys.executable, str(Path(LOOP).with_name("images.py")))
    real = subprocess.run((*program, "cpu"), capture_output=True, text=True, timeout=300)
    words = ("--gpu", "T4", "--json", "--out", str(tmp_path / "run"))
    done = shardscale("rehearse", *words, "--", *program, "cuda", how)
    found = json.loads(done.stdout)
    assert (found["verdict"], found["steps"]) == ("fits", 3)
    assert found["ranks"][0]["values"] == []
    assert real.stdout.startswith("sizes")
    assert real.stdout in done.stderr
