"""States as the table of optimizers has them, 8-bit blocks, and what rounding cuts off."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.config.schema import OptimChoice
from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.optim.adafactor import Adafactor
from launcher.optim.blockwise import BLOCK_ELEMENTS, dequantize, levels, quantize
from launcher.optim.choice import OptimizerName
from launcher.optim.low_precision import SMALLEST_QUANTIZED, LowPrecisionAdamW
from launcher.optim.registry import OPTIMIZERS, build_optimizer, states_of
from launcher.strategies.flat_shards import counters, create_states, state_kinds, state_of
from launcher.strategies.native import optimizer_tensors
from launcher.strategies.native_state import NativeState

CHOICES = {
    "adamw": OptimChoice(),
    "adam": OptimChoice(optimizer="adam"),
    "sgd": OptimChoice(optimizer="sgd"),
    "sgd-plain": OptimChoice(optimizer="sgd", momentum=0.0),
    "adafactor": OptimChoice(optimizer="adafactor"),
    "adamw8bit": OptimChoice(optimizer="adamw8bit"),
    "bf16-moments": OptimChoice(moments_dtype="bf16"),
    "bf16-pure": OptimChoice(precision="bf16-pure"),
    "bf16-pure-bare": OptimChoice(precision="bf16-pure", compensation=False),
    "bf16-pure-fp32-moments": OptimChoice(precision="bf16-pure", moments_dtype="fp32"),
    "bf16-pure-8bit": OptimChoice(precision="bf16-pure", optimizer="adamw8bit"),
}


def new_module(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(67, 130), nn.Linear(130, 9)).to(dtype)


def gradients(step: int, module: nn.Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) for p in module.parameters()]


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 10) -> Tensor:
    """The parameters after some steps, flat, in fp32."""
    for step in range(steps):
        for parameter, gradient in zip(module.parameters(), gradients(step, module), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return torch.cat([p.detach().float().flatten() for p in module.parameters()])


@pytest.mark.parametrize("name", CHOICES)
def test_the_table_says_what_is_kept(name: str) -> None:
    choice = CHOICES[name]
    module = new_module(torch.bfloat16 if choice.precision == "bf16-pure" else torch.float32)
    optimizer, entry = build_optimizer(module, choice), OPTIMIZERS[choice.optimizer]
    create_states(optimizer, [(group, group["params"]) for group in optimizer.param_groups])
    for name, parameter in module.named_parameters():
        shape = tuple(parameter.shape)
        assert set(state_kinds(optimizer, parameter)) == set(states_of(choice, name, shape))
        assert set(counters(optimizer, parameter)) == set(entry.counters(name, shape))
    held = sum(tensor.untyped_storage().nbytes() for tensor in optimizer_tensors(optimizer))
    costs = [entry.costs(name, p.shape, choice, "cpu") for name, p in module.named_parameters()]
    assert held == sum(each.state_bytes for each in costs)


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("name", [*CHOICES, "muon", "apollo"])
def test_states_begin_at_zero_whatever_the_weights_are(name: str, skipped: bool) -> None:
    """They may be drawn at random, and replaced afterwards. Nor does a skipped step count."""
    choice = CHOICES.get(name) or OptimChoice(optimizer=cast(OptimizerName, name), apollo_rank=4)
    module = GPT(ModelConfig(vocab_size=13, context=8, layers=1, heads=2, d_model=16))
    module = module.bfloat16() if choice.precision == "bf16-pure" else module
    optimizer: Any = build_optimizer(module, choice)
    if skipped:
        optimizer.found_inf = torch.ones(())
    weights = [p.detach().clone() for p in module.parameters()]
    options = [dict(group) for group in optimizer.param_groups]
    create_states(optimizer, [(group, group["params"]) for group in optimizer.param_groups])
    for named, parameter in module.named_parameters():
        kinds = state_kinds(optimizer, parameter)
        assert set(kinds) == set(states_of(choice, named, tuple(parameter.shape)))
        for kind in kinds:
            assert not values_of(optimizer, parameter, kind).any(), (named, kind)
    assert all(map(torch.equal, module.parameters(), weights))
    assert [dict(group) for group in optimizer.param_groups] == options
    assert not skipped or optimizer.found_inf == 1


def test_an_8_bit_state_takes_two_bytes_and_its_scales() -> None:
    entry, choice = OPTIMIZERS["adamw8bit"], CHOICES["adamw8bit"]
    costs = entry.costs("", (1024, 1024), choice, "cpu")
    assert costs.state_bytes == 2 * 2**20 * (1 + 4 / BLOCK_ELEMENTS)
    costs = entry.costs("", (SMALLEST_QUANTIZED - 1,), choice, "cpu")
    assert costs.state_bytes == 8 * (SMALLEST_QUANTIZED - 1)


@pytest.mark.parametrize(("name", "bytes_each"), [("bf16-pure", 10), ("bf16-pure-bare", 8)])
def test_weights_gradients_and_states_of_pure_bf16(name: str, bytes_each: int) -> None:
    module = new_module(torch.bfloat16)
    optimizer = build_optimizer(module, CHOICES[name])
    train(module, optimizer, 1)
    with_gradients = [t for p in module.parameters() for t in (p, p.grad) if t is not None]
    held = sum(t.nbytes for t in (*with_gradients, *optimizer_tensors(optimizer)))
    assert held == bytes_each * sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("elements", [1, 255, 256, 257, 5000])
def test_quantized_blocks(signed: bool, elements: int) -> None:
    values = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    values = values if signed else values.square()
    values[0] = 1000.0  # spoils its own block only
    codes, scales = quantize(values, signed=signed)
    assert (codes.dtype, codes.numel()) == (torch.uint8, elements)
    assert scales.numel() == -(-elements // BLOCK_ELEMENTS)
    back = dequantize(codes, scales, signed=signed)
    assert back[0] == 1000.0
    rest = slice(BLOCK_ELEMENTS, None)
    bound = values[rest].abs().amax() / 64 if elements > BLOCK_ELEMENTS else 0
    assert ((back - values)[rest].abs() <= bound).all()
    assert torch.equal(dequantize(*quantize(back, signed=signed), signed=signed), back)


def test_gradients_of_many_decades_in_a_block_do_not_explode() -> None:
    """Second moments of 1e-12 beside 1: below the smallest code, but never divided by 0."""
    choice = OptimChoice(lr=0.01, optimizer="adamw8bit", weight_decay=0.0)
    weight = nn.Parameter(torch.zeros(SMALLEST_QUANTIZED))
    optimizer = build_optimizer(nn.ParameterList([weight]), choice)
    for _ in range(10):
        weight.grad = 10.0 ** -torch.arange(SMALLEST_QUANTIZED).remainder(7)
        optimizer.step()
    assert weight.abs().amax() < 0.11
    assert weight.abs().amin() > 0


def test_zeros_stay_zeros() -> None:
    assert not dequantize(*quantize(torch.zeros(300), signed=True), signed=True).any()


def test_the_map_is_torchaos() -> None:
    maps = pytest.importorskip("torchao.optim.quant_utils")
    for signed in (True, False):
        theirs = torch.tensor(maps.create_dynamic_map(signed))
        ours = levels(signed, torch.device("cpu"))
        torch.testing.assert_close(ours.float(), theirs, rtol=1e-5, atol=0)


def test_compensation_adds_up_what_rounding_cuts_off() -> None:
    """300 updates of a fortieth of the weight's last bit each."""
    choice = OptimChoice(precision="bf16-pure", lr=1e-4, weight_decay=0.0)
    weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    module = nn.ParameterList([weight])
    optimizer = build_optimizer(module, choice)
    for _ in range(300):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert isinstance(optimizer, LowPrecisionAdamW)
    expected = torch.full((8,), 0.97)
    torch.testing.assert_close(values_of(optimizer, weight, "param"), expected, rtol=1e-3, atol=0)
    naive = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    plain = build_optimizer(nn.ParameterList([naive]), replace(choice, compensation=False))
    for _ in range(300):
        naive.grad = torch.ones_like(naive)
        plain.step()
    assert (naive == 1.0).all()


