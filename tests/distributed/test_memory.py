"""Bytes that a rank holds, counted on four real ranks, against each strategy's exact arithmetic.

Every dimension of the model divides by four, so nothing is padded. A byte count that is not
explained is an error: what the interpreter keeps alive is searched without asking the engine.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from harness import Results, run_ranks, selected, write_text
from memory_cases import CASES, INPUTS_BYTES, MOMENTS, RANKS, ROPE, Case

from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.model.sizes import named
from launcher.optim.entry import parameter_groups

MODEL = named("nano", layers=2, d_model=64, heads=4, context=32, vocab_size=260)
ROPE_MODEL = replace(MODEL, **ROPE)
STEP_COUNTERS_BYTES = 28 * 4  # at most one fp32 counter for each of the model's tensors


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Bytes on one rank."""

    params: int
    master: int
    grads: dict[str, int]
    optimizer: int
    bucket: dict[str, int]


@pytest.fixture(scope="module")
def counted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results that each rank reported, from one process group for all selected cases."""
    folder = tmp_path_factory.mktemp("memory")
    text = write_text(folder / "text.txt")
    deepspeed = folder / "zero3.json"
    # By default biases and norms stay whole on every rank; the arithmetic is about what does not.
    section = {"stage": 3, "stage3_param_persistence_threshold": 0}
    deepspeed.write_text(json.dumps({"zero_optimization": section}))
    names = sorted({params["case"].name for params in selected(request)})
    ended = run_ranks((RANKS, "memory_rank", text, deepspeed, folder, *names))
    return Results.of(folder, ended)


def reports(counted: Results, case: Case) -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = counted.get(name=case.name)["ranks"]
    assert len(ranks) == RANKS
    return ranks


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_states_follow_the_arithmetic(case: Case, counted: Results) -> None:
    for rank, report in enumerate(reports(counted, case)):
        assert report["parameters"] == model_of(case).parameter_count
        expected = expect(case, rank)
        for moment in ("accumulating", "after_backward"):
            ledger = report[moment]["ledger"]
            where = f"rank {rank}, {moment}: {ledger}"
            assert ledger["params_bytes"] == expected.params, where
            assert ledger["master_bytes"] == expected.master, where
            assert ledger["grads_bytes"] == expected.grads[moment], where
            assert ledger["buffers_bytes"] == expected.bucket[moment], where
            counters = ledger["optimizer_bytes"] - expected.optimizer
            assert 0 <= counters <= STEP_COUNTERS_BYTES, where


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_ledger_explains_every_live_tensor(case: Case, counted: Results) -> None:
    for rank, report in enumerate(reports(counted, case)):
        for moment in MOMENTS:
            unexplained = report[moment]["alive_bytes"] - report[moment]["states_bytes"]
            where = f"rank {rank}, {moment}: {report[moment]['ledger']}"
            assert 0 <= unexplained <= INPUTS_BYTES, where


def model_of(case: Case) -> ModelConfig:
    return ROPE_MODEL if case.rope else MODEL


def expect(case: Case, rank: int) -> Expected:
    strategy, count = case.strategy, model_of(case).parameter_count
    if strategy in ("ddp", "zero0"):  # both compute under autocast, on fp32 parameters
        return _expected(params=4 * count, grads=4 * count, optimizer=8 * count)
    if strategy.startswith("fsdp"):
        group = RANKS // 2 if strategy.startswith("fsdp-hybrid") else RANKS
        shard = 4 * count // group
        # Without communication in between, a window accumulates whole gradients.
        window = shard if strategy == "fsdp-each" else 4 * count
        return _expected(
            params=shard, grads=shard, accumulating=window, optimizer=8 * count // group
        )
    return _expect_zero(strategy, case, rank)


def _expect_zero(strategy: str, case: Case, rank: int) -> Expected:
    count = model_of(case).parameter_count
    bucket = model_of(case).block_parameter_count  # elements of DeepSpeed's, as zero.py sets it
    element = 2 if case.precision == "bf16" else 4
    in_fp32_apart = case.precision == "bf16" and "accumulating" not in case.name
    states = {"master": 4 * count // RANKS, "optimizer": 8 * count // RANKS}
    if strategy == "zero3":
        return _expected(
            params=element * count // RANKS,
            grads=(4 if in_fp32_apart else element) * count // RANKS,
            **states,
            bucket=element * bucket,
        )
    if in_fp32_apart and strategy == "zero1":
        # Whole fp32 gradients beside whole bf16 ones: more than DDP's, and all DeepSpeed offers.
        return _expected(params=2 * count, grads=(4 + 2) * count, **states)
    if in_fp32_apart:
        return _expected(params=2 * count, grads=4 * count // RANKS, **states)
    mine = element * _partition_elements(model_of(case), rank)
    if strategy == "zero2":
        return _expected(params=element * count, grads=mine, **states)
    return _expected(
        params=element * count,
        grads=mine,
        accumulating=element * count,
        **states,
        bucket_accumulating=element * bucket,
    )


def _expected(
    *,
    params: int,
    grads: int,
    optimizer: int,
    master: int = 0,
    accumulating: int | None = None,
    bucket: int = 0,
    bucket_accumulating: int | None = None,
) -> Expected:
    if accumulating is None:
        accumulating = grads
    if bucket_accumulating is None:
        bucket_accumulating = bucket
    return Expected(
        params=params,
        grads={"accumulating": accumulating, "after_backward": grads},
        optimizer=optimizer,
        master=master,
        bucket={"accumulating": bucket_accumulating, "after_backward": bucket},
    )


def _partition_elements(config: ModelConfig, rank: int) -> int:
    """Gradients that ZeRO-1 and 2 keep: parameters that lie in this rank's part of their group.

    A part is a quarter of the group's elements laid end to end. DeepSpeed keeps whole the tensors
    that a boundary cuts, so parts are a little more than a quarter.
    """
    with torch.device("meta"):
        model = GPT(config)
    elements = 0
    for group in parameter_groups(model, 0.1):
        sizes = [parameter.numel() for parameter in group["params"]]
        share = sum(sizes) // RANKS
        start = 0
        for size in sizes:
            if start < (rank + 1) * share and start + size > rank * share:
                elements += size
            start += size
    return elements


def test_the_arithmetic_is_a_quarter_and_a_little() -> None:
    parts = [_partition_elements(MODEL, rank) for rank in range(RANKS)]
    whole = MODEL.parameter_count
    assert all(whole // RANKS <= part < whole for part in parts)
