"""What a rank has of matrices that are cut: places, values, bytes, and what is sent."""

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
from launcher.model.norms import RMSNorm
from launcher.parallel.decoder import decoder
from launcher.parallel.mesh import TensorRank
from launcher.parallel.tensor.cut import Cut
from launcher.parallel.tensor.decoder import connect
from launcher.parallel.tensor.group import TensorGroup
from launcher.strategies.parameters import cuts_of, parameters_of
from launcher.strategies.places import Places

ODD: dict[str, Any] = {"vocab_size": 263, "context": 33, "layers": 2, "d_model": 48, "heads": 6}
LLAMA: dict[str, Any] = {
    **{"kv_heads": 6, "d_ff": 96, "position": "rope", "norm": "rms", "activation": "swiglu"},
    **{"attention_bias": False, "qkv_bias": True, "mlp_bias": False, "tied": False},
    "qk_norm": True,
}
MODELS = {"gpt2": ModelConfig(**ODD), "llama": ModelConfig(**ODD, **LLAMA)}


def shares(ranks: int) -> list[TensorRank]:
    return [TensorRank(ranks=ranks, index=index) for index in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3, 6])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_parts_are_the_modules_own_shapes(model: ModelConfig, ranks: int) -> None:
    for share in shares(ranks):
        with torch.device("meta"):
            module = decoder(model, None, TensorGroup(share=share, group=None))
        found = {name: tuple(p.shape) for name, p in module.named_parameters()}
        assert found == {p.name: p.shape for p in parameters_of(model, share)}
        assert list(found) == [p.name for p in parameters_of(model)]  # in the same order


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_element_of_a_cut_parameter_is_one_ranks(model: ModelConfig, ranks: int) -> None:
    for parameter in parameters_of(model):
        whole = torch.arange(parameter.elements).view(parameter.shape)
        cuts = [cuts_of(model, share)[parameter.name] for share in shares(ranks)]
        parts = [cut.take(whole) for cut in cuts]
        assert [tuple(part.shape) for part in parts] == [cut.shape for cut in cuts]
        if cuts[0].is_whole:
            assert all(torch.equal(part, whole) for part in parts)
        else:
            elements = torch.cat([part.flatten() for part in parts])
            assert sorted(elements.tolist()) == list(range(parameter.elements))


@pytest.mark.parametrize(
    "cut",
    [
        Cut((7, 5)),
        Cut((12,), rows=((2, 4), (8, 10))),
        Cut((12, 3), rows=((0, 2), (4, 6), (8, 10))),
        Cut((6, 8), columns=(3, 5)),
        Cut((6, 8), columns=(0, 8)),
    ],
)
def test_any_range_of_a_part_is_found_in_the_whole(cut: Cut) -> None:
    whole = torch.arange(torch.Size(cut.whole).numel())
    part = cut.take(whole.view(cut.whole)).flatten()
    for first, last in itertools.combinations(range(len(part) + 1), 2):
        pieces = list(cut.pieces(first, last))
        assert sum(piece.numel for piece in pieces) == last - first
        assert len(pieces) <= 3
        for piece in pieces:
            places = Places.of(piece.start, piece.numel, piece.run, piece.pitch)
            there = places.place(torch.arange(piece.numel))
            assert torch.equal(there, part[piece.offset : piece.offset + piece.numel])


def test_heads_are_cut_with_their_keys_and_values() -> None:
    model = MODELS["llama"]
    value = initial_value("blocks.0.attn.qkv.weight", (3 * 48, 48), model, seed=1, device="cpu")
    first, second = (cuts_of(model, share)["blocks.0.attn.qkv.weight"] for share in shares(2))
    q, k, v = value.chunk(3)
    assert torch.equal(first.take(value), torch.cat([part[:24] for part in (q, k, v)]))
    assert torch.equal(second.take(value), torch.cat([part[24:] for part in (q, k, v)]))


class _Shifted(RMSNorm):
    """What a family could bring: a norm that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
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
        connect(module, model, TensorGroup(share=TensorRank(ranks=2, index=0), group=None))


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
    tensor_group = TensorGroup(share=TensorRank(ranks=1, index=0), group=alone)
    module = decoder(model, None, tensor_group)
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
def test_one_rank_with_all_parts_computes_the_same(name: str, mode: str, alone: Any) -> None:
    model = MODELS[name]
    whole = GPT(model)
    parts = decoder(
        dataclasses.replace(model, activation_checkpointing=mode),
        None,
        TensorGroup(share=TensorRank(ranks=1, index=0), group=alone),
    )
    parts.load_state_dict(whole.state_dict())
    tokens = torch.randint(0, model.vocab_size, (2, 33))
    targets = tokens.roll(-1, 1).masked_fill(tokens % 7 == 0, -100)
    losses: list[Tensor] = [each(tokens, targets) for each in (whole, parts)]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    for key, parameter in parts.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key], msg=key)
