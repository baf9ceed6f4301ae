"""Parameters, shards and optimizer states by arithmetic, against the real things."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from launcher.config.resolve import resolve
from launcher.config.schema import RunConfig
from launcher.forecast.timeline import Timeline
from launcher.measure.live_trace import LiveTrace
from launcher.model.gpt import GPT
from launcher.model.sizes import named
from launcher.optim.entry import COUNTER_BYTES
from launcher.optim.registry import OPTIMIZERS, build_optimizer
from launcher.strategies.fsdp.placement import shard_shapes, sharded_dimension
from launcher.strategies.native import optimizer_tensors
from launcher.strategies.parameters import parameters_of
from launcher.strategies.rank import Rank
from launcher.strategies.zero.forecast.flat_groups import messages
from launcher.strategies.zero.forecast.stages import Zero12


def rank_of(world_size: int = 4, rank: int = 0, **changes: object) -> Rank:
    config = RunConfig().replace(model="nano", **changes)
    resolved = resolve(config, world_size=world_size, device_type="cpu")
    return Rank(resolved=resolved, world_size=world_size, rank=rank, device_type="cpu")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layers", [1, 5])
def test_parameters_are_the_models(layers: int, tied: bool) -> None:
    model = named("nano", layers=layers, tied=tied)
    with torch.device("meta"):
        real = {name: tuple(p.shape) for name, p in GPT(model).named_parameters()}
    assert {p.name: p.shape for p in parameters_of(model)} == real
    assert [p.name for p in parameters_of(model)] == list(real)
    assert sum(p.elements for p in parameters_of(model)) == model.parameter_count


@pytest.mark.parametrize("rows", [1, 5, 8, 1021])
@pytest.mark.parametrize("ranks", [1, 3, 8, 512])
def test_rows_are_cut_as_torch_does(rows: int, ranks: int) -> None:
    chunks = torch.empty(rows, 3, device="meta").chunk(ranks)
    for rank in range(ranks):
        mine, padded = shard_shapes((rows, 3), rank=rank, ranks=ranks)
        assert mine == (tuple(chunks[rank].shape) if rank < len(chunks) else (0, 3))
        assert padded == tuple(chunks[0].shape)


@pytest.mark.parametrize(
    ("shape", "ranks", "dimension"),
    [
        ((8, 128, 96), 8, 0),
        ((8, 128, 96), 9, 0),  # a ninth of the ranks without any is less than more copies
        ((8, 128, 96), 6, 2),  # two for most of them; 128 is no multiple
        ((8, 128, 96), 64, 1),
        ((8, 130, 100), 64, 0),  # torch divides nothing but the first unevenly
        ((8, 128), 64, 0),  # of a router or an adapter, too small to be copied for
        ((60, 64, 64), 32, 0),
        ((40, 64, 64), 32, 1),
    ],
)
def test_experts_are_divided_within_where_ranks_outnumber_them(
    shape: tuple[int, ...], ranks: int, dimension: int
) -> None:
    assert sharded_dimension(shape, ranks) == dimension


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_optimizer_states_are_what_a_step_makes(optimizer: str) -> None:
    rank = rank_of(1, optimizer=optimizer, layers=1)
    module = GPT(rank.resolved.model)
    real = build_optimizer(module, rank.resolved.config.optim)
    module(torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 8, dtype=torch.int64)).backward()
    real.step()
    held = [t.untyped_storage().nbytes() for t in optimizer_tensors(real)]
    costs = [rank.optimizer_costs(p.shape) for p in rank.parameters]
    assert sorted(size for each in costs for size in each.states_bytes) == sorted(held)


@pytest.mark.parametrize("world_size", [1, 3, 8, 512])
def test_parts_of_a_flat_group_cover_it_once(world_size: int) -> None:
    ranks = [rank_of(world_size, rank, zero=2, vocab_size=4099) for rank in range(world_size)]
    groups = [Zero12(rank, Timeline("cpu")) for rank in ranks]
    for p in ranks[0].parameters:
        assert sum(group.mine.get(p.name, 0) for group in groups) == p.elements
        owners = set(groups[0].owners[p.name])
        assert sum(groups[0].owners[p.name].values()) == p.elements
        assert {n for n, group in enumerate(groups) if p.name in group.mine} <= owners
    padded = world_size * sum(groups[0].partitions)
    assert 0 <= padded - ranks[0].resolved.model.parameter_count < 2 * 2 * world_size


def test_master_weights_follow_sixteen_bytes_per_parameter() -> None:
    rank = rank_of(8, zero=3)
    per_rank = sum(
        rank.optimizer_costs((-(-p.elements // 8),)).state_bytes for p in rank.parameters
    )
    counters = COUNTER_BYTES * len(rank.parameters)
    parameters = rank.resolved.model.parameter_count
    assert per_rank - counters == pytest.approx(8 * parameters / 8, rel=1e-3)


def test_depth_changes_nothing_but_the_number_of_blocks() -> None:
    model = named("gpt2-xl")
    one = sum(p.elements for p in parameters_of(model) if p.name.startswith("blocks.7."))
    assert one == model.block_parameter_count
    deeper = replace(model, layers=model.layers + 1)
    assert deeper.parameter_count - model.parameter_count == one


@pytest.mark.parametrize("shape", [(96, 512), (1000,)])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"moments_dtype": "bf16", "betas": (0.9, 0.99)},
        {"optimizer": "adamw8bit"},
        {"precision": "bf16-pure", "betas": (0.9, 0.99)},
        {"precision": "bf16-pure", "betas": (0.9, 0.99), "compensation": False},
        {"precision": "bf16-pure", "optimizer": "adamw8bit"},
        {"optimizer": "adafactor"},
        {"optimizer": "sgd"},
        {"optimizer": "muon"},
        {"optimizer": "apollo"},
        {"optimizer": "apollo", "apollo_rank": 1},
    ],
    ids=str,
)
def test_what_an_update_holds(changes: dict[str, Any], shape: tuple[int, ...]) -> None:
    choice = RunConfig().replace(**changes).optim
    entry = OPTIMIZERS[choice.optimizer]
    dtype = torch.bfloat16 if choice.precision == "bf16-pure" else torch.float32
    weight = torch.nn.Parameter(torch.randn(shape, dtype=dtype))
    module = torch.nn.Module()
    module.blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(1, 1)])
    module.blocks[1].weight = weight  # beside another matrix, which Muon needs
    optimizer = entry.build(module, choice)
    with LiveTrace() as trace:
        for _ in range(2):  # the first step makes the states
            weight.grad = torch.randn(shape, dtype=dtype)
            before = trace.current_bytes
            trace.reset_peak()
            optimizer.step()
    # Scalars and Adafactor's row and column means are left out of the arithmetic.
    small = 8 * sum(shape) + 64
    held = trace.peak_bytes() - before
    costs = entry.costs("blocks.1.weight", shape, choice, "cpu")
    assert held == pytest.approx(costs.temporary_bytes, abs=small)


@pytest.mark.parametrize(
    ("slices", "parts"),
    [
        ([3, 4], [[3, 4]]),  # a bucket's worth: one message
        ([30, 40], [[30], [40]]),  # a parameter larger than a bucket, in the parts of two ranks
        ([5, 6, 1], [[5, 6], [1]]),  # the slice that exceeds the bucket is still in the message
    ],
)
def test_a_bucket_is_reduced_in_messages_of_its_size(
    slices: list[int], parts: list[list[int]]
) -> None:
    assert messages(slices, 10) == parts


def test_slices_of_a_hundred_thousand_ranks_take_no_minutes() -> None:
    assert [len(message) for message in messages([1] * 100_000, 99_999)] == [100_000]
