"""Plans of models beyond the sizes at which libraries cut their buffers."""

import pytest

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import resolve
from launcher.forecast.predict import Prediction, predict
from launcher.measure.hardware import find_gpu
from launcher.strategies.zero.forecast.stages import allreduce_buckets

SHORT = "--precision=bf16 --seq-len=128 --micro-batch=1 --activation-checkpointing=full"


def planned(flags: str, world_size: int) -> Prediction:
    config = parse_run_config([*f"{flags} {SHORT}".split(), f"--global-batch={world_size}"])
    resolved = resolve(config, world_size=world_size, device_type="cuda")
    gpu = find_gpu("NVIDIA H100 80GB HBM3")
    return predict(resolved, rank=0, gpu=gpu)


def test_a_bucket_ends_behind_what_makes_it_too_large() -> None:
    found = allreduce_buckets([499_999_999, 2, 1, 700_000_000, 3])
    assert list(found) == [[499_999_999, 2], [1, 700_000_000], [3]]


def test_stage_1_sends_the_gradients_of_all_weights_at_once() -> None:
    # 18,920.9 MiB by torch's own allocator on two ranks of the null GPU
    prediction = planned("--model=llama-3.2-1b --zero=1", 2)
    assert prediction.peaks["steady", "backward"] / 2**20 == pytest.approx(18_920.9, abs=0.1)


def test_the_norm_of_a_large_gradient_is_taken_in_pieces() -> None:
    offloaded = "--zero=3 --offload-optimizer=cpu --offload-param=cpu"
    shape = "--layers=2 --heads=16 --position=rope --norm=rms --activation=swiglu --bias=none"
    peaks = {
        vocabulary: planned(
            f"{shape} {offloaded} --d-model=1024 --vocab-size={vocabulary}", 1
        ).peaks["steady", "backward"]
        for vocabulary in (300_000, 350_000)
    }
    assert peaks[300_000] / 2**20 == pytest.approx(5_519.0, abs=0.1)  # as on the null GPU
    # Beyond 250M elements the copy in fp64 grows no more, which had 8 bytes of each.
    grown = (350_000 - 300_000) * 1024
    assert (peaks[350_000] - peaks[300_000]) / grown == pytest.approx(12, abs=0.01)


def test_fsdp_keeps_the_last_gradient_of_a_group_until_its_shard_is_there() -> None:
    # 18,386.6 MiB by torch's own allocator on the first of eight ranks of the null GPU: the
    # embedding's gradient, what is sent of it, and this rank's shard
    prediction = planned("--model=llama-3.1-8b --strategy=fsdp", 8)
    assert prediction.peaks["steady", "backward"] / 2**20 == pytest.approx(18_386.6, abs=0.1)
