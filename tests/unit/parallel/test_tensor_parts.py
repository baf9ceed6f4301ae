"""Tensor-parallel shards: places, values, bytes, and collectives."""

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.config.model import part_of
from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT, initial_value
from launcher.model.layers import RMSNorm
from launcher.parallel.groups import TensorGroup
from launcher.parallel.mesh import ModelParallelRank, TensorRank
from launcher.parallel.model_parallel import ModelParallel
from launcher.parallel.tensor.decoder import shard_modules
from launcher.parallel.tensor.shards import ParameterShard
from launcher.strategies.parameters import parameters_of, shards_of

ODD: dict[str, Any] = {"vocab_size": 263, "context": 33, "layers": 2, "d_model": 48, "heads": 6}
LLAMA: dict[str, Any] = {
    **{"kv_heads": 6, "d_ff": 96, "position": "rope", "norm": "rms", "activation": "swiglu"},
    **{"bias": "qkv", "tied": False},
    "qk_norm": True,
}
MODELS = {"gpt2": ModelConfig(**ODD), "llama": ModelConfig(**ODD, **LLAMA)}


def tensor_ranks(size: int) -> list[ModelParallelRank]:
    ranks = [TensorRank(size=size, index=index) for index in range(size)]
    return [ModelParallelRank(tensor=rank) for rank in ranks]


@pytest.mark.parametrize("ranks", [2, 3, 6])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_shards_are_the_modules_own_shapes(model: ModelConfig, ranks: int) -> None:
    for rank in tensor_ranks(ranks):
        with torch.device("meta"):
            module = ModelParallel.predicted(rank, device_type="cuda").decoder(model)
        found = {name: tuple(p.shape) for name, p in module.named_parameters()}
        assert found == {p.name: p.shape for p in parameters_of(model, rank)}
        assert list(found) == [p.name for p in parameters_of(model)]  # in the same order


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_element_of_a_sharded_parameter_is_one_ranks(model: ModelConfig, ranks: int) -> None:
    for parameter in parameters_of(model):
        whole = torch.arange(parameter.elements).view(parameter.shape)
        shards = [shards_of(model, rank)[parameter.name] for rank in tensor_ranks(ranks)]
        values = [shard.take(whole) for shard in shards]
        assert [tuple(value.shape) for value in values] == [shard.shape for shard in shards]
        if shards[0].replicated:
            assert all(torch.equal(value, whole) for value in values)
        else:
            elements = torch.cat([value.flatten() for value in values])
            assert sorted(elements.tolist()) == list(range(parameter.elements))


@pytest.mark.parametrize(
    "shard",
    [
        ParameterShard((7, 5)),
        ParameterShard((1, 1, 6, 1)),  # Kimi Linear's decay rates
        ParameterShard((2, 4, 3)),
        ParameterShard((12,), rows=((2, 4), (8, 10))),
        ParameterShard((12, 3), rows=((0, 2), (4, 6), (8, 10))),
        ParameterShard((6, 8), columns=(3, 5)),
        ParameterShard((6, 8), columns=(0, 8)),
        ParameterShard((2, 3, 8), columns=(3, 5)),
        ParameterShard((2, 4, 3), rows=((1, 3), (5, 7))),
    ],
)
def test_any_range_of_a_shard_is_found_in_the_parameter(shard: ParameterShard) -> None:
    whole = torch.arange(torch.Size(shard.full_shape).numel())
    local = shard.take(whole.view(shard.full_shape)).flatten()
    for first, last in itertools.combinations(range(len(local) + 1), 2):
        ranges = list(shard.ranges(first, last))
        assert sum(places.numel for _, places in ranges) == last - first
        assert len(ranges) <= 3
        for begin, places in ranges:
            there = places.place(torch.arange(places.numel))
            assert torch.equal(there, local[begin : begin + places.numel])


def test_heads_are_sharded_with_their_keys_and_values() -> None:
    model = MODELS["llama"]
    value = initial_value("blocks.0.attn.qkv.weight", (3 * 48, 48), model, seed=1, device="cpu")
    first, second = (shards_of(model, rank)["blocks.0.attn.qkv.weight"] for rank in tensor_ranks(2))
    q, k, v = value.chunk(3)
    assert torch.equal(first.take(value), torch.cat([part[:24] for part in (q, k, v)]))
    assert torch.equal(second.take(value), torch.cat([part[24:] for part in (q, k, v)]))


class _Shifted(RMSNorm):
    """A norm that computes something else, which a family could bring."""

    def forward(self, x: Tensor, *, beside: bool = False) -> Any:
        return super().forward(x) + 1


@pytest.mark.parametrize("place", ["ln_f", "blocks.1.attn.q_norm"])
def test_a_module_that_is_not_known_exactly_is_refused(place: str) -> None:
    """It would be replaced by a norm, and its forward dropped."""
    model = MODELS["llama"]
    with torch.device("meta"):
        module = GPT(part_of(model, 2, 0))
        size = module.get_submodule(place).get_parameter("weight").numel()
        module.set_submodule(place, _Shifted(size, eps=1e-6))
    with pytest.raises(TypeError, match=f"{place} is a _Shifted, which tensor parallelism"):
        shard_modules(module, model, TensorGroup(rank=TensorRank(size=2, index=0)))


class _Sent(TorchDispatchMode):
    """Counts collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.found[func._schema.name.removeprefix("c10d::")] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def alone() -> Any:
    """A process group of one rank, for both parts of a model to be computed in it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_selective_checkpointing_sends_nothing_again(mode: str, alone: Any) -> None:
    model = ModelConfig(**ODD, activation_checkpointing=mode)
    tensor_group = TensorGroup(rank=TensorRank(size=1, index=0), group=alone)
    module = ModelParallel(tensor=tensor_group).decoder(model)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    with _Sent() as sent:
        loss = module(tokens, tokens)
        forward = +sent.found
        loss.backward()
    gathers = sent.found["_allgather_base_"] - forward["_allgather_base_"]
    scatters = sent.found["_reduce_scatter_base_"] - forward["_reduce_scatter_base_"]
    layers = model.layers
    again = mode == "full"
    assert forward["_allgather_base_"] == 2 * layers + 1
    assert forward["_reduce_scatter_base_"] == 2 * layers + 2
    assert gathers == 4 * layers + 1 + again * 2 * layers
    assert scatters == 2 * layers + again * layers


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["none", "selective", "full", "offload"])
def test_one_rank_with_whole_shards_computes_the_same(name: str, mode: str, alone: Any) -> None:
    model = MODELS[name]
    whole = GPT(model)
    tensor_group = TensorGroup(rank=TensorRank(size=1, index=0), group=alone)
    sharded = ModelParallel(tensor=tensor_group).decoder(
        dataclasses.replace(model, activation_checkpointing=mode)
    )
    sharded.load_state_dict(whole.state_dict())
    tokens = torch.randint(0, model.vocab_size, (2, 33))
    targets = tokens.roll(-1, 1).masked_fill(tokens % 7 == 0, -100)
    losses: list[Tensor] = [each(tokens, targets) for each in (whole, sharded)]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    for key, parameter in sharded.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key], msg=key)
