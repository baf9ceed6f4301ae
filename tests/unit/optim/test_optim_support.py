"""Optimizer and precision under each strategy: what runs, and why the rest does not."""

import re
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

from launcher.config.resolve import refusal, resolve
from launcher.config.rules import Setting
from launcher.config.schema import RunConfig
from launcher.optim.choice import OptimizerName, Precision
from launcher.optim.registry import OPTIMIZERS
from launcher.util.errors import UserError

STRATEGIES: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single"},
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "zero0": {"strategy": "zero", "zero": 0},
    "zero1": {"strategy": "zero", "zero": 1},
    "zero2": {"strategy": "zero", "zero": 2},
    "zero3": {"strategy": "zero", "zero": 3},
}


NVME = {"offload_optimizer": "nvme", "nvme_path": Path("DIR")}


def setting(device_type: str = "cpu", accumulation: int = 1, **changes: Any) -> Setting:
    config = RunConfig().replace(**({"strategy": "single"} | changes))
    return Setting(
        config=config.replace(global_batch=accumulation * config.data.micro_batch),
        model=config.model.build(),
        world_size=1,
        device_type=device_type,
    )


def refused(name: str, values: tuple[str, ...], **common: Any) -> set[tuple[str, str]]:
    return {
        (value, strategy)
        for value, (strategy, flags) in product(values, STRATEGIES.items())
        if refusal(setting(**{name: value}, **flags, **common)) is not None
    }


def test_every_optimizer_but_those_of_whole_matrices_runs_everywhere() -> None:
    assert set(OPTIMIZERS) == set(get_args(OptimizerName))
    assert refused("optimizer", get_args(OptimizerName)) == {
        (name, stage)
        for name in ("adafactor", "muon", "apollo")
        for stage in ("zero1", "zero2", "zero3")
    }


def test_every_precision_on_a_cpu() -> None:
    assert refused("precision", get_args(Precision)) == {
        ("bf16-pure", "zero0"),
        *(("fp16", stage) for stage in ("zero0", "zero1", "zero2", "zero3")),
        *((name, strategy) for name in ("tf32", "fp8") for strategy in STRATEGIES),
    }


def test_every_precision_on_a_gpu() -> None:
    pytest.importorskip("torchao")
    assert refused("precision", get_args(Precision), device_type="cuda") == {
        ("bf16-pure", "zero0"),
        ("fp16", "zero0"),
        *(("fp8", stage) for stage in ("zero0", "zero1", "zero2", "zero3")),
    }


def test_an_update_in_the_backward() -> None:
    common = {"optimizer_in_backward": True, "clip": 0.0}
    assert refused("optimizer", ("adamw",), **common) == {
        ("adamw", strategy) for strategy in ("ddp", "zero0", "zero1", "zero2", "zero3")
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "adafactor", **STRATEGIES["zero2"]}, "--zero 2 shards.*--strategy fsdp"),
        (
            {**STRATEGIES["zero3"], **NVME, "optimizer": "sgd"},
            "nvme swaps two moments in fp32.*not sgd",
        ),
        (
            {**STRATEGIES["zero3"], **NVME, "moments_dtype": "bf16"},
            "nvme swaps two moments in fp32.*bf16",
        ),
        ({"moments_dtype": "bf16", "optimizer": "adam"}, "--moments-dtype bf16 belongs to"),
        ({"moments_dtype": "fp32", "optimizer": "adamw8bit"}, "fp32 belongs to .*not adamw8bit"),
        ({"moments_dtype": "bf16", "betas": (0.9, 0.999)}, r"--betas 0\.9 0\.999: .* bf16"),
        ({"precision": "bf16-pure", "betas": (0.9, 0.999)}, r"--betas 0\.9 0\.999: .* bf16"),
        ({"apollo_rank": 8}, "--apollo-rank 8 belongs to --optimizer apollo, not adamw"),
        (
            {"optimizer": "apollo", "apollo_rank": 10**6},
            r"--apollo-rank 1000000 is more than .* use",
        ),
        (
            {"compensation": False, "precision": "fp32"},
            "--no-compensation belongs to .*bf16-pure, not fp32",
        ),
        ({"precision": "bf16-pure", "optimizer": "sgd"}, "bf16-pure needs .* sgd does not"),
        (
            {"precision": "bf16-pure", **STRATEGIES["zero2"], "offload_optimizer": "cpu"},
            "--offload-optimizer cpu: .* --precision bf16-pure",
        ),
        ({"precision": "fp16", **STRATEGIES["zero1"]}, "on GPUs only: use --precision bf16"),
        ({"precision": "fp8", "strategy": "single"}, "not a CPU|pip install"),
        ({"precision": "tf32"}, "--precision tf32 .* CPU: use --precision fp32"),
        ({"optimizer_in_backward": True, "strategy": "single"}, "cannot clip to 1.0: .*--clip 0"),
        (
            {"optimizer_in_backward": True, "clip": 0.0, "accumulation": 4, "strategy": "single"},
            "cannot accumulate 4 micro-batches",
        ),
        (
            {
                **{"optimizer_in_backward": True, "clip": 0.0, "strategy": "single"},
                "precision": "fp16",
            },
            "before it is known whether fp16 has overflowed",
        ),
    ],
)
def test_refused_in_one_sentence(changes: dict[str, Any], words: str) -> None:
    sentence = refusal(setting(**changes))
    assert sentence is not None
    assert re.search(words, sentence)
    assert "\n" not in sentence


@pytest.mark.parametrize(
    "size",
    [{"d_model": 72, "heads": 2}, {"micro_batch": 1, "seq_len": 15}, {"mlp_tile": 40}],
)
def test_fp8_needs_sizes_that_are_multiples_of_16(size: dict[str, int]) -> None:
    pytest.importorskip("torchao")
    wrong = setting("cuda", precision="fp8", strategy="single", **size)
    assert "in tiles of 16" in str(refusal(wrong))


def test_tf32_is_for_gpus() -> None:
    assert refusal(setting("cuda", precision="tf32")) is None


@pytest.mark.parametrize("momentum", [-0.1, 1.0])
def test_momentum_lies_in_its_range(momentum: float) -> None:
    with pytest.raises(UserError, match=f"--momentum {momentum} must be"):
        RunConfig().replace(momentum=momentum)


def test_resolving_refuses() -> None:
    config = RunConfig().replace(optimizer_in_backward=True, clip=0.0, global_batch=16)
    with pytest.raises(UserError, match="cannot accumulate 2 micro-batches"):
        resolve(config, world_size=1, device_type="cpu")
