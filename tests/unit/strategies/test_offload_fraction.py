"""--offload-fraction: what is moved, what is predicted of it, and where it is refused."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from test_plan_timing import LINKS_ONLY

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import Resolved, resolve
from launcher.forecast.predict import predict
from launcher.forecast.timing import optimizer_s
from launcher.strategies.offload_sizes import offload_sizes
from launcher.strategies.parameters import parameters_of
from launcher.strategies.zero.config import build_config
from launcher.strategies.zero.fraction import SUB_GROUPS, kept_on_device, sub_group_elements
from launcher.util.errors import UserError

RANKS = 4
HALF = "--zero 3 --offload-optimizer cpu --offload-fraction 0.5"


def resolved(flags: str, device_type: str = "cuda") -> Resolved:
    config = parse_run_config(f"--model gpt2 --micro-batch 1 {flags}".split())
    return resolve(config, world_size=RANKS, device_type=device_type)


@pytest.mark.parametrize(
    ("elements", "fraction", "kept"),
    [
        ([4, 4], 1.0, set()),
        ([4, 4], 0.5, {0}),
        ([4, 4], 0.51, set()),
        ([40, 4, 4, 2], 0.9, {1}),  # embeddings are too large, and so is all that comes after
        ([40, 4, 3, 2], 0.85, {1, 2}),
        ([40, 4, 4, 2], 0.01, {0, 1, 2}),
        ([7], 0.001, set()),  # something is always offloaded
    ],
)
def test_whole_sub_groups_stay_that_fit(
    elements: list[int], fraction: float, kept: set[int]
) -> None:
    assert kept_on_device(elements, fraction) == kept


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5, 0.75, 0.9])
def test_a_models_fraction_is_met_within_a_sub_group(fraction: float) -> None:
    model = resolved(HALF).model
    elements = [-(-p.elements // RANKS) for p in parameters_of(model)]
    kept = kept_on_device(elements, fraction)
    offloaded = sum(n for number, n in enumerate(elements) if number not in kept)
    smallest = min(n for number, n in enumerate(elements) if number not in kept)
    assert fraction * sum(elements) <= offloaded < fraction * sum(elements) + smallest + 1
    assert sub_group_elements(model, RANKS) == math.ceil(sum(elements) / SUB_GROUPS)


def held(flags: str) -> tuple[dict[str, int], dict[str, int]]:
    run = resolved(f"--precision bf16 {flags}")
    found = predict(run).held
    names = ("master", "optimizer", "grads")
    device, host = (
        {name: getattr(lines, f"{name}_bytes") for name in names}
        for lines in (found.device, found.host)
    )
    return device, host


def test_a_plan_has_a_fraction_in_each_place() -> None:
    count = sum(-(-p.elements // RANKS) for p in parameters_of(resolved(HALF).model))
    device, host = held(f"{HALF} --no-pin-memory")
    assert device["master"] + host["master"] == 4 * count
    # A sub-group is 1/64 and the rest of its last matrix, of which the largest is 1.9%.
    assert 0.5 - 1 / 64 - 0.019 < device["master"] / (4 * count) <= 0.5
    for place in (device, host):
        assert place["optimizer"] == pytest.approx(2 * place["master"], rel=1e-3)
    # Added up and read in one buffer on the device, in two on the host.
    assert (device["grads"], host["grads"]) == (device["master"], 2 * host["master"])
    in_bf16, _ = held(f"{HALF} --grad-accum-dtype bf16")
    assert in_bf16["grads"] == 1.5 * in_bf16["master"]
    everything = held("--zero 3 --offload-optimizer cpu")
    assert held("--zero 3 --offload-optimizer cpu --offload-fraction 1") == everything
    assert everything[0] == dict.fromkeys(everything[0], 0)


def test_half_of_the_host_memory_is_asked_for() -> None:
    sizes = []
    for flags in (HALF, "--zero 3 --offload-optimizer cpu"):
        run = resolved(flags)
        sizes.append(offload_sizes(run.config, run.model, RANKS).host_bytes)
    assert sizes[0] == sizes[1] // 2


def test_the_host_updates_and_sends_its_part_only() -> None:
    machine = dataclasses.replace(
        LINKS_ONLY,
        copy_bytes_per_s=1e9,
        cpu_adam_parameters_per_s=1e7,
        host_to_device_bytes_per_s=1e8,
    )

    def seconds(flags: str) -> float:
        run = resolved(flags)
        return optimizer_s(run, ranks_per_node=RANKS, machine=machine)

    offloaded, on_device = seconds("--zero 3 --offload-optimizer cpu"), seconds("--zero 3")
    assert offloaded > 2 * on_device
    for fraction in (0.25, 0.5):
        found = seconds(f"--zero 3 --offload-optimizer cpu --offload-fraction {fraction}")
        assert found == pytest.approx(fraction * offloaded + (1 - fraction) * on_device)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--zero 3 --offload-optimizer cpu --offload-fraction 0", "0.0 must be more than 0"),
        ("--zero 3 --offload-optimizer cpu --offload-fraction 1.5", "1.5 must be at most 1"),
        ("--zero 3 --offload-optimizer cpu --offload-fraction nan", "nan"),
        (
            "--zero 3 --offload-fraction 0.5",
            "needs --zero 3 --offload-optimizer cpu, not --zero 3 --offload-optimizer none",
        ),
        (
            "--zero 3 --offload-optimizer nvme --nvme-path /tmp --offload-fraction 0.5",
            "not --zero 3 --offload-optimizer nvme: give both",
        ),
        ("--zero 2 --offload-optimizer cpu --offload-fraction 0.5", "cpu, not --zero 2 --offload-"),
        ("--zero 1 --offload-optimizer cpu --offload-fraction 0.5", "cpu, not --zero 1 --offload-"),
        ("--zero 0 --offload-fraction 0.5", "not --zero 0 --offload-"),
        (
            "--strategy fsdp --offload-optimizer cpu --offload-fraction 0.5",
            "not --strategy fsdp --offload-",
        ),
        ("--strategy ddp --offload-fraction 0.25", "--offload-fraction 0.25 needs"),
    ],
)
def test_refused_in_a_sentence(flags: str, words: str) -> None:
    with pytest.raises(UserError) as refused:
        resolved(flags)
    assert "--offload-fraction" in str(refused.value)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_deepspeed_files_ratio_is_the_fraction(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"

    def section(ratio: str) -> dict[str, Any]:
        path.write_text(
            '{"zero_optimization": {"stage": 3, "sub_group_size": 300000, "offload_optimizer":'
            f' {{"device": "cpu", "ratio": {ratio}}}}}}}'
        )
        run = resolved(f"--deepspeed {path}")
        assert run.config.sharding.offload_fraction == float(ratio)
        found: dict[str, Any] = build_config(run, world_size=RANKS)["zero_optimization"]
        return found

    for ratio in ("0.25", "1"):
        found = section(ratio)
        # Ours places sub-groups; DeepSpeed's own wants its own optimizer.
        assert "ratio" not in found["offload_optimizer"]
        assert found["sub_group_size"] == 300000
    for ratio in ("0", "1.5", "true"):
        with pytest.raises(UserError, match="more than 0 and at most 1"):
            section(ratio)
