"""What the planner says of a model of which adapters alone are trained."""

from typing import Any

import pytest

from launcher.config.resolve import Resolved, resolve
from launcher.config.schema import RunConfig
from launcher.forecast.followed import run_segments
from launcher.forecast.predict import _shortened, predict
from launcher.forecast.strategies import forecast_of
from launcher.forecast.timeline import Timeline
from launcher.parallel.mesh import Mesh
from launcher.strategies import VARIANTS, strategy_of
from launcher.strategies.parameters import Parameter, parameters_of
from launcher.strategies.rank import Rank
from launcher.strategies.zero.config import build_config

RANKS = 2
SHAPE: dict[str, Any] = {"layers": 3, "d_model": 64, "heads": 4, "context": 32, "vocab_size": 260}


def run_of(label: str, rank: int, **changes: Any) -> Resolved:
    replicates = VARIANTS[label].replicates
    config = RunConfig().replace(
        **SHAPE,
        **VARIANTS[label].fields,
        **({"replicate": RANKS} if replicates else {}),
        **{"lora_rank": rank, "lora_targets": "all", "micro_batch": 4} | changes,
    )
    return resolve(config, world_size=world_size_of(label), device_type="cpu")


def world_size_of(label: str) -> int:
    """So many that shards are halves, or one process."""
    if VARIANTS[label].replicates:
        return RANKS * RANKS
    return RANKS if strategy_of_label(label).needs_group else 1


def strategy_of_label(label: str) -> Any:
    return strategy_of(RunConfig().replace(**VARIANTS[label].fields))


def gradient_bytes(label: str, run: Resolved) -> int:
    """After the first backward, before the step."""
    world_size = world_size_of(label)
    sharding = run.config.sharding
    rank = Rank(
        resolved=run,
        world_size=sharding.shard_ranks(world_size),
        rank=0,
        device_type="cpu",
    )
    timeline = Timeline("cpu")
    buffers = forecast_of(run.config).buffers(rank, timeline)
    buffers.build()
    trace = _shortened(rank, Mesh.at(0, world_size, sharding), gpu=None)
    buffers.begin_forward(last=True)
    run_segments(trace.forward, timeline, buffers, tuning_bytes=0)
    buffers.end_forward()
    run_segments(trace.backward, timeline, buffers, tuning_bytes=0)
    buffers.end_backward()
    return timeline.held().device.grads_bytes


@pytest.mark.parametrize("label", VARIANTS)
def test_gradients_and_states_are_in_proportion_to_the_rank(label: str) -> None:
    runs = {rank: run_of(label, rank) for rank in (4, 8, 16)}
    gradients = {rank: gradient_bytes(label, run) for rank, run in runs.items()}
    assert gradients[16] == 2 * gradients[8] == 4 * gradients[4]
    parts = RANKS if VARIANTS[label].level else 1
    assert gradients[4] == 4 * runs[4].model.trained_parameter_count // parts

    held = {rank: predict(run).held.device for rank, run in runs.items()}
    # Two moments of each element, and a counter for each tensor.
    further = 8 * (runs[8].model.trained_parameter_count - runs[4].model.trained_parameter_count)
    assert held[8].optimizer_bytes - held[4].optimizer_bytes == further // parts
    assert held[16].optimizer_bytes - held[8].optimizer_bytes == 2 * further // parts


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("label", VARIANTS)
def test_frozen_bytes_are_those_of_the_weights(label: str, precision: str) -> None:
    run = run_of(label, 8, precision=precision)
    frozen = [p for p in parameters_of(run.model) if not p.trained]
    held = predict(run).held.device
    element = 4 if precision == "fp32" else 2
    expected = element * sum(p.elements for p in frozen)
    if VARIANTS[label].shards_parameters:
        expected //= RANKS
    if label == "zero3":  # small ones are whole besides
        expected += element * sum(p.elements for p in frozen if len(p.shape) == 1)
    assert held.frozen_bytes == expected


@pytest.mark.parametrize("targets", ["qkv", "all"])
def test_deepspeeds_buckets_hold_what_is_trained(targets: str) -> None:
    def elements(parameters: list[Parameter]) -> int:
        return sum(p.elements for p in parameters if p.name.startswith("blocks.0."))

    run = run_of("zero3", 4, lora_targets=targets)
    section = build_config(run, world_size=RANKS)["zero_optimization"]
    parameters = list(parameters_of(run.model))
    assert section["reduce_bucket_size"] == elements([p for p in parameters if p.trained])
    assert section["stage3_prefetch_bucket_size"] == elements(parameters)
