"""The launcher's CUDA path from the first line to the summary, over what a run can choose."""

import sys
from pathlib import Path

import pytest
from nullgpu.runs import MIB, Run, train

from launcher.measure.hardware import gpu_named
from launcher.strategies.ledger import CATEGORIES
from launcher.tools.rehearse.null_gpu import environment as null_gpu

# torch keeps one for each handle of cuBLAS: the main thread's, and that of autograd's thread.
# Beside them this small a model could be anything.
WORKSPACES_BYTES = 2 * 32 * MIB
BOUND = 0.02  # of what was predicted

PURE = ("--betas", "0.9", "0.99")  # which bf16 moments need
CHECKPOINTING = ("none", "selective", "full", "offload")
CASES = {
    f"{precision}, {kept}": (
        *("--strategy", "single", "--precision", precision, "--activation-checkpointing", kept),
        *(PURE if precision == "bf16-pure" else ()),
    )
    for precision in ("fp32", "bf16", "bf16-pure", "fp16", "fp8")
    for kept in CHECKPOINTING
} | {
    # What `--compile auto` takes for tested.
    "compiled": ("--precision", "bf16", "--compile"),
    "compiled, selective": (
        *("--precision", "bf16", "--compile", "--activation-checkpointing", "selective"),
    ),
    "compiled, full": ("--precision", "bf16", "--compile", "--activation-checkpointing", "full"),
    "compiled, fsdp": ("--strategy", "fsdp", "--precision", "bf16", "--compile"),
    "compiled, fsdp-grad-op": (
        *("--strategy", "fsdp", "--precision", "bf16", "--no-reshard-after-forward", "--compile"),
    ),
    "compiled, like Llama": (
        *("--precision", "bf16", "--compile", "--position", "rope", "--norm", "rms"),
        *("--activation", "swiglu", "--kv-heads", "1"),
    ),
    "fsdp": ("--strategy", "fsdp", "--precision", "bf16"),
    "fsdp, fp8": ("--strategy", "fsdp", "--precision", "fp8"),
    "fsdp-grad-op": ("--strategy", "fsdp", "--precision", "bf16", "--no-reshard-after-forward"),
    "fsdp, offloaded": (
        *("--strategy", "fsdp", "--precision", "bf16", "--activation-checkpointing", "offload"),
        *("--offload-param", "cpu", "--offload-optimizer", "cpu"),
    ),
    "fsdp, optimizer in backward": (
        *("--strategy", "fsdp", "--precision", "bf16", "--activation-checkpointing", "full"),
        *("--optimizer-in-backward", "--clip", "0"),
    ),
    "adapters": ("--lora-rank", "8", "--random-base", "--precision", "bf16"),
    "adapters, offload": (
        *(
            "--lora-rank",
            "8",
            "--random-base",
            "--lora-targets",
            "all",
            "--precision",
            "bf16-pure",
            *PURE,
        ),
        *("--activation-checkpointing", "offload"),
    ),
    "adapters, fsdp, offloaded": (
        *(
            "--lora-rank",
            "8",
            "--random-base",
            "--strategy",
            "fsdp",
            "--precision",
            "bf16",
            "--norm",
            "rms",
        ),
        *("--offload-param", "cpu", "--offload-optimizer", "cpu"),
    ),
    "fsdp, apollo offloaded": (
        *("--strategy", "fsdp", "--precision", "bf16", "--optimizer", "apollo"),
        *("--offload-param", "cpu"),
    ),
    "a budget": (
        *("--strategy", "single", "--precision", "bf16", "--dropout", "0.1"),
        *("--activation-checkpointing", "budget=500KiB"),
    ),
    "fsdp, every second block": (
        *("--strategy", "fsdp", "--precision", "bf16", "--activation-checkpointing", "every=2"),
    ),
    "fsdp, some products": (
        *("--strategy", "fsdp", "--precision", "bf16"),
        *("--activation-checkpointing", "keep=attention,mlp-up"),
    ),
}
# No multiple of 16.
LONG = ("--context", "471", "--seq-len", "471", "--micro-batch", "4")
ALL_SCORES = {
    "eager": ("--precision", "bf16", "--attention", "eager"),
    "eager, fp16": ("--precision", "fp16", "--attention", "eager"),
    "sdpa-math, dropout": (
        *("--precision", "bf16", "--attention", "sdpa-math", "--dropout", "0.1"),
    ),
    "sdpa-math, window, full": (
        *("--precision", "fp32", "--attention", "sdpa-math", "--window", "100"),
        *("--activation-checkpointing", "full"),
    ),
    "heads that no kernel takes": ("--precision", "fp32", "--d-model", "60", "--heads", "2"),
    "a mask that no kernel takes": (
        *("--precision", "bf16", "--attention", "sdpa", "--window", "100"),
        *("--d-model", "60", "--heads", "2"),
    ),
    "a mask for the memory-efficient kernel": (
        *("--precision", "fp32", "--attention", "sdpa", "--document-attention"),
    ),
    "documents": ("--precision", "fp32", "--document-attention"),
}
"""Attention that holds scores or a mask, and that whose first call leaves tensors in cycles."""
ZERO = {
    "zero1": ("--zero", "1", "--precision", "bf16"),
    "zero2": ("--zero", "2", "--precision", "bf16", "--activation-checkpointing", "full"),
    "zero3": ("--zero", "3", "--precision", "bf16", "--activation-checkpointing", "selective"),
    "zero2, optimizer offloaded": (
        *("--zero", "2", "--precision", "bf16", "--offload-optimizer", "cpu"),
    ),
    "zero3, all offloaded": (
        *("--zero", "3", "--precision", "bf16"),
        *("--offload-optimizer", "cpu", "--offload-param", "cpu"),
    ),
    "zero3, half of the optimizer offloaded": (
        *("--zero", "3", "--precision", "bf16", "--global-batch", "8"),
        *("--offload-optimizer", "cpu", "--offload-fraction", "0.5"),
    ),
    "adapters, zero2": ("--lora-rank", "8", "--random-base", "--zero", "2", "--precision", "bf16"),
    "adapters, zero3": (
        *(
            "--lora-rank",
            "8",
            "--random-base",
            "--zero",
            "3",
            "--precision",
            "bf16",
            "--lora-targets",
            "all",
        ),
        *("--activation-checkpointing", "full"),
    ),
}