def values_of(optimizer: Any, parameter: Tensor, kind: str) -> Tensor:
    """Return a state in fp32, or what it is where it is not stored in low precision."""
    if not isinstance(optimizer, LowPrecisionAdamW):
        return state_of(optimizer, parameter, kind)
    return torch.cat([each for _, each in optimizer.pieces(parameter, kind, filled=False)])


def fill(optimizer: LowPrecisionAdamW, parameter: Tensor, kind: str, values: Tensor) -> None:
    """Store values in place of a state."""
    for begin, piece in optimizer.pieces(parameter, kind, filled=True):
        piece.copy_(values[begin : begin + len(piece)])


@pytest.mark.parametrize("name", ["bf16-pure", "adamw8bit"])
def test_a_save_decodes_a_million_elements_at_a_time(name: str) -> None:
    """A rank's whole partition may be gigabytes in fp32, for which a full GPU has no room."""
    choice = CHOICES[name]
    dtype = torch.bfloat16 if choice.precision == "bf16-pure" else torch.float32
    module, other = (nn.ParameterList([torch.ones(2**20 + 4097, dtype=dtype)]) for _ in range(2))
    optimizer, copy = build_optimizer(module, choice), build_optimizer(other, choice)
    module[0].grad = torch.randn(module[0].shape, dtype=dtype)
    optimizer.step()
    saved, filled = NativeState(module, optimizer), NativeState(other, copy)
    for source, target in zip(saved.saved(), filled.loaded(), strict=True):
        assert (source.name, source.kind, source.start) == (target.name, target.kind, target.start)
        assert source.data.numel() <= 2**20
        target.data.copy_(source.data)
    assert torch.equal(module[0], other[0])
    for kind, state in optimizer.state[module[0]].items():
        assert kind == "step" or torch.equal(state, copy.state[other[0]][kind]), kind


