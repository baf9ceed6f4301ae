"""Traces of transformers' decoders: few blocks stand for many, one micro-batch for all."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_architectures import ARCHITECTURES, MORE, WIDE

from launcher.config.resolve import resolve
from launcher.config.schema import RunConfig
from launcher.forecast.buffers import Buffers
from launcher.forecast.timeline import Timeline
from launcher.forecast.trace import blocks, micro_batches
from launcher.forecast.trace.events import (
    Allocated,
    Compute,
    Freed,
    MicroBatch,
    Place,
    TraceRequest,
)
from launcher.forecast.trace.micro_batches import trace_of
from launcher.forecast.trace.record import record_trace
from launcher.forecast.trace.workspaces import workspace_bytes
from launcher.forecast.traffic import Wire
from launcher.model.build import initial_value
from launcher.model.foreign import decoder
from launcher.model.foreign.config import ForeignConfig
from launcher.model.foreign.reading import foreign_config
from launcher.model.linears import PACKED
from launcher.parallel.mesh import WHOLE_MODEL, ModelParallelRank, TensorRank
from launcher.strategies.rank import Rank

ON_GPU = Compute(device_type="cuda", params_dtype=torch.bfloat16)
IN_FP32 = Compute(device_type="cuda")
OF_TWO = ModelParallelRank(tensor=TensorRank(size=2, index=1))
DEEP: Mapping[str, tuple[int, int]] = {"gemma2": (9, 7), "gemma3_text": (14, 13), "olmoe": (6, 3)}
"""Layers of a model, and of those that are recorded for it."""


def peaks(trace: MicroBatch) -> list[tuple[Place, int, int]]:
    """Most bytes that are live in each segment, and those at its end."""
    live: dict[Any, int] = {}
    found = []
    for place, events in (*trace.forward, *trace.backward):
        most = sum(live.values())
        for event in events:
            if isinstance(event, Allocated):
                live[event.key] = event.size_bytes
                most = max(most, sum(live.values()))
            elif isinstance(event, Freed):
                live.pop(event.key, None)
        found.append((place, most, sum(live.values())))
    return found


@pytest.mark.parametrize(
    ("name", "rank"), [*((name, WHOLE_MODEL) for name in DEEP), ("gemma2", OF_TWO)]
)
def test_few_blocks_stand_for_many_where_they_compute_the_same(
    name: str, rank: ModelParallelRank
) -> None:
    layers, recorded = DEEP[name]
    model = foreign_config({**ARCHITECTURES[name], "num_hidden_layers": layers})
    few, traced, representatives = blocks.shallow(model)
    assert (few.layers, len(traced), len(representatives)) == (recorded, recorded, layers)
    sums = partial(workspace_bytes, compute=ON_GPU)
    whole = record_trace(TraceRequest(model, ON_GPU, 3, 64, rank), sums)
    every = [*range(layers)]
    expected = peaks(blocks._expanded(whole, every, every))
    found = blocks.trace_micro_batch(
        TraceRequest(model, ON_GPU, micro_batch=3, seq_len=64, rank=rank)
    )
    assert peaks(found) == expected


def test_blocks_that_differ_stand_for_themselves() -> None:
    routed = foreign_config({**ARCHITECTURES["mixtral"], "num_hidden_layers": 6})
    assert blocks.shallow(routed)[0] is routed  # a loss of all routers together


@pytest.mark.parametrize("compute", [ON_GPU, IN_FP32], ids=["bf16", "fp32"])
def test_products_of_experts_are_those_of_the_tokens_sent_to_them(compute: Compute) -> None:
    def flops(chosen: int) -> list[float]:
        model = foreign_config({**ARCHITECTURES["olmoe"], "num_experts_per_tok": chosen})
        work = blocks.pass_work(TraceRequest(model, compute, micro_batch=2, seq_len=40))
        return [each.matmul_flops for each in work]

    forward, backward = (two - one for one, two in zip(flops(1), flops(2), strict=True))
    expert = 2 * 3 * 32 * 48  # layers x matrices x width x width of an expert
    assert (forward, backward) == (2 * 80 * expert, 4 * 80 * expert)


def test_only_experts_are_computed_again_where_products_are_kept() -> None:
    def backward_flops(name: str, mode: str) -> float:
        model = foreign_config(ARCHITECTURES[name], activation_checkpointing=mode)
        _, backward = blocks.pass_work(TraceRequest(model, ON_GPU, micro_batch=2, seq_len=40))
        return backward.matmul_flops

    for name, experts in (("phi3", 0), ("olmoe", 2 * 2 * 80 * 2 * 3 * 32 * 48)):
        plain, selective, full = (backward_flops(name, m) for m in ("none", "selective", "full"))
        assert selective - plain == experts
        assert full > selective


@pytest.mark.parametrize("name", ["gemma2", "olmo", "mamba2"])
def test_block_inputs_are_on_the_host_where_they_are_offloaded(name: str) -> None:
    fields = {**ARCHITECTURES, **MORE}[name]
    model = foreign_config(fields, activation_checkpointing="offload")
    trace = blocks.on_host(
        blocks.trace_micro_batch(TraceRequest(model, ON_GPU, micro_batch=2, seq_len=64))
    )
    events = [event for _, events in trace.forward for event in events]
    away = [e.size_bytes for e in events if isinstance(e, Allocated) and e.where == "host"]
    rows_bytes = 2 * 64 * 32 * 2
    later = 2 * rows_bytes if name == "mamba2" else rows_bytes  # whose residuals are in fp32
    assert away == [rows_bytes, later]


def test_an_empty_tensor_that_torch_saves_beside_them_stays_where_it_is() -> None:
    model = foreign_config(ARCHITECTURES["gemma2"], activation_checkpointing="offload")
    trace = blocks.trace_micro_batch(TraceRequest(model, ON_GPU, micro_batch=2, seq_len=64))
    for place, events in trace.forward:
        events.insert(0, Allocated(-100 - place.layer, 0, "activations"))
    for place, events in trace.backward:
        events.append(Freed(-100 - place.layer))
    away = [
        event.size_bytes
        for _, events in blocks.on_host(trace).forward
        for event in events
        if isinstance(event, Allocated) and event.where == "host"
    ]
    assert away == 2 * [2 * 64 * 32 * 2]


def test_products_in_fp8_are_those_of_linear_layers_alone() -> None:
    """Products of q, k, v and output are; those of the router, the experts and the head are not."""
    model = foreign_config(ARCHITECTURES["mixtral"])
    compute = replace(ON_GPU, fp8=True)
    work = blocks.pass_work(TraceRequest(model, compute, micro_batch=2, seq_len=40))
    rounded = [sum(n for p, n in each.products.items() if p.fp8) for each in work]
    assert rounded == [2 * 4, 2 * 2 * 4]
    assert all(sum(each.products.values()) > n for each, n in zip(work, rounded, strict=True))


def test_one_recording_serves_all_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = []

    def record(*args: Any, **kwargs: Any) -> Any:
        recorded.append(args[0])
        return record_trace(*args, **kwargs)

    monkeypatch.setattr(micro_batches, "record_trace", record)
    model = foreign_config(ARCHITECTURES["phi3"])
    for micro_batch in (2, 3, 8):
        trace_of(TraceRequest(model, ON_GPU, micro_batch, 40))
    assert len(recorded) == 1


def test_shared_key_heads_in_fp32_keep_all_scores() -> None:
    """No fused kernel of CUDA shares key heads in fp32, and transformers asks torch to."""
    fields = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    kept = {}
    for groups in (2, 4):
        document = {**fields, **heads, "num_key_value_heads": groups}
        trace = blocks.trace_micro_batch(
            TraceRequest(foreign_config(document), IN_FP32, micro_batch=3, seq_len=256)
        )
        kept[groups] = max(most for _, most, _ in peaks(trace))
    scores = 2 * 3 * 4 * 256 * 256 * 4  # layers x sequences x heads x tokens x tokens, in fp32
    assert kept[2] > kept[4] + scores


@pytest.mark.parametrize("name", ["llama", "mamba2", "opt", "olmo", "qwen3_next", "deepseek_v2"])
def test_every_parameter_travels_once(name: str, tmp_path: Path) -> None:
    """Whatever the context, and where blocks differ: before, positions that no parameter stands for
    travelled, too, and as many parameters of each block as the largest has."""
    fields = {**{**ARCHITECTURES, **MORE}[name], "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    changes = {"model": str(tmp_path), "decoder": "transformers", "seq_len": 16}
    run = resolve(RunConfig().replace(**changes), world_size=2, device_type="cpu")
    wire = Wire(run)
    rest = run.model.parameter_count - (wire.embeddings + wire.blocks + wire.head)
    assert 0 <= rest <= 2 * run.model.d_model  # of the last norm


def test_initial_values_of_a_block_wait_until_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WIDE["olmo2-64"]))
    changes: dict[str, Any] = {"model": str(tmp_path), "decoder": "transformers", "seq_len": 16}
    changes |= {"lora_rank": 2, "lora_targets": "all", "quantize_base": "nf4", "random_base": True}
    run = resolve(RunConfig().replace(**changes), world_size=1, device_type="cpu")
    assert isinstance(run.model, ForeignConfig)
    document, timeline = run.model.document, Timeline("cpu")
    buffers = Buffers(Rank(resolved=run, world_size=1, rank=0, device_type="cpu"), timeline)
    waiting = set()
    for p in buffers.parameters:
        value = initial_value(p.name, p.shape, run.model, seed=0, device="cpu")
        of_run = (v for key, v in decoder._drawn.items() if key[0] == document)
        drawn = [tensor for values in of_run for tensor in values.values()]
        key = buffers.draw(p)
        assert timeline.size_bytes(key) == value.nbytes
        assert timeline.current_bytes == value.nbytes + sum(t.nbytes for t in drawn)
        timeline.free(key)
        waiting.add(len(drawn) > 0)
    assert waiting == {False, True}
    assert any(p.name.endswith(PACKED) for p in buffers.parameters)
