"""Predicted seconds on known GPUs: shapes, kernels, hooks and what was published of them."""

import dataclasses
from collections import Counter
from typing import Any

import pytest

from launcher.config.resolve import Resolved, resolve
from launcher.config.schema import RunConfig
from launcher.forecast.efficiency import (
    EFFICIENCIES,
    LEAST_OF_PREDICTED,
    MOST_OF_PREDICTED,
    architecture,
    busy_share,
)
from launcher.forecast.machine import Machine
from launcher.forecast.on_gpu import achieved_flops_per_s, products_s, ring_slowdown
from launcher.forecast.order import ties
from launcher.forecast.strategies import forecast_of
from launcher.forecast.timing import StepTime, hook_operators, step_seconds
from launcher.forecast.trace.work import NO_WORK
from launcher.forecast.traffic import Hooks, Wire
from launcher.forecast.work import passes_work
from launcher.forecast.workloads import linear_products
from launcher.measure.hardware import gpu_named

QUIET: dict[str, Any] = {"steps": 1, "activation_checkpointing": "none"}


def run_of(gpus: int = 1, device_type: str = "cuda", **changes: Any) -> Resolved:
    config = RunConfig().replace(**{**QUIET, **changes})
    return resolve(config, world_size=gpus, device_type=device_type)


def time_on(gpu: str, gpus: int = 1, *, per_node: int = 8, **changes: Any) -> StepTime:
    machine = Machine.of_gpu(gpu, ranks_per_node=min(gpus, per_node))
    run = run_of(gpus, **changes)
    return step_seconds(run, gpus_per_node=per_node, machine=machine)


def test_tiles_go_in_waves() -> None:
    # 108 tiles of 256 x 128 on as many multiprocessors; one column more is a wave of its own.
    assert busy_share(256 * 12, 128 * 9, 108) == 1.0
    assert busy_share(256 * 12, 128 * 9 + 1, 108) < 0.8
    # Many waves hide the last one.
    assert busy_share(256 * 120, 128 * 90 + 1, 108) > 0.98
    # A small product takes smaller tiles, which keep more multiprocessors busy at a lower rate.
    assert busy_share(512, 512, 132) == pytest.approx(0.55 * 64 / 132)


def test_long_sums_of_few_tiles_are_shared() -> None:
    # A small weight's gradient over 32,768 tokens, by 8 tiles of 128 x 128, each in 13 parts.
    assert busy_share(256, 512, 108, inner=32768) == pytest.approx(0.9 * 8 * 13 / 108)
    # Parts are long, and sums stay whole where half of the multiprocessors are busy.
    assert busy_share(256, 512, 108, inner=2048) == busy_share(256, 512, 108)
    assert busy_share(768, 768, 108, inner=32768) == busy_share(768, 768, 108)


@pytest.mark.parametrize("gpu", ["A100-80GB", "H100"])
def test_wide_layers_reach_more_of_the_peak(gpu: str) -> None:
    machine, rates = Machine.of_gpu(gpu), []
    for name in ("gpt2", "gpt2-medium", "6.7b"):
        work, _ = passes_work(
            run_of(model=name, precision="bf16", strategy="single", micro_batch=8)
        )
        rates.append(work.matmul_flops / products_s(work, machine, "bf16"))
    assert rates == sorted(rates)
    assert rates[-1] < machine.matmul_flops_per_s["bf16"]


def test_a_profile_of_a_gpu_gives_the_rate_that_a_plan_starts_from() -> None:
    gpu, machine = gpu_named("H100"), Machine.of_gpu("H100")
    work = dataclasses.replace(
        NO_WORK, products=Counter(linear_products([(768, 2304), (3072, 768)], 8192, 2))
    )
    seconds = products_s(work, machine, "bf16")
    found = achieved_flops_per_s([*work.products], seconds, gpu, machine.copy_bytes_per_s)
    assert found == pytest.approx(machine.matmul_flops_per_s["bf16"])


def test_each_gpu_has_an_efficiency() -> None:
    assert architecture(gpu_named("B200")) == "blackwell"
    assert architecture(gpu_named("RTX-5090")) == "blackwell"
    a40 = Machine.of_gpu("A40")
    assert a40.matmul_flops_per_s["fp32"] == pytest.approx(0.45 * 37.4e12)
    v100 = Machine.of_gpu("V100-32GB").matmul_flops_per_s
    assert v100["fp16"] == EFFICIENCIES["volta"].matmul * 125e12
    assert "bf16" not in v100


