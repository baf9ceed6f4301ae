"""The ledger at the peak of a step, line by line against the plan: seed-134m at batch 125 x 256."""

from pathlib import Path

import pytest
from nullgpu.runs import Run, train

from launcher.strategies.ledger import CATEGORIES

SEED = (
    *("--model", "seed-134m", "--seq-len", "256", "--micro-batch", "125", "--precision", "bf16"),
    *("--test-batches", "0", "--save-every=0"),
)
ROTATED = ("--position", "rope", "--norm", "rms", "--activation", "swiglu")
CASES = {
    "single": (),
    "accumulated": ("--global-batch", "250"),
    "ddp": ("--strategy", "ddp"),
    "ddp, accumulated": ("--strategy", "ddp", "--global-batch", "250"),
    "fsdp": ("--strategy", "fsdp"),
    "fsdp, accumulated": ("--strategy", "fsdp", "--global-batch", "250"),
    "zero1": ("--zero", "1"),
    "zero2": ("--zero", "2"),
    "zero2, accumulated": ("--zero", "2", "--global-batch", "250"),
    "zero3": ("--zero", "3"),
    "activations offloaded": ("--activation-checkpointing", "offload"),
    "fp8": ("--precision", "fp8"),
    "optimizer offloaded": ("--zero", "2", "--offload-optimizer", "cpu"),
    "flash, documents": ("--attention", "flash", "--document-attention"),
    "rotated, selective": (*ROTATED, "--activation-checkpointing", "selective"),
    "rotated, tiles": (*ROTATED, "--activation-checkpointing", "full", "--mlp-tile", "1024"),
    "rotated, flash, compiled": (*ROTATED, "--attention", "flash", "--compile", "on"),
}
FIRST_OF_TWO = {
    "SHARDSCALE_NULL_GPU_ALONE": "1",
    **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
}
APPLIED = {"SHARDSCALE_NULL_GPU_CHECKS": "false"}
BOUND = 0.0005  # of the peak


@pytest.mark.parametrize("flags", CASES.values(), ids=CASES.keys())
def test_each_line_is_as_planned(flags: tuple[str, ...], tmp_path: Path) -> None:
    run = train(tmp_path, *SEED, *flags, tiny=False, more=APPLIED)
    compare(run, compiled="--compile" in flags)


@pytest.mark.parametrize(
    "flags",
    [
        ("--strategy", "ddp", "--global-batch", "250"),
        ("--strategy", "fsdp"),
        ("--strategy", "fsdp", "--reduce-each-micro-batch", "--global-batch", "500"),
        ("--strategy", "fsdp", "--no-reshard-after-forward"),
        (
            "--strategy",
            "fsdp",
            "--lora-rank=8",
            "--random-base",
            "--activation-checkpointing",
            "full",
        ),
    ],
    ids=["ddp", "fsdp", "fsdp, accumulated", "fsdp-grad-op", "fsdp, lora"],
)
def test_first_of_two_ranks(flags: tuple[str, ...], tmp_path: Path) -> None:
    flags = (*SEED, *flags)
    compare(train(tmp_path, *flags, tiny=False, gpus=2, more={**APPLIED, **FIRST_OF_TWO}))


@pytest.mark.parametrize(
    "flags",
    [
        (*SEED, "--activation-checkpointing", "selective", "--micro-batch", "32"),
        (*SEED, "--activation-checkpointing", "full", "--micro-batch", "16"),
        SEED,
        (
            *("--layers", "4", "--d-model", "1024", "--heads", "8", "--position", "rope"),
            *("--context", "128", "--micro-batch", "64", "--test-batches", "0"),
        ),
    ],
    ids=["selective", "full", "none", "rope"],
)
def test_peak_of_compiled_blocks_in_fp8(flags: tuple[str, ...], tmp_path: Path) -> None:
    """The compiler's order of products in backward is not known, so lines may differ."""
    how = ("--precision", "fp8", "--compile", "on")
    run = train(tmp_path, *flags, *how, tiny=False, more=APPLIED)
    assert run.code == 0, run.output[-4000:]
    plan = run.json("summary.json")["plan"]
    assert plan["measured"]["peak"] == pytest.approx(plan["predicted"]["peak"], rel=0.02), plan


def compare(run: Run, *, compiled: bool = False) -> None:
    assert run.code == 0, run.output[-4000:]
    plan = run.json("summary.json")["plan"]
    assert "reason" not in plan, plan
    measured, predicted = plan["measured"], plan["predicted"]
    bound = BOUND * predicted["peak"]
    for line in (*CATEGORIES, "peak"):
        assert measured[line] == pytest.approx(predicted[line], abs=bound), (line, plan)
    for name, period in plan["periods"].items():
        # In its first step compiled code has not yet learned what it may leave out.
        off = 0.01 * predicted["peak"] if compiled and name == "first_step" else bound
        assert period["measured"] == pytest.approx(period["predicted"], abs=off), (name, plan)
    (steady,) = (r for r in run.records("ledger") if r["moment"] == "peak" and r["step"] == 3)
    (planned,) = (r for r in run.records("ledger") if r["moment"] == "predicted")
    assert steady["phase"] == planned["phase"]


def test_a_users_own_history_serves_the_ledger(tmp_path: Path) -> None:
    run = train(tmp_path, "--precision", "bf16", "--memory-trace")
    assert run.code == 0, run.output[-4000:]
    plan = run.json("summary.json")["plan"]
    measured, predicted = plan["measured"], plan["predicted"]
    for line in set(CATEGORIES) - {"temporary"}:  # the workspaces of cuBLAS are in that
        # A scalar more or less: the sum of the losses.
        assert measured[line] == pytest.approx(predicted[line], abs=8), (line, plan)
    assert (run.folder / "memory_snapshot_rank0.pickle").exists()
