"""Predictions against a real run in this process, and what must hold of any of them."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from launcher.config.resolve import Resolved, resolve
from launcher.config.schema import RunConfig
from launcher.forecast.fit import reserved
from launcher.forecast.predict import Prediction, by_category, predict
from launcher.measure.hardware import gpu_named
from launcher.measure.memory import TracedMemory
from launcher.parallel.world import World
from launcher.strategies.engine import train_step
from launcher.train import build_engine
from launcher.util.sizes import MIB

SMALL = {"layers": 3, "d_model": 64, "heads": 4, "context": 32, "vocab_size": 260}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp-grad-op": {"strategy": "fsdp", "reshard_after_forward": False},
    "fsdp-hybrid": {"strategy": "fsdp", "replicate": 2},
    "fsdp-hybrid-grad-op": {"strategy": "fsdp", "replicate": 2, "reshard_after_forward": False},
    "zero0": {"zero": 0},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
}


def resolved_of(world_size: int, accumulation: int = 1, **changes: Any) -> Resolved:
    values: dict[str, Any] = {"model": "nano", "micro_batch": 4, **SMALL, **changes}
    values["global_batch"] = values["micro_batch"] * world_size * accumulation
    device_type = values.pop("device_type", "cpu")
    config = RunConfig().replace(**values)
    return resolve(config, world_size=world_size, device_type=device_type)


def predicted(world_size: int, device_type: str = "cpu", **changes: Any) -> Prediction:
    resolved = resolved_of(world_size, device_type=device_type, **changes)
    return predict(resolved)


def measured(resolved: Resolved) -> tuple[dict[tuple[str, str], int], int]:
    """Peaks of two real steps in this process, and what is held after them."""
    world = World(rank=0, local_rank=0, size=1, local_size=1, device=torch.device("cpu"))
    memory = TracedMemory(world.device)
    shape = (resolved.config.data.micro_batch, resolved.seq_len)
    with memory.trace:
        engine = build_engine(resolved, world)
        memory.watch(engine)
        for period in ("first_step", "steady"):
            memory.period(period)
            tensors = 3 if resolved.config.data.document_attention else 2
            batch = [
                tuple(torch.zeros(shape, dtype=torch.int64) for _ in range(tensors))
                for _ in range(resolved.accumulation)
            ]
            train_step(engine, batch, 1e-3, phase=memory.phase)
        return memory.peaks, engine.count_states().ledger(world.device).device.states_bytes


@pytest.mark.parametrize(
    ("precision", "checkpointing", "accumulation", "more"),
    [
        ("fp32", "none", 1, {}),
        ("fp32", "selective", 3, {}),
        ("bf16", "full", 2, {}),
        ("bf16", "none", 1, {}),
        ("fp32", "none", 2, {"document_attention": True}),
        ("bf16", "full", 1, {"document_attention": True, "attention": "eager"}),
        ("fp32", "none", 2, {"mlp_tile": 24}),
        ("bf16", "selective", 1, {"mlp_tile": 24}),
        ("bf16", "full", 1, {"mlp_tile": 24, "dropout": 0.1}),
    ],
)
def test_one_process(
    precision: str, checkpointing: str, accumulation: int, more: dict[str, Any]
) -> None:
    resolved = resolved_of(
        1,
        accumulation,
        strategy="single",
        precision=precision,
        activation_checkpointing=checkpointing,
        **more,
    )
    peaks, held_bytes = measured(resolved)
    prediction = predict(resolved)
    assert prediction.held.device.states_bytes == held_bytes
    for key, size in peaks.items():
        assert prediction.peaks[key] == pytest.approx(size, rel=0.002), key


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lines_add_up_and_events_replay_to_the_peak(strategy: str) -> None:
    prediction = predicted(4, accumulation=2, **STRATEGIES[strategy])
    for ledger in (prediction.first_step, prediction.peak):
        lines = ledger.device
        parts = lines.states_bytes + (lines.activations_bytes or 0) + (lines.temporary_bytes or 0)
        assert parts == lines.used_bytes
    live: dict[int, int] = {}
    level = highest = 0
    for storage, size_bytes in prediction.events:
        level += size_bytes - live.pop(storage, 0)
        if size_bytes:
            live[storage] = size_bytes
        highest = max(highest, level)
    assert highest == prediction.peak_bytes
    assert prediction.peak.device.used_bytes == max(
        size for (period, _), size in prediction.peaks.items() if period == "steady"
    )


def test_the_peaks_place_is_named() -> None:
    prediction = predicted(1, strategy="single", layers=6, micro_batch=16, loss_chunk=0)
    assert prediction.peak.phase == "backward"


def test_optimizer_states_are_born_in_the_first_step() -> None:
    prediction = predicted(1, strategy="single", micro_batch=16)
    assert prediction.first_step.device.optimizer_bytes == 0
    assert prediction.peak.device.optimizer_bytes >= 8 * resolved_of(1).model.parameter_count


def test_fsdp_of_one_rank_fetches_and_casts_one_parameter_at_a_time() -> None:
    """There is nobody to gather from: on more ranks a group is cast as one, to be sent."""
    flags = {"strategy": "fsdp", "offload_param": "cpu", "precision": "bf16"}
    alone, among = (predicted(ranks, device_type="cuda", **flags) for ranks in (1, 2))
    assert "gather" in among.streams.values()
    assert "gather" not in alone.streams.values()
    sizes = [size for storage, size in among.events if among.streams.get(storage) == "gather"]
    embedding = 4 * 130 * 64  # half of it, in fp32, beside its cast, which is freed after it
    at = sizes.index(embedding)
    assert sizes[at + 1 : at + 3] == [embedding // 2, 0]
    largest = 4 * 260 * 64  # in fp32
    forward = [size for _, size in alone.events if size == largest // 2]
    # Each time that it is whole: its cast copy, and itself.
    assert len(forward) >= 4
    assert largest in [size for _, size in alone.events]


@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "zero2", "zero3"])
def test_more_ranks_hold_less_each(strategy: str) -> None:
    held = [predicted(n, **STRATEGIES[strategy]).held.device.states_bytes for n in (2, 8, 32)]
    assert held[0] > held[1] > held[2]


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": "fsdp", "offload_param": "cpu"},
        {"zero": 2, "offload_optimizer": "cpu"},
        {"zero": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
    ],
)
def test_offload_moves_states_to_the_host(changes: dict[str, Any]) -> None:
    prediction = predicted(4, device_type="cuda", **changes)
    kept = {name: value for name, value in changes.items() if not name.startswith("offload")}
    without = predicted(4, device_type="cuda", **kept)
    assert without.host_bytes == 0
    assert prediction.held.host.optimizer_bytes >= 8 * resolved_of(4).model.parameter_count // 4
    assert prediction.held.device.optimizer_bytes == 0
    assert prediction.host_bytes >= prediction.held.host.states_bytes
    assert prediction.peak_bytes < without.peak_bytes


def test_offloaded_block_inputs_are_on_the_host_but_for_two() -> None:
    layers = 12
    shape: dict[str, Any] = {"strategy": "single", "layers": layers, "vocab_size": 64}
    shape |= {"micro_batch": 8192, "precision": "fp32"}
    full = predicted(1, "cuda", **shape, activation_checkpointing="full")
    offloaded = predicted(1, "cuda", **shape, activation_checkpointing="offload")
    model = resolved_of(1, **shape).model
    input_bytes = 4 * 8192 * model.context * model.d_model
    assert offloaded.host_bytes == layers * input_bytes  # powers of two already
    assert full.host_bytes == 0
    # In the last block's backward: its own input and the one before are back, of `layers`.
    period = ("steady", "backward")
    saved = full.peaks[period] - offloaded.peaks[period]
    assert saved == pytest.approx((layers - 2) * input_bytes, rel=0.01)  # gradients are small


def test_cublas_has_a_workspace_for_each_of_two_threads_from_the_first_step_on() -> None:
    resolved = resolved_of(1, device_type="cuda")
    without, given = (
        predict(resolved, gpu=gpu) for gpu in (None, replace(gpu_named("H100"), multiprocessors=0))
    )
    init = ("init", "build")
    assert given.peaks[init] == without.peaks[init]
    for key in without.peaks.keys() - {init}:
        assert given.peaks[key] == without.peaks[key] + 64 * MIB
    assert by_category(given.peak)["temporary"] == by_category(without.peak)["temporary"] + 64 * MIB


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, 0),
        ({"bias": "none"}, 0),
        ({"activation_checkpointing": "full", "bias": "none"}, 0),
        ({"activation_checkpointing": "full"}, MIB),
        ({"activation_checkpointing": "selective"}, 0),
        ({"mlp_tile": 8}, MIB),
    ],
)
def test_with_torch_2_11_biases_are_added_in_workspaces_of_their_own(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], more: int
) -> None:
    def peak(version: str) -> int:
        monkeypatch.setattr(torch, "__version__", version)
        resolved = resolved_of(1, device_type="cuda", **changes)
        gpu = gpu_named("H100")
        found = predict(resolved, gpu=gpu)
        return found.peaks["steady", "data"]

    own = 0 if changes.get("bias") == "none" else MIB
    assert peak("2.11.0+cu130") - peak("2.13.0+cpu") == own + more


def test_with_torch_2_15_a_workspace_is_held_by_a_product_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, found = gpu_named("H100"), []
    for version in ("2.14.1+cu130", "2.15.0+cu132"):
        monkeypatch.setattr(torch, "__version__", version)
        resolved = resolved_of(1, device_type="cuda")
        found.append(predict(resolved, gpu=gpu))
    kept, once = (one.peaks["steady", "backward"] for one in found)
    assert kept - once == gpu.cublas_workspace_bytes == 32 * MIB


@pytest.mark.parametrize(("optimizer", "workspaces"), [("adamw", 0), ("muon", 1), ("apollo", 1)])
def test_an_optimizer_in_the_backward_of_fsdp_has_the_stream_of_its_messages(
    optimizer: str, workspaces: int
) -> None:
    how: dict[str, Any] = {"optimizer": optimizer, "optimizer_in_backward": True, "clip": 0}
    run = resolved_of(2, device_type="cuda", strategy="fsdp", **how)
    gpu = gpu_named("h100")
    found = predict(run, gpu=gpu)
    left = dict[int, int]()
    for storage, size_bytes in found.events:
        if found.streams.get(storage) == "reduce":
            left[storage] = size_bytes  # 0 where it is freed
    expected = found.held.device.optimizer_bytes + workspaces * gpu.cublas_workspace_bytes
    assert sum(left.values()) == expected


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_workspace_of_an_optimizer_in_the_backward_begins_with_its_first_product(
    optimizer: str,
) -> None:
    how: dict[str, Any] = {"optimizer": optimizer, "optimizer_in_backward": True, "clip": 0}
    run = resolved_of(2, device_type="cuda", strategy="fsdp", **how)
    gpus = (gpu_named("h100"), None)
    on_gpu, nowhere = (predict(run, gpu=gpu).peaks["first_step", "forward"] for gpu in gpus)
    assert on_gpu - nowhere == 2 * 32 * MIB  # the forward's and the backward's


def test_stage_2_adds_to_its_fp32_part_while_the_bucket_is_flat() -> None:
    found = predicted(2, "cuda", zero=2, precision="bf16")
    live, sent, highest = dict[int, int](), list[int](), 0
    for storage, size_bytes in found.events:
        if found.streams.get(storage) == "reduce":
            live[storage] = size_bytes  # 0 where it is freed
            sent.append(size_bytes)
            highest = max(highest, sum(live.values()))
    *_, vectors, _, _, weight, flat, part = sorted({*sent})
    assert weight == 4 * 256 * SMALL["d_model"]  # of an MLP, in fp32
    assert highest == part + vectors + flat + weight


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_gradients_of_a_group_are_freed_as_python_clears_a_list(precision: str) -> None:
    """The last one first, which decides what a caching allocator finds for the next group."""
    found = predicted(4, "cuda", strategy="fsdp", precision=precision, layers=1)
    live, freed = dict[int, int](), list[int]()
    for storage, size_bytes in found.events:
        if size_bytes == 0:
            freed.append(live.pop(storage))
        else:
            live[storage] = size_bytes
    element = 2 if precision == "bf16" else 4
    mlp = [4 * 64 * 64 * element] * 2  # up, down
    attention = [64 * 64 * element, 3 * 64 * 64 * element]  # proj, qkv
    freed = [size for size in freed if size in {*mlp, *attention}]
    assert any(freed[i : i + 3] == [mlp[0], *attention] for i in range(len(freed)))


def test_stage_3_makes_each_parameter_whole_and_twice_and_keeps_slices_where_they_belong() -> None:
    embedding = 50_000 * SMALL["d_model"]

    def built(ranks: int, **changes: Any) -> int:
        how = {"zero": 3, "vocab_size": 50_000, "precision": "bf16", **changes}
        return predicted(ranks, "cuda", **how).peaks["init", "build"]

    assert (4 + 2) * embedding <= built(64) < 6.5 * embedding
    offloaded = {"offload_param": "cpu", "offload_optimizer": "cpu"}
    assert built(1, **offloaded) < 6.5 * embedding < built(1)


def test_a_softmax_of_fp16_converts_as_it_reads() -> None:
    how = {"attention": "eager", "context": 256, "strategy": "single"}
    half, brain = (
        predicted(1, "cuda", precision=precision, **how).peak_bytes
        for precision in ("fp16", "bf16")
    )
    scores = 4 * SMALL["heads"] * 256 * 256
    assert half == pytest.approx(brain - 2 * scores, abs=4096)


def test_a_gpus_blocks_are_multiples_of_512_bytes() -> None:
    prediction = predicted(1, device_type="cuda")
    assert {size % 512 for size in prediction.peaks.values()} == {0}
    assert sum(by_category(prediction.peak).values()) == prediction.peaks["steady", "backward"]


def test_thousands_of_ranks_and_billions_of_parameters() -> None:
    resolved = resolve(
        RunConfig().replace(model="13b", strategy="fsdp", precision="bf16", micro_batch=1),
        world_size=4096,
        device_type="cuda",
    )
    prediction = predict(resolved)
    # 16 bytes per parameter over the ranks, and rows that do not divide.
    held = prediction.held.device.states_bytes
    assert held == pytest.approx(12 * resolved.model.parameter_count / 4096, rel=0.5)
    assert "WORLD_SIZE" not in os.environ


@pytest.mark.parametrize("method", ["ulysses", "ring"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_half_of_a_long_sequence_takes_half_the_activations(
    method: str, checkpointing: str
) -> None:
    changes: dict[str, Any] = {"context": 2048, "seq_len": 2048, "layers": 8, "loss_chunk": 64}
    changes |= {"strategy": "ddp", "micro_batch": 1, "activation_checkpointing": checkpointing}
    whole = predicted(2, **changes)
    cut = predicted(2, **changes, context_parallel=2, context_parallel_method=method)
    assert live(cut) <= 0.55 * live(whole)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_half_of_the_matrices_takes_half_the_activations_and_states(checkpointing: str) -> None:
    changes: dict[str, Any] = {"context": 2048, "seq_len": 2048, "layers": 8, "loss_chunk": 64}
    changes |= {"strategy": "single", "micro_batch": 1, "activation_checkpointing": checkpointing}
    whole, cut = predicted(1, **changes), predicted(2, **changes, tensor_parallel=2)
    assert live(cut) <= 0.55 * live(whole)
    states = [each.held.device.states_bytes for each in (whole, cut)]
    assert states[1] == pytest.approx(states[0] / 2, rel=0.01)  # norms and some biases are whole


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tiles_keep_the_width_of_the_mlp_out_of_a_long_sequence(
    precision: str, checkpointing: str
) -> None:
    changes: dict[str, Any] = {"context": 2048, "loss_chunk": 64, "strategy": "single"}
    changes |= {"micro_batch": 1, "precision": precision, "vocab_size": 64}
    changes |= {"activation_checkpointing": checkpointing}
    whole, tiled, finer = (predicted(1, **changes, mlp_tile=rows) for rows in (None, 256, 32))
    # Of the MLP at the highest moment a whole [T, ffn] is in the activation's backward alone.
    element = 4 if precision == "fp32" else 2
    widest = element * 2048 * 4 * 64
    assert live(whole) - live(tiled) >= 2 * widest
    assert live(tiled) <= 0.75 * live(whole)
    # The rest is elsewhere than in a tile, however small one is.
    assert live(tiled) - live(finer) <= widest / 2


def live(prediction: Prediction) -> int:
    """Activations and temporaries of the highest moment."""
    lines = prediction.peak.device
    return (lines.activations_bytes or 0) + (lines.temporary_bytes or 0)


_LAST_NEEDS_MORE: dict[str, dict[str, Any]] = {
    "zero2": {"vocab_size": 4096, "tied": False, "attention": "eager", "context": 256},
    "zero1": {
        **{"layers": 8, "d_model": 384, "vocab_size": 4096, "context": 128},
        **{"offload_optimizer": "cpu", "activation_checkpointing": "offload"},
    },
}


@pytest.mark.parametrize("strategy", _LAST_NEEDS_MORE)
def test_a_plan_is_of_the_last_rank_where_that_needs_more(strategy: str) -> None:
    """Its gradients, of the end of the model, come first; either may reserve more."""
    more = STRATEGIES[strategy] | _LAST_NEEDS_MORE[strategy]
    accumulation = 1 if strategy == "zero2" else 2
    resolved = resolved_of(3, accumulation, device_type="cuda", precision="bf16", **more)
    first, last, plan = (predict(resolved, rank=rank) for rank in (0, 2, None))
    assert first.peak_bytes < last.peak_bytes == plan.peak_bytes
    uses = [reserved(each, resolved, limit_bytes=None) for each in (first, last, plan)]
    one, other, both = (use.peak_reserved_bytes for use in uses)
    assert both == max(one, other)


def test_a_plan_reserves_what_the_last_rank_does_where_that_reserves_more() -> None:
    """Both allocate as much; the last one's part fits worse into what is free."""
    more: dict[str, Any] = {"layers": 2, "d_model": 768, "heads": 12, "vocab_size": 50257}
    more |= {"context": 1024, "activation_checkpointing": "selective", "precision": "bf16-pure"}
    resolved = resolved_of(2, device_type="cuda", micro_batch=4, **STRATEGIES["zero1"], **more)
    uses = [
        reserved(
            predict(resolved, rank=rank),
            resolved,
            limit_bytes=None,
        )
        for rank in (0, 1, None)
    ]
    first, last, plan = (use.peak_reserved_bytes for use in uses)
    assert first < last == plan