def test_fp16_has_a_rate_where_bf16_has_none() -> None:
    for gpu in ("V100-16GB", "T4"):
        half = time_on(gpu, model="gpt2", precision="fp16", strategy="single", micro_batch=2)
        full = time_on(gpu, model="gpt2", precision="fp32", strategy="single", micro_batch=2)
        assert half.total_s < full.total_s


def test_scores_that_no_kernel_fuses_cross_the_memory() -> None:
    flags: dict[str, Any] = {"model": "gpt2", "precision": "bf16", "strategy": "single"}
    flags |= {"micro_batch": 4, "seq_len": 1024}
    eager, fused = (passes_work(run_of(attention=kind, **flags))[0] for kind in ("eager", "sdpa"))
    moved = [work.elementwise_bytes + work.copied_bytes for work in (eager, fused)]
    # 12 layers x 12 heads of 1024 x 1024 scores for 4 sequences: 6 passes of 2 bytes at least, the
    # softmax in fp32 and its casts.
    assert moved[0] - moved[1] > 4 * 12 * 12 * 1024**2 * (6 * 2 + 8)
    times = [time_on("A100", attention=kind, **flags).total_s for kind in ("eager", "sdpa")]
    assert times[0] > 1.5 * times[1]


def test_a_backend_of_attention_that_is_asked_for_has_its_own_rate() -> None:
    flags: dict[str, Any] = {"model": "gpt2", "precision": "bf16", "strategy": "single"}
    flags |= {"micro_batch": 1, "context": 16384, "seq_len": 16384}
    seconds = {
        backend: time_on("H100", attention=f"sdpa{backend}", **flags).total_s
        for backend in ("-cudnn", "-flash", "", "-efficient", "-math")
    }
    assert list(seconds) == sorted(seconds, key=lambda name: seconds[name])
    assert seconds["-flash"] == seconds[""]


def test_a_ring_scores_keys_of_others_more_slowly() -> None:
    flags: dict[str, Any] = {"model": "llama-3.1-8b", "precision": "bf16", "strategy": "fsdp"}
    flags |= {"seq_len": 65536, "micro_batch": 1, "activation_checkpointing": "full"}
    seconds = [
        time_on("H100", 8, context_parallel=8, context_parallel_method=method, **flags).total_s
        for method in ("ulysses", "ring")
    ]
    assert seconds[1] > 1.2 * seconds[0]
    assert (
        ring_slowdown(run_of(8, context_parallel=8, context_parallel_method="ulysses", **flags))
        == 1.0
    )


def test_long_sequences_on_b200_take_as_long_as_published() -> None:
    # SimuMax, docs/b200: 11.3 s for Llama-3-70B of 12 layers, 4 x 131,072 tokens on 8 GPUs.
    shape: dict[str, Any] = {"model": "llama-3.1-70b", "layers": 12, "zero": 1, "precision": "bf16"}
    shape |= {"seq_len": 131072, "micro_batch": 1, "global_batch": 4, "context_parallel": 8}
    time = time_on("B200", 8, context_parallel_method="ulysses", loss_chunk=0, **shape)
    assert time.total_s == pytest.approx(11.3, rel=0.15)
    alone = {**shape, "context_parallel": 1, "global_batch": 8}
    asked, chosen = (
        time_on("B200", 8, attention=kind, **alone).total_s for kind in ("sdpa-cudnn", "auto")
    )
    assert asked == chosen


def test_a_small_run_takes_as_long_as_its_host() -> None:
    small: dict[str, Any] = {"model": "nano", "precision": "bf16", "micro_batch": 1}
    run = run_of(**small, strategy="single")
    machine = Machine.of_gpu("H100", ranks_per_node=1)
    host_s = passes_work(run)[0].operators * machine.operator_s
    eager = time_on("H100", **small, strategy="single", cuda_graphs=False)
    assert eager.forward_s == host_s
    assert time_on("H100", **small, strategy="single").forward_s < host_s / 2