def assert_trained(run: Run) -> None:
    """It has come to its end, and its records hold what a GPU's do."""
    assert run.code == 0, run.output[-4000:]
    assert run.json("status.json")["state"] == "completed"
    (record,) = run.records("run")
    assert (record["device"], record["device_name"]) == ("cuda:0", "NVIDIA H200")
    steps = run.records("step")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    for step in steps:  # `applied` is a flag that a kernel should have set
        assert 0 < step["allocated_peak_bytes"] <= step["reserved_peak_bytes"]
        assert step["reserved_peak_bytes"] < step["device_used_bytes"]
    summary = run.json("summary.json")
    assert summary["peak_kind"] == "allocated on the GPU"
    assert summary["peak_bytes"] >= max(step["allocated_peak_bytes"] for step in steps)


def assert_as_predicted(run: Run) -> None:
    plan = run.json("summary.json")["plan"]
    assert "reason" not in plan, plan
    measured, predicted = (
        plan[which]["peak"] - WORKSPACES_BYTES for which in ("measured", "predicted")
    )
    assert measured == pytest.approx(predicted, rel=BOUND), plan
    # Beside the workspaces, which no line of the plan has, each line is as planned.
    for line in set(CATEGORIES) - {"temporary"}:
        off = abs(plan["measured"][line] - plan["predicted"][line])
        assert off <= BOUND * predicted, (line, plan)


@pytest.mark.parametrize("flags", CASES.values(), ids=CASES.keys())
def test_a_run_trains_and_takes_what_was_predicted(flags: tuple[str, ...], tmp_path: Path) -> None:
    run = train(tmp_path, *flags)
    assert_trained(run)
    assert_as_predicted(run)


@pytest.mark.parametrize("flags", ALL_SCORES.values(), ids=ALL_SCORES.keys())
def test_attention_takes_what_was_predicted(flags: tuple[str, ...], tmp_path: Path) -> None:
    run = train(tmp_path, *LONG, *flags)
    assert_trained(run)
    assert_as_predicted(run)