class Copies(TorchDispatchMode):
    """Counts copies into tensors."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


def test_fp32_weights_are_filled_where_they_lie() -> None:
    module = nn.ParameterList([torch.ones(2 * 2**20 + 4097)])
    optimizer = build_optimizer(module, CHOICES["adamw8bit"])
    assert isinstance(optimizer, LowPrecisionAdamW)
    create_states(optimizer, [(group, group["params"]) for group in optimizer.param_groups])
    with Copies() as copies:
        for _, piece in optimizer.pieces(module[0], "param", filled=True):
            piece.fill_(3.0)
    assert copies.found == 0
    assert (module[0] == 3).all()


@pytest.mark.parametrize("name", [n for n in CHOICES if n.startswith(("bf16", "adamw8"))])
def test_what_is_read_and_written_back_trains_on_to_the_same_bits(name: str) -> None:
    """It computes with a weight and what rounding cut off, with codes and scales: all come back as
    they were, not only their sums and products."""
    choice = CHOICES[name]
    dtype = torch.bfloat16 if choice.precision == "bf16-pure" else torch.float32
    module, other = new_module(dtype), new_module(dtype)
    optimizer, copy = build_optimizer(module, choice), build_optimizer(other, choice)
    assert isinstance(optimizer, LowPrecisionAdamW)
    assert isinstance(copy, LowPrecisionAdamW)
    train(module, optimizer, 50)  # so that some weights lie between two of bf16
    create_states(copy, [(group, group["params"]) for group in copy.param_groups])
    for source, target in zip(module.parameters(), other.parameters(), strict=True):
        for kind in ("param", "exp_avg", "exp_avg_sq"):
            values = values_of(optimizer, source, kind)
            assert values.dtype == torch.float32
            fill(copy, target, kind, values)
            assert torch.equal(values_of(copy, target, kind), values)
        assert torch.equal(source, target)
        copy.state[target]["step"] = optimizer.state[source]["step"]
        before, after = optimizer.state[source], copy.state[target]
        assert torch.equal(before.get("compensation", source), after.get("compensation", target))
    assert torch.equal(train(module, optimizer), train(other, copy))


def test_a_weight_half_way_between_two_keeps_its_side() -> None:
    """The part that was cut off may itself be rounded, up to exactly half of the weight's last bit;
    rounding their sum to even would then take the other neighbour."""
    weight = nn.Parameter(torch.tensor([1.0, 1.0078125, -1.0078125], dtype=torch.bfloat16))
    other = nn.Parameter(torch.zeros_like(weight))
    half = torch.tensor([0.00390625, 0.00390625, -0.00390625], dtype=torch.bfloat16)
    for held, rest in ((weight, half), (other, torch.zeros_like(half))):
        optimizer: Any = build_optimizer(nn.ParameterList([held]), CHOICES["bf16-pure"])
        assert isinstance(optimizer, LowPrecisionAdamW)
        create_states(optimizer, [(group, group["params"]) for group in optimizer.param_groups])
        optimizer.state[held]["compensation"].copy_(rest)
        if held is weight:
            values = values_of(optimizer, held, "param")
    fill(optimizer, other, "param", values)
    assert torch.equal(weight, other)
    assert torch.equal(optimizer.state[other]["compensation"], half)


@pytest.mark.parametrize("make", [LowPrecisionAdamW, Adafactor])
def test_found_inf_holds_the_update_back(make: type[torch.optim.Optimizer]) -> None:
    choice = CHOICES["bf16-moments" if make is LowPrecisionAdamW else "adafactor"]
    module = new_module()
    optimizer: Any = build_optimizer(module, choice)
    optimizer.found_inf = torch.ones(())
    assert isinstance(optimizer, make)
    before = [p.detach().clone() for p in module.parameters()]
    train(module, optimizer, 1)
    assert all(map(torch.equal, before, module.parameters()))
    if make is LowPrecisionAdamW:  # so that a run can be saved that has skipped all its steps
        assert all(set(optimizer.state[p]) >= {"exp_avg", "step"} for p in module.parameters())
        assert all(counters(optimizer, p) == {"step": 0} for p in module.parameters())