def test_compiled_blocks_are_faster_and_fp8_only_then() -> None:
    flags: dict[str, Any] = {"model": "llama-3.1-8b", "strategy": "fsdp", "micro_batch": 1}
    flags |= {"seq_len": 8192}
    seconds = {
        (precision, compiled): time_on(
            "H100", 8, precision=precision, compile=compiled, **flags
        ).total_s
        for precision in ("bf16", "fp8")
        for compiled in (False, True)
    }
    assert seconds["bf16", True] < seconds["bf16", False]
    assert seconds["fp8", True] < 0.97 * seconds["bf16", True]  # casts are a kernel each without it
    assert seconds["fp8", False] > 0.95 * seconds["bf16", False]


def test_hooks_of_each_strategy() -> None:
    def hooks(device_type: str = "cuda", **changes: Any) -> Hooks:
        run = run_of(8, device_type, model="gpt2", precision="bf16", micro_batch=1, **changes)
        return forecast_of(run.config).traffic(Wire(run)).hooks

    tensors = 12 * 12 + 4  # 6 modules of a weight and a bias, two embeddings and the last norm
    assert hooks(strategy="ddp") == Hooks()
    assert hooks("cpu", strategy="fsdp") == Hooks(groups=13)
    assert hooks(strategy="fsdp") == Hooks(groups=4)  # four blocks of 13.5 MiB each
    run = dataclasses.replace(run_of(8, model="gpt2", strategy="fsdp"), of_another_trainer=True)
    assert forecast_of(run.config).traffic(Wire(run)).hooks == Hooks(groups=13)
    assert hooks(zero=1) == Hooks(gradients=tensors)
    assert hooks(zero=2) == Hooks(gradients=2 * tensors)
    # Two embeddings, the last norm and the head, whose weight may be the embedding's.
    assert hooks(zero=3) == Hooks(modules=6 * 12 + 4, gradients=tensors)
    untied: dict[str, Any] = {"tied": False, "position": "rope", "qk_norm": True}
    assert hooks(zero=3, **untied).modules == 8 * 12 + 3
    assert hooks("cpu", strategy="fsdp", tied=False).groups == 12 + 2  # the root, and the head
    # Recomputed blocks fetch once more.
    plain, full = (
        hook_operators(
            run_of(8, model="gpt2", zero=3, micro_batch=1, activation_checkpointing=mode),
            hooks(zero=3),
        )
        for mode in ("none", "full")
    )
    assert full[0] == plain[0]
    assert full[1] - plain[1] == plain[0]


def test_zero_on_16_v100_is_ranked_as_it_was_measured() -> None:
    # DeepSpeedExamples, training/autotuning/hf/gpt2-xl: 40.2, 33.0 and 12.9 samples/s.
    flags: dict[str, Any] = {"model": "gpt2-xl", "precision": "fp16", "attention": "eager"}
    flags |= {"dropout": 0.1, "micro_batch": 1, "loss_chunk": 0}
    rates = [
        16 / time_on("V100-32GB", 16, per_node=16, zero=stage, **flags).total_s
        for stage in (1, 2, 3)
    ]
    assert rates == sorted(rates, reverse=True)
    assert rates == [pytest.approx(rate, rel=0.25) for rate in (40.2, 33.0, 12.9)]


def test_zero_3_of_few_tokens_waits_for_its_host() -> None:
    # DeepSpeedExamples, training/bf16_master_weight: 0.6016 s per step, 4 x H100.
    shape: dict[str, Any] = {"layers": 32, "d_model": 4096, "heads": 32, "vocab_size": 50257}
    shape |= {"context": 512, "seq_len": 512, "tied": False, "attention": "eager"}
    shape |= {"zero": 3, "precision": "bf16", "micro_batch": 1, "activation_checkpointing": "full"}
    time = time_on("H100", 4, **shape)
    assert time.total_s == pytest.approx(0.60, rel=0.25)


def test_a_range_is_said_and_what_overlaps_ties() -> None:
    time = StepTime(
        forward_s=1.0,
        backward_s=0,
        step_s=0,
        communication_s=0,
        exposed_communication_s=0,
        tokens=1,
    )
    assert (time.least_s, time.most_s) == (LEAST_OF_PREDICTED, MOST_OF_PREDICTED)
    assert time.most_tokens_per_s == pytest.approx(1 / LEAST_OF_PREDICTED)
    touching = MOST_OF_PREDICTED / LEAST_OF_PREDICTED
    assert ties(1.0, 0.99 * touching)
    assert ties(0.99 * touching, 1.0)
    assert not ties(1.0, 1.01 * touching)