@pytest.mark.parametrize("flags", ZERO.values(), ids=ZERO.keys())
def test_deepspeed_trains_and_takes_what_was_predicted(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    # It asks the device whether a step has overflowed.
    run = train(tmp_path, *flags, more={"SHARDSCALE_NULL_GPU_CHECKS": "false"})
    assert_trained(run)
    assert_as_predicted(run)


# DDP is not held against its prediction: it may take its gradients once more than is planned here,
# though not where larger models are compared (bench/allocator.py), which is not understood yet.
UNPREDICTED = {
    "ddp, compiled": ("--strategy", "ddp", "--precision", "bf16", "--compile"),
    # Of so small a model 2 to 4% less is taken than predicted.
    "compiled, fp8": ("--precision", "fp8", "--compile"),
    "compiled, fsdp, fp8": ("--strategy", "fsdp", "--precision", "fp8", "--compile"),
    "ddp": ("--strategy", "ddp", "--precision", "bf16"),
    "ddp, full, fp16": (
        *("--strategy", "ddp", "--precision", "fp16", "--activation-checkpointing", "full"),
    ),
}


@pytest.mark.parametrize("flags", UNPREDICTED.values(), ids=UNPREDICTED.keys())
def test_a_run_trains(flags: tuple[str, ...], tmp_path: Path) -> None:
    assert_trained(train(tmp_path, *flags))


# What torch itself takes on this GPU, and what has no other way.
KERNELS = {
    ("auto", None): "sdpa (cudnn)",
    ("sdpa", None): "sdpa (cudnn)",
    ("eager", None): "eager",
    ("auto", "16"): None,
    ("sdpa", "16"): None,
    ("eager", "16"): "eager",
}


def test_a_kernel_that_does_not_take_the_heads_is_rejected(tmp_path: Path) -> None:
    heads_of_50 = ("--d-model", "250", "--heads", "5", "--precision", "fp16")
    run = train(tmp_path, *heads_of_50, "--attention", "sdpa-efficient")
    assert (run.code, "Traceback" in run.output) == (2, False), run.output[-4000:]
    assert "efficient cannot run on cuda with torch.float16, heads of 50; use" in run.output


@pytest.mark.parametrize(("attention", "window"), KERNELS)
def test_attention_is_the_one_that_is_recorded(
    attention: str, window: str | None, tmp_path: Path
) -> None:
    more = () if window is None else ("--window", window)
    run = train(tmp_path, "--precision", "bf16", "--attention", attention, *more)
    assert_trained(run)
    assert_as_predicted(run)
    (record,) = run.records("run")
    expected = KERNELS[attention, window]
    assert expected is None or record["attention"] == expected


@pytest.mark.parametrize(
    ("gpu", "precision", "reason"),
    [
        ("h200", "bf16", "auto: the GPU computes in it"),
        ("v100-32gb", "fp32", "does not compute in bf16"),
    ],
)
def test_the_default_precision_is_what_the_gpu_has(
    gpu: str, precision: str, reason: str, tmp_path: Path
) -> None:
    run = train(tmp_path, more=null_gpu(sys.executable, [gpu_named(gpu)]))
    assert run.code == 0, run.output[-4000:]
    first = next(line for line in run.output.splitlines() if "parameters, " in line)
    assert f"parameters, {precision} (auto: " in first
    assert reason in first


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "off (auto: saves about "),
        (("--norm", "rms"), "off (auto: what it gains is measured for "),
        (("--precision", "fp8"), "off (auto: saves about "),
        (("--zero", "2"), "off (auto: not tested with --zero 2)"),
        (("--compile", "off"), ""),
    ],
)
def test_what_is_compiled_by_default_is_said(
    flags: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    run = train(
        tmp_path,
        *flags,
        more={"SHARDSCALE_NULL_GPU_CHECKS": "false"} if "--zero" in flags else None,
    )
    assert run.code == 0, run.output[-4000:]
    lines = [line for line in run.output.splitlines() if "compile: " in line]
    assert len(lines) == bool(says)
    assert all(f"compile: {says}" in line for line in lines)
    assert "compile: false" in (run.folder / "config.yaml").read_text()
