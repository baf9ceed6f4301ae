"""Predicted times against numbers worked by hand, on a machine of round rates."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from launcher.config.resolve import Resolved, resolve
from launcher.config.schema import RunConfig
from launcher.config.sharding import ShardingChoice
from launcher.forecast.assess import _step_time
from launcher.forecast.calibration import Calibration
from launcher.forecast.cluster import Cluster
from launcher.forecast.collectives import (
    Group,
    collective_s,
    groups_of,
    sent_bytes,
)
from launcher.forecast.machine import COLLECTIVES, Machine, Rate
from launcher.forecast.strategies import forecast_of
from launcher.forecast.table import _rounded
from launcher.forecast.timing import StepTime, exposed_s, optimizer_s, step_seconds
from launcher.forecast.traffic import Wire
from launcher.forecast.work import passes_work
from launcher.model.products import flops_per_token
from launcher.util.errors import UserError

LINK = Rate(start_s=0.0, hop_s=0.0, bytes_per_s=1e9)
# Computing and copying take next to no time here, so that links are what is seen.
LINKS_ONLY = Machine(
    name="test",
    device="cuda",
    source="the test",
    ranks_per_node=8,
    memory_bytes=2**35,
    matmul_flops_per_s={"fp32": 1e30, "bf16": 1e30},
    attention_flops_per_s={"fp32": 1e30, "bf16": 1e30},
    copy_bytes_per_s=1e30,
    elementwise_bytes_per_s=1e30,
    operator_s=0.0,
    host_to_device_bytes_per_s=1e30,
    device_to_host_bytes_per_s=1e30,
    collectives=dict.fromkeys(COLLECTIVES, LINK),
    network_bytes_per_s=1e8,
    network_hop_s=0.0,
    cpu_adam_parameters_per_s=1e30,
    disk_read_bytes_per_s=1e30,
    disk_write_bytes_per_s=1e30,
)
TINY: dict[str, Any] = {
    **{"layers": 2, "heads": 2, "d_model": 8, "context": 16, "vocab_size": 100, "micro_batch": 3},
    "precision": "fp32",
}


def resolved(world_size: int = 8, device_type: str = "cuda", **changes: Any) -> Resolved:
    config = RunConfig().replace(**{**TINY, "cuda_graphs": False, **changes})
    return resolve(config, world_size=world_size, device_type=device_type)


def predict(machine: Machine = LINKS_ONLY, world_size: int = 8, **changes: Any) -> StepTime:
    return step_seconds(resolved(world_size, **changes), gpus_per_node=8, machine=machine)


def test_bytes_sent_in_a_ring() -> None:
    assert sent_bytes("all_reduce", 800, 8) == 1400
    assert sent_bytes("all_gather", 800, 8) == 700
    assert sent_bytes("reduce_scatter", 800, 8) == 700


def test_a_collective_within_a_node() -> None:
    rate = Rate(start_s=10.0, hop_s=1.0, bytes_per_s=100.0)
    machine = dataclasses.replace(LINKS_ONLY, collectives=dict.fromkeys(COLLECTIVES, rate))
    four = Group(size=4, per_node=4)
    # 10 + 3 hops + 3/4 of 400 bytes; the all-reduce has both twice.
    assert collective_s(machine, four, "all_gather", 400) == 10 + 3 + 3
    assert collective_s(machine, four, "all_reduce", 400) == 10 + 6 + 6
    # In 5 pieces the latency comes 5 times.
    assert collective_s(machine, four, "all_gather", 400, pieces=5) == 5 * 13 + 3
    assert collective_s(machine, Group(size=1, per_node=1), "all_reduce", 400) == 0


def test_a_collective_across_nodes_has_the_links_of_all_its_ranks_on_a_node() -> None:
    machine = dataclasses.replace(LINKS_ONLY, network_hop_s=1.0)
    # 4 nodes of 8: 8 links of 1e8 are slower than the 1e9 within; a ring crosses 3 times, and a
    # tree over 4 nodes, which only an all-reduce has, 2 levels.
    wide = Group(size=32, per_node=8)
    assert collective_s(machine, wide, "all_gather", 32e8) == pytest.approx(3 + 31e8 / 8e8)
    assert collective_s(machine, wide, "all_reduce", 32e8) == pytest.approx(4 + 62e8 / 8e8)
    # One rank on each node has one link.
    thin = Group(size=4, per_node=1)
    assert collective_s(machine, thin, "all_gather", 4e8) == pytest.approx(3 + 3e8 / 1e8)


@pytest.mark.parametrize(
    ("replicate", "shard", "replica"),
    [
        (1, Group(size=16, per_node=8), Group(size=1, per_node=1)),
        (2, Group(size=8, per_node=8), Group(size=2, per_node=1)),
        (4, Group(size=4, per_node=4), Group(size=4, per_node=2)),
        (16, Group(size=1, per_node=1), Group(size=16, per_node=8)),
    ],
)
def test_groups_of_a_mesh(replicate: int, shard: Group, replica: Group) -> None:
    sharding = ShardingChoice(replicate=replicate)
    groups = groups_of(sharding, world_size=16, ranks_per_node=8)
    assert (groups["shard"], groups["replica"]) == (shard, replica)


def test_ranks_that_share_matrices_are_the_nearest_neighbours() -> None:
    sharding = ShardingChoice(tensor_parallel=4, context_parallel=2)
    groups = groups_of(sharding, world_size=32, ranks_per_node=8)
    assert groups["tensor"] == Group(size=4, per_node=4)
    assert groups["sequence"] == Group(size=2, per_node=2)
    assert groups["shard"] == Group(size=8, per_node=2)
    across = groups_of(ShardingChoice(tensor_parallel=16), world_size=32, ranks_per_node=8)
    assert across["tensor"] == Group(size=16, per_node=8)


def test_transfers_hide_behind_compute_where_they_can() -> None:
    transfers = [(5.0, True), (2.0, False)]  # (seconds, hideable)
    assert exposed_s(transfers, 10.0, 0.0) == 2
    assert exposed_s(transfers, 4.0, 0.0) == 3
    assert exposed_s(transfers, 10.0, None) == 7
    # Side by side each takes from the other.
    assert exposed_s(transfers, 10.0, 0.1) == 2 + 0.5
    assert exposed_s(transfers, 4.0, 0.1) == pytest.approx(3 + 0.4)


@pytest.mark.parametrize("loss_chunk", [0, 8])
def test_flops_are_the_models(loss_chunk: int) -> None:
    run = resolved(attention="eager", loss_chunk=loss_chunk)
    works = passes_work(run)
    flops = sum(work.matmul_flops + work.attention_flops for work in works)
    assert flops == pytest.approx(3 * 16 * flops_per_token(run.model, 16))


def test_recomputation_adds_a_forward_of_the_blocks() -> None:
    plain, selective, full = (
        passes_work(resolved(attention="sdpa", activation_checkpointing=mode))[1]
        for mode in ("none", "selective", "full")
    )
    # 2 blocks of 3 d^2 + d^2 + 4 d^2 weights, 48 tokens: backward asks for no output of the MLP's
    # last projection. Attention 4 L d T / 2.
    assert full.matmul_flops - plain.matmul_flops == 48 * 2 * 2 * 8 * 8**2
    assert full.attention_flops - plain.attention_flops == 48 * 4 * 2 * 8 * 16 / 2
    assert selective.matmul_flops == plain.matmul_flops
    assert selective.attention_flops == plain.attention_flops
    # Norms are recomputed by both, 2 x (2 d + 2) elements of 4 bytes for each token and layer, and
    # with the whole block the first sum, 3 d; activations also without checkpointing.
    for mode, elements in ((selective, 4 * 8 + 4), (full, 7 * 8 + 4)):
        more = mode.elementwise_bytes - plain.elementwise_bytes
        assert more == pytest.approx(48 * 2 * elements * 4, rel=0.1)


def test_tiles_recompute_the_mlp_and_in_recomputed_blocks_all_but_the_last_twice() -> None:
    def flops(mode: str, mlp_tile: int | None) -> float:
        run = resolved(attention="eager", activation_checkpointing=mode, mlp_tile=mlp_tile)
        return passes_work(run)[1].matmul_flops

    first = 48 * 2 * 2 * 4 * 8**2  # 48 tokens, 2 blocks, 4 d^2 weights of the first projection
    added = {mode: flops(mode, 12) - flops(mode, None) for mode in ("none", "selective", "full")}
    # A recomputed block runs all tiles but the last, both projections, and each tile its first one.
    assert added == {"none": first, "selective": first, "full": first * (2 * 3 / 4)}


def test_only_what_is_not_kept_is_counted_again() -> None:
    def flops(mode: str) -> float:
        return passes_work(resolved(attention="eager", activation_checkpointing=mode))[
            1
        ].matmul_flops

    none, full, weights = flops("none"), flops("full"), 48 * 2 * 2 * 8**2  # tokens, blocks, d^2
    scores = full - none - 8 * weights  # products, too, where no kernel fuses them
    assert scores == 48 * 4 * 2 * 8 * 16
    assert flops("every=2") == pytest.approx((none + full) / 2)
    assert flops("keep=qkv,proj,mlp-up") == none + scores
    assert flops("keep=attention") == none + (3 + 1 + 4) * weights
    assert flops("keep=attention,qkv") == none + (1 + 4) * weights
    assert flops("none:1/keep=attention,qkv,proj:1") == none + 4 * weights / 2


def test_a_fused_kernel_skips_the_masked_half() -> None:
    forward, backward = passes_work(resolved(attention="sdpa"))
    whole = 48 * 4 * 2 * 8 * 16
    assert forward.attention_flops == whole / 2
    assert backward.attention_flops == 2.5 * whole / 2
    # As a mask, a window saves nothing.
    assert passes_work(resolved(attention="sdpa", window=4))[0].attention_flops == whole


def test_a_kernel_that_knows_a_window_scores_its_keys_alone() -> None:
    def flops(window: int) -> float:
        config = RunConfig().replace(**TINY, head_dim=16, window=window)
        run = resolve(config, world_size=8, device_type="cuda", elsewhere=True)
        return passes_work(run)[0].attention_flops

    whole = 48 * 4 * 2 * 32 * 16
    # 4 of 16 keys, of the first queries fewer
    assert flops(4) == whole * (16 * 4 - 4 * 4 / 2) / 16**2
    assert whole * 0.49 < flops(14) < flops(15) == whole / 2


def test_compute_adds_up() -> None:
    machine = dataclasses.replace(
        LINKS_ONLY,
        matmul_flops_per_s={"fp32": 1e6},
        attention_flops_per_s={"fp32": 2e6},
        elementwise_bytes_per_s=4e6,
    )
    run = resolved(world_size=1)
    work, _ = passes_work(run)
    expected = work.matmul_flops / 1e6 + work.attention_flops / 2e6 + work.elementwise_bytes / 4e6
    time = step_seconds(run, gpus_per_node=8, machine=machine)
    assert time.forward_s == pytest.approx(expected)
    assert time.tokens == 3 * 16
    assert time.tokens_per_s == pytest.approx(48 / time.total_s)
    # Starting operators takes longer than the GPU does, or adds to it on a CPU.
    assert work.operators > 72
    slow = dataclasses.replace(machine, operator_s=expected)
    started_s = work.operators * expected
    assert predict(slow, world_size=1).forward_s == pytest.approx(started_s)
    slow = dataclasses.replace(slow, device="cpu", ranks_per_node=1)
    assert predict(slow, world_size=1).forward_s == pytest.approx(started_s + expected)


MODEL = resolved().model
ALL = MODEL.parameter_count
# (100 + 16) x 8, the tied head among them
EMBEDDINGS = Wire(resolved()).embeddings
BLOCKS = MODEL.layers * MODEL.block_parameter_count
LINK_S = 7 / 8 / 1e9  # per byte of a gather or reduce-scatter over 8 ranks

# What is sent per step in units of parameter bytes x 7/8, with 1 and with 4 micro-batches.
# All but the final LayerNorm (16 of 2800 parameters), which the planner leaves out.
TRAFFIC = {
    "ddp": ({"strategy": "ddp"}, 2 * 4, 2 * 4),
    "zero 0": ({"zero": 0}, 2 * 4, 2 * 4),
    "zero 1": ({"zero": 1}, 2 * 4 + 4, 2 * 4 + 4),
    "zero 2": ({"zero": 2}, 2 * 4 + 4, 4 * 2 * 4 + 4),
    "zero 3": ({"zero": 3}, 3 * 4, 4 * 3 * 4),
    "zero 1, bf16": ({"zero": 1, "precision": "bf16"}, 2 * 2 + 2, 2 * 2 + 2),
    "zero 3, bf16": ({"zero": 3, "precision": "bf16"}, 3 * 2, 4 * 3 * 2),
    "grad-op": (
        {"strategy": "fsdp", "reshard_after_forward": False},
        4 + 4,
        4 * 4 + 4,
    ),
    "grad-op, bf16": (
        {"strategy": "fsdp", "reshard_after_forward": False, "precision": "bf16"},
        2 + 4,
        4 * 2 + 4,
    ),
    "grad-op, reduced each time": (
        {"strategy": "fsdp", "reshard_after_forward": False, "reduce_each_micro_batch": True},
        4 + 4,
        4 * (4 + 4),
    ),
}


@pytest.mark.parametrize(("flags", "once", "four_times"), TRAFFIC.values(), ids=TRAFFIC)
def test_bytes_per_step_of_a_strategy(
    flags: dict[str, Any], once: float, four_times: float
) -> None:
    unit_s = LINK_S * ALL
    assert predict(**flags).communication_s == pytest.approx(once * unit_s, rel=0.01)
    accumulated = predict(**flags, global_batch=4 * 3 * 8)
    assert accumulated.communication_s == pytest.approx(four_times * unit_s, rel=0.01)


def test_fsdp_gathers_blocks_twice_and_a_tied_root_once() -> None:
    full = predict(strategy="fsdp").communication_s
    gathers, reduces = 4 * (2 * BLOCKS + EMBEDDINGS), 4 * (BLOCKS + EMBEDDINGS)
    assert full == pytest.approx(LINK_S * (gathers + reduces))


def test_hybrid_reduces_shards_across_replicas() -> None:
    # Shards over 8 ranks of a node; each of the 8 shards all-reduced over 2 nodes, on one link.
    one_node = predict(strategy="fsdp").communication_s
    hybrid = predict(strategy="fsdp", world_size=16, replicate=2).communication_s
    shard_bytes = 4 * (BLOCKS + EMBEDDINGS) / 8
    assert hybrid - one_node == pytest.approx(2 * 1 / 2 * shard_bytes / 1e8)


def test_what_runs_here_have_taught_scales_all_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Calibration, "time_ratio", lambda *of_the_run: 0.5)
    cluster = Cluster(
        machine=LINKS_ONLY,
        world_size=8,
        ranks_per_node=8,
        memory_bytes=2**34,
        calibration=Calibration({}, Path()),
        fixed_bytes=0,
    )
    run = resolved(zero=2)
    scaled, published = dataclasses.asdict(_step_time(run, cluster)), predict(zero=2)
    for name, seconds in dataclasses.asdict(published).items():
        assert scaled[name] == (seconds if name == "tokens" else 0.5 * seconds), name


def test_the_embeddings_gradients_come_too_late_to_hide() -> None:
    # With compute without end behind it, only the last bucket waits.
    machine = dataclasses.replace(LINKS_ONLY, matmul_flops_per_s={"fp32": 1.0})
    tail_s = 2 * LINK_S * 4 * EMBEDDINGS
    assert predict(machine, strategy="ddp").exposed_communication_s == pytest.approx(tail_s)
    assert predict(machine, zero=2).exposed_communication_s == pytest.approx(
        tail_s + LINK_S * 4 * ALL  # and the gather of updated parameters
    )
    # DeepSpeed reduces after the backward at stage 0, and in bf16 at stage 1: all of it waits.
    for flags in ({"zero": 0}, {"zero": 1, "precision": "bf16"}):
        time = predict(
            dataclasses.replace(machine, matmul_flops_per_s={"fp32": 1, "bf16": 1}), **flags
        )
        assert time.exposed_communication_s == pytest.approx(time.communication_s)


def test_on_a_cpu_nothing_hides() -> None:
    machine = dataclasses.replace(LINKS_ONLY, device="cpu", matmul_flops_per_s={"fp32": 1.0})
    for flags in ({"strategy": "ddp"}, {"strategy": "fsdp"}, {"zero": 2}):
        time = predict(machine, device_type="cpu", **flags)
        assert time.exposed_communication_s == pytest.approx(time.communication_s)
        phases = time.forward_s + time.backward_s + time.step_s
        assert time.total_s == phases > time.exposed_communication_s


def test_the_optimizer_of_a_gpu_is_bound_by_its_memory() -> None:
    machine = dataclasses.replace(LINKS_ONLY, copy_bytes_per_s=1e3)
    shared: dict[str, Any] = {"ranks_per_node": 8, "machine": machine}
    whole = 40 * ALL / 1e3  # 4 for the norm, 8 to clip, 28 for AdamW
    assert optimizer_s(resolved(strategy="ddp"), **shared) == pytest.approx(whole)
    assert optimizer_s(resolved(strategy="fsdp"), **shared) == pytest.approx(whole / 8)
    assert optimizer_s(resolved(zero=1), **shared) == pytest.approx(whole / 8)
    bf16 = optimizer_s(resolved(zero=1, precision="bf16"), **shared)
    assert bf16 == pytest.approx(42 / 40 * whole / 8)


def test_another_optimizer_takes_its_own_time() -> None:
    machine = dataclasses.replace(
        LINKS_ONLY, copy_bytes_per_s=1e3, matmul_flops_per_s={"fp32": 1.0, "bf16": 1e3}
    )
    shared: dict[str, Any] = {"ranks_per_node": 1, "machine": machine}
    # Tensors this small keep moments in fp32, also with 8 bits.
    moved = {"adam": 28, "sgd": 20, "adafactor": 108, "adamw8bit": 28}
    for optimizer, update_bytes in moved.items():
        seconds = optimizer_s(resolved(1, optimizer=optimizer), **shared)
        assert seconds == pytest.approx((12 + update_bytes) * ALL / 1e3)
    # Per block: 8 x 24 and 8 x 8, and 8 x 32 twice; 5 iterations of 4 m^2 n + 2 m^3 each.
    hidden = TINY["layers"] * (8 * 24 + 8 * 8 + 2 * 8 * 32)
    flops = TINY["layers"] * 5 * (4 * 8**2 * (24 + 8 + 2 * 32) + 4 * 2 * 8**3)
    memory_s = (40 * ALL + (54 - 28) * hidden) / 1e3
    assert optimizer_s(resolved(1, optimizer="muon"), **shared) == pytest.approx(
        memory_s + flops / 1e3
    )
    # In fp32, at 1 FLOP/s; the four matrices of a block have 72 rows and 56 columns together.
    projected = TINY["layers"] * 2 * (76 * 72 + 212 * 56)
    apollo = optimizer_s(resolved(1, optimizer="apollo", apollo_rank=2), **shared)
    memory_of_apollo_s = (40 * ALL + (20 - 28) * hidden + projected) / 1e3
    assert apollo == pytest.approx(memory_of_apollo_s + 2 * 2 * hidden)
    # On a host in proportion to AdamW, whose rate was measured, and in fp32 where it has no bf16.
    host = dataclasses.replace(
        machine, device="cpu", cpu_adam_parameters_per_s=1e3, matmul_flops_per_s={"fp32": 1e3}
    )
    on_host = {
        name: optimizer_s(resolved(1, "cpu", optimizer=name), **(shared | {"machine": host}))
        for name in ("adamw", "sgd", "muon")
    }
    assert on_host["adamw"] == ALL / 1e3
    assert on_host["sgd"] == pytest.approx(32 / 40 * ALL / 1e3)
    assert on_host["muon"] == pytest.approx(memory_s / 40 + flops / 1e3)


def test_an_offloaded_optimizer_runs_on_the_host() -> None:
    machine = dataclasses.replace(
        LINKS_ONLY,
        cpu_adam_parameters_per_s=1e3,
        host_to_device_bytes_per_s=1e4,
        device_to_host_bytes_per_s=2e4,
    )
    own = ALL / 8
    time = predict(machine, zero=2, offload_optimizer="cpu")
    gather_s = LINK_S * 4 * ALL
    assert time.step_s == pytest.approx(own / 1e3 + 4 * own / 1e4 + gather_s)
    # Gradients go down in each micro-batch; nothing here hides them.
    plain = predict(machine, zero=2)
    assert time.backward_s - plain.backward_s == pytest.approx(4 * own / 2e4)
    # 4 ranks on a host have twice the cores each that 8 have.
    half = predict(machine, world_size=4, zero=2, offload_optimizer="cpu")
    assert half.step_s == pytest.approx(2 * own / 2e3 + 4 * 2 * own / 1e4 + 3 / 4 / 1e9 * 4 * ALL)


def test_offloaded_parameters_come_over_pcie_for_each_gather() -> None:
    machine = dataclasses.replace(LINKS_ONLY, host_to_device_bytes_per_s=1e4)
    flags: dict[str, Any] = {"zero": 3, "offload_optimizer": "cpu", "precision": "bf16"}
    more = (
        predict(machine, **flags, offload_param="cpu").total_s - predict(machine, **flags).total_s
    )
    assert more == pytest.approx(2 * 2 * (BLOCKS + EMBEDDINGS) / 8 / 1e4)


def test_offloaded_block_inputs_cross_pcie_both_ways_beside_the_compute() -> None:
    machine = dataclasses.replace(
        LINKS_ONLY, device_to_host_bytes_per_s=2e3, host_to_device_bytes_per_s=1e3
    )
    offload = {"strategy": "single", "activation_checkpointing": "offload"}
    time = predict(machine, world_size=1, **offload)
    inputs_bytes = TINY["layers"] * 4 * TINY["micro_batch"] * TINY["context"] * TINY["d_model"]
    assert time.forward_s == pytest.approx(inputs_bytes / 2e3)
    assert time.backward_s == pytest.approx(inputs_bytes / 1e3)
    slow = dataclasses.replace(machine, copy_bytes_per_s=1e30, matmul_flops_per_s={"fp32": 1.0})
    assert predict(slow, world_size=1, **offload).exposed_communication_s == 0.0


def test_states_on_nvme_are_read_and_written_by_all_ranks_of_a_node() -> None:
    machine = dataclasses.replace(LINKS_ONLY, disk_read_bytes_per_s=2e3, disk_write_bytes_per_s=1e3)
    run = resolved(zero=3)
    nvme = dataclasses.replace(run, config=run.config.replace(offload_optimizer="nvme"))
    seconds = optimizer_s(nvme, ranks_per_node=8, machine=machine)
    assert seconds == pytest.approx(12 * ALL / 2e3 + 12 * ALL / 1e3)


def test_ranks_share_a_host() -> None:
    cpu = dataclasses.replace(LINKS_ONLY, device="cpu", ranks_per_node=2)
    four = cpu.shared_by(4)
    assert four.matmul_flops_per_s["fp32"] == cpu.matmul_flops_per_s["fp32"] / 2
    assert four.cpu_adam_parameters_per_s == cpu.cpu_adam_parameters_per_s / 2
    gpus = LINKS_ONLY.shared_by(4)
    assert gpus.matmul_flops_per_s == LINKS_ONLY.matmul_flops_per_s
    assert gpus.cpu_adam_parameters_per_s == 2 * LINKS_ONLY.cpu_adam_parameters_per_s


@pytest.mark.parametrize("flags", [{"strategy": "ddp"}, {"strategy": "fsdp"}, {"zero": 3}])
def test_large_worlds_of_a_known_gpu(flags: dict[str, Any]) -> None:
    machine = Machine.of_gpu("H100")
    config = RunConfig().replace(model="13b", micro_batch=1, precision="bf16", **flags)
    previous = 0.0
    for world_size in (8, 64, 512, 4096):
        run = resolve(config, world_size=world_size, device_type="cuda")
        time = step_seconds(run, gpus_per_node=8, machine=machine)
        assert 0 < time.exposed_communication_s <= time.communication_s
        assert time.tokens_per_s > previous  # weak scaling: never less than with fewer
        previous = time.tokens_per_s


def test_h100_trains_gpt2_xl_at_a_believable_rate() -> None:
    run = resolve(
        RunConfig().replace(model="gpt2-xl", micro_batch=8, precision="bf16", strategy="fsdp"),
        world_size=8,
        device_type="cuda",
    )
    time = step_seconds(run, gpus_per_node=8, machine=Machine.of_gpu("H100"))
    flops_per_s = time.tokens_per_s * flops_per_token(run.model, 1024) / 8
    assert 0.3 < flops_per_s / 989.4e12 < 0.7


def test_a_precision_without_a_rate_is_refused() -> None:
    with pytest.raises(UserError, match="--precision bf16: V100-32GB has no rate for bf16"):
        predict(Machine.of_gpu("V100-32GB"), precision="bf16", strategy="ddp")
    fp8: dict[str, Any] = {"precision": "fp8", "strategy": "ddp", "d_model": 32, "micro_batch": 1}
    with pytest.raises(UserError, match="--precision fp8: A100-80GB has no matmuls in fp8: use"):
        predict(Machine.of_gpu("A100-80GB"), **fp8)
    assert predict(Machine.of_gpu("L40S"), **fp8).total_s > 0


def test_a_profile_of_one_process_cannot_predict_collectives() -> None:
    alone = dataclasses.replace(LINKS_ONLY, collectives=None)
    assert predict(alone, world_size=1).communication_s == 0
    with pytest.raises(UserError, match="measured by 1 process"):
        predict(alone, strategy="ddp")


@pytest.mark.parametrize(
    ("changes", "hideable"),
    [
        ({"precision": "bf16"}, False),
        ({"precision": "bf16", "grad_accum_dtype": "bf16"}, True),
        ({"precision": "bf16", "offload_optimizer": "cpu"}, True),
        ({"precision": "bf16-pure"}, True),
        ({"precision": "fp32"}, True),
    ],
)
def test_only_deepspeeds_bf16_optimizer_waits_for_the_backward(
    changes: dict[str, Any], hideable: bool
) -> None:
    run = resolved(zero=1, **changes)
    wire = Wire(run)
    reduced = forecast_of(run.config).traffic(wire).last_backward[0]
    assert (reduced.kind, reduced.hideable) == ("all_reduce", hideable)


@pytest.mark.parametrize(
    ("rate", "text"), [(870.0, "870"), (14_210.0, "14.2k"), (999_900.0, "1.00M"), (2.73e9, "2.73G")]
)
def test_rates_have_three_digits(rate: float, text: str) -> None:
    assert _rounded(rate) == text
