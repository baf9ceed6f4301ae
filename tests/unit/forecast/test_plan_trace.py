"""What is put together from short traces is what a full trace of the same model says."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from trace_levels import levels

from launcher.forecast.trace.blocks import _expanded, _representative_blocks, trace_micro_batch
from launcher.forecast.trace.events import (
    Allocated,
    Compute,
    Gradient,
    MicroBatch,
    Module,
    Place,
    TraceRequest,
)
from launcher.forecast.trace.record import Recorder, record_trace
from launcher.forecast.trace.workspaces import partial_sums_bytes, workspace_bytes
from launcher.model import fused
from launcher.model.checkpointing import parse
from launcher.model.config import ActivationCheckpointing, ModelConfig
from launcher.model.gpt import GPT
from launcher.model.lora_config import Lora, LoraTarget
from launcher.model.sizes import named
from launcher.strategies.parameters import parameters_of

COMPUTES = {
    "fp32": Compute(),
    "autocast": Compute(autocast=True),
    "bf16": Compute(params_dtype=torch.bfloat16),
    "stage3": Compute(stage3=True),
    "gpu": Compute(device_type="cuda"),
}
SEQ_LEN = 64
QWEN3: dict[str, Any] = {
    **{"kv_heads": 2, "head_dim": 10, "position": "rope", "norm": "rms", "qk_norm": True},
    **{"activation": "swiglu", "d_ff": 40, "bias": "none"},
}


def model_of(checkpointing: ActivationCheckpointing, **changes: Any) -> ModelConfig:
    small = named("nano", d_model=48, heads=4, vocab_size=300, context=SEQ_LEN, layers=5)
    return replace(small, activation_checkpointing=checkpointing, **changes)


def whole_trace(model: ModelConfig, compute: Compute, micro_batch: int) -> MicroBatch:
    """Every block, every tile and the batch itself traced, nothing put together."""
    sums = partial(workspace_bytes, compute=compute)
    where = TraceRequest(model, compute, micro_batch, SEQ_LEN)
    trace = record_trace(where, sums, passed_rows=0)
    return _expanded(trace, range(model.layers), range(model.layers))


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("compute", COMPUTES)
def test_put_together_as_traced_whole(compute: str, checkpointing: ActivationCheckpointing) -> None:
    model = model_of(checkpointing)
    assembled = trace_micro_batch(
        TraceRequest(model, COMPUTES[compute], micro_batch=5, seq_len=SEQ_LEN)
    )
    whole = whole_trace(model, COMPUTES[compute], 5)
    assert levels(assembled) == levels(whole)


PARTLY = {
    **{"every=2": 8, "every=3": 10, "keep=attention": 5, "keep=qkv,mlp-up": 5},
    "full:1/keep=attention:7/selective:1/none:2": 11,
    "none:1/full:1/none:2/keep=proj:1/full:2/none:1": 8,
}
"""Ways to checkpoint, each with the least layers of which some are put together; in the last, all
blocks differ."""


# Each way to checkpoint under two ways to compute, and all of these.
@pytest.mark.parametrize(
    ("compute", "checkpointing"),
    [
        ([*COMPUTES][(row + more) % len(COMPUTES)], checkpointing)
        for row, checkpointing in enumerate(PARTLY)
        for more in (0, 2)
    ],
)
def test_blocks_that_checkpoint_differently_too(compute: str, checkpointing: str) -> None:
    model = model_of("none", **QWEN3 if compute == "gpu" else {})
    layers = PARTLY[checkpointing]
    model = replace(model, layers=layers, activation_checkpointing=checkpointing)
    assembled = trace_micro_batch(
        TraceRequest(model, COMPUTES[compute], micro_batch=2, seq_len=SEQ_LEN)
    )
    assert levels(assembled) == levels(whole_trace(model, COMPUTES[compute], 2))


def test_few_blocks_are_traced_of_many() -> None:
    def traced(checkpointing: str, layers: int = 96) -> int:
        return len(_representative_blocks(parse(checkpointing).blocks(layers))[0])

    *some, all_differ = PARTLY
    assert all(traced(one, PARTLY[one]) < PARTLY[one] for one in some)
    assert traced(all_differ, PARTLY[all_differ]) == PARTLY[all_differ]
    assert traced("full") == 3
    assert traced("every=2") == 6
    assert traced("full:60/keep=attention:20/none:16") <= 13


@pytest.mark.parametrize("change", [{"tied": False}, {"attention": "eager"}, {"window": 8}])
@pytest.mark.parametrize("micro_batch", [1, 7])
def test_other_models_too(change: dict[str, object], micro_batch: int) -> None:
    model = model_of("none", **change)
    assembled = trace_micro_batch(
        TraceRequest(model, Compute(), micro_batch=micro_batch, seq_len=SEQ_LEN)
    )
    assert levels(assembled) == levels(whole_trace(model, Compute(), micro_batch))


@pytest.mark.parametrize("compute", COMPUTES)
def test_blocks_with_rotary_positions_too(compute: str) -> None:
    model = model_of("selective", **QWEN3)
    assembled = trace_micro_batch(
        TraceRequest(model, COMPUTES[compute], micro_batch=3, seq_len=SEQ_LEN)
    )
    assert levels(assembled) == levels(whole_trace(model, COMPUTES[compute], 3))


def by_pairs(
    computes: Sequence[str], checkpointings: Sequence[str], targets: Sequence[tuple[str, ...]]
) -> list[tuple[str, str, tuple[str, ...]]]:
    """Return every pair of a way to compute and to checkpoint; targets meet each value of both."""
    return [
        (compute, checkpointing, targets[(row + column) % len(targets)])
        for row, compute in enumerate(computes)
        for column, checkpointing in enumerate(checkpointings)
    ]


@pytest.mark.parametrize(
    ("compute", "checkpointing", "targets"),
    by_pairs(
        ("fp32", "stage3", "gpu", "frozen"),
        ("none", "selective", "full"),
        (("mlp",), ("qkv", "proj", "mlp")),
    ),
)
def test_blocks_with_adapters_too(
    compute: str, checkpointing: ActivationCheckpointing, targets: tuple[LoraTarget, ...]
) -> None:
    """The first block differs: its input has no gradient."""
    how = COMPUTES.get(compute, Compute(autocast=True, frozen_dtype=torch.bfloat16))
    model = model_of(checkpointing, **QWEN3, lora=Lora(rank=4, alpha=8.0, targets=targets))
    assembled = trace_micro_batch(TraceRequest(model, how, micro_batch=3, seq_len=SEQ_LEN))
    assert levels(assembled) == levels(whole_trace(model, how, 3))
    trained = [p.name for p in parameters_of(model) if p.trained]
    backward = itertools.chain.from_iterable(events for _, events in assembled.backward)
    assert sorted(e.parameter for e in backward if isinstance(e, Gradient)) == sorted(trained)


def test_modules_are_marked_where_they_run() -> None:
    """All of a block's in its own segment, whichever block stands for it."""
    traced = trace_micro_batch(
        TraceRequest(model_of("none"), COMPUTES["stage3"], micro_batch=2, seq_len=SEQ_LEN)
    )
    for place, events in (*traced.forward, *traced.backward):
        modules = [event for event in events if isinstance(event, Module)]
        inside = [m.name for m in modules if m.name.startswith("blocks.")]
        if not place.part.startswith("block"):
            assert not inside
            continue
        own = f"blocks.{place.layer}"
        assert all(name == own or name.startswith(f"{own}.") for name in inside)
        assert [(m.name, m.entering) for m in (modules[0], modules[-1])] == [
            (own, True),
            (own, False),
        ]


@pytest.mark.parametrize(
    ("compute", "checkpointing", "targets"),
    [
        (("stage3", "frozen")[row % 2], checkpointing, (("mlp",), ("qkv", "proj"))[row // 2 % 2])
        for row, checkpointing in enumerate(PARTLY)
    ],
)
def test_blocks_with_adapters_that_checkpoint_differently_too(
    compute: str, checkpointing: str, targets: tuple[LoraTarget, ...]
) -> None:
    how = COMPUTES.get(compute, Compute(autocast=True, frozen_dtype=torch.bfloat16))
    model = model_of("none", **QWEN3, lora=Lora(rank=4, alpha=8.0, targets=targets))
    layers = PARTLY[checkpointing]
    model = replace(model, layers=layers, activation_checkpointing=checkpointing)
    assembled = trace_micro_batch(TraceRequest(model, how, micro_batch=2, seq_len=SEQ_LEN))
    assert levels(assembled) == levels(whole_trace(model, how, 2))


@pytest.mark.parametrize(("checkpointing", "layers"), [("full", 5), ("every=2", 8)])
@pytest.mark.parametrize("lora", [None, Lora(rank=4, alpha=8.0)])
def test_modules_are_those_of_their_own_blocks(
    checkpointing: str, layers: int, lora: Lora | None
) -> None:
    def entered(traced: MicroBatch) -> list[Module]:
        segments = (*traced.forward, *traced.backward)
        return [e for _, events in segments for e in events if isinstance(e, Module)]

    model = model_of("none", lora=lora)
    model = replace(model, layers=layers, activation_checkpointing=checkpointing)
    assembled = trace_micro_batch(
        TraceRequest(model, COMPUTES["stage3"], micro_batch=2, seq_len=SEQ_LEN)
    )
    assert entered(assembled) == entered(whole_trace(model, COMPUTES["stage3"], 2))


def saved_bytes(compute: Compute, **changes: Any) -> int:
    """Return the bytes that the forward of 5 blocks leaves for the backward."""
    model = model_of("none", loss_chunk=0, **changes)
    traced = trace_micro_batch(TraceRequest(model, compute, micro_batch=4, seq_len=SEQ_LEN))
    return levels(replace(traced, backward=[]))[-1][1]


def test_in_fp8_no_cast_of_a_weight_is_kept() -> None:
    """torchao's linears keep weights as they are, and cast them again in the backward; autocast
    keeps its copies of them. Nothing else of the block differs."""
    bf16 = Compute(device_type="cuda", autocast=True)
    shapes = model_of("none").linear_shapes
    casts = 2 * 5 * sum(inner * outer for inner, outer in shapes)
    assert saved_bytes(bf16) - saved_bytes(replace(bf16, fp8=True)) == casts


def test_on_a_gpu_a_root_mean_square_norm_saves_one_number_a_row() -> None:
    """LayerNorm saves two, and the input, as it does."""
    gpu = COMPUTES["gpu"]
    norms, rows = 2 * 5 + 1, 4 * SEQ_LEN
    difference = saved_bytes(gpu) - saved_bytes(gpu, norm="rms")
    assert difference == 4 * norms * rows
    assert saved_bytes(Compute()) == saved_bytes(gpu)
    assert saved_bytes(Compute(), norm="rms") > saved_bytes(gpu, norm="rms") + 4 * 48 * rows


def test_on_a_gpu_what_norms_save_of_rows_is_in_fp32() -> None:
    half, gpu = COMPUTES["bf16"], Compute(device_type="cuda", params_dtype=torch.bfloat16)
    norms, rows = 2 * 5 + 1, 4 * SEQ_LEN
    unpadded: dict[str, Any] = {"heads": 6}
    off = saved_bytes(gpu, **unpadded) - saved_bytes(half, **unpadded)
    assert off == (4 - 2) * 2 * norms * rows


def test_a_norms_gradients_are_allocated_in_the_order_that_a_trace_sees() -> None:
    """That of what is returned: what a caching allocator finds free depends on it."""
    made: list[int] = []

    class Notes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            out = func(*args, **(kw or {}))
            made.append(out.untyped_storage()._cdata)
            return out

    x, weight = torch.zeros(4, 8), torch.zeros(8)
    for centered in (False, True):
        made.clear()
        with Notes():
            found = fused._norm_gradients(x, x, weight, x, x, centered, None)
        assert made == [tensor.untyped_storage()._cdata for tensor in found]


def test_on_a_gpu_key_heads_are_repeated_where_no_kernel_takes_fewer() -> None:
    gpu, half = COMPUTES["gpu"], Compute(device_type="cuda", params_dtype=torch.bfloat16)
    repeated = 5 * 2 * 4 * SEQ_LEN * 48  # elements of keys and values, as wide as the queries
    shared: dict[str, Any] = {"heads": 6, "kv_heads": 2}
    assert saved_bytes(gpu, **shared) == saved_bytes(Compute(), **shared) + 4 * repeated
    of_norms = (4 - 2) * 2 * (2 * 5 + 1) * 4 * SEQ_LEN  # as in the test above
    as_on_cpu = of_norms + saved_bytes(Compute(params_dtype=torch.bfloat16), **shared)
    assert saved_bytes(half, **shared) == as_on_cpu
    # The mask of a window is nothing that a kernel takes with fewer key heads; flex needs no mask.
    mask = SEQ_LEN * SEQ_LEN
    masked = saved_bytes(half, **shared, attention="sdpa", window=8)
    assert as_on_cpu + 2 * repeated <= masked - mask
    flex: dict[str, Any] = {**shared, "attention": "flex", "window": 8}
    assert saved_bytes(half, **flex) == as_on_cpu
    assert saved_bytes(replace(half, documents=True), **flex) == as_on_cpu


_ON_GPUS_ONLY: list[dict[str, Any]] = [
    *({"sdpa_backend": "efficient"}, {"sdpa_backend": "cudnn"}),
    *({"attention": "flash"}, {"attention": "flex"}, {"attention": "flash", "window": 8}),
]


@pytest.mark.parametrize("change", _ON_GPUS_ONLY)
def test_attention_that_a_cpu_does_not_have_is_traced(change: dict[str, Any]) -> None:
    assert saved_bytes(COMPUTES["gpu"], **change) == saved_bytes(COMPUTES["gpu"])


def born_in_forward(**changes: Any) -> set[int]:
    """Sizes of what a GPU's forward makes for one sequence; fp32, dropout 0.1."""
    model = model_of("none", dropout=0.1, **changes)
    traced = trace_micro_batch(TraceRequest(model, COMPUTES["gpu"], micro_batch=1, seq_len=SEQ_LEN))
    events = [event for _, segment in traced.forward for event in segment]
    return {event.size_bytes for event in events if isinstance(event, Allocated)}


@pytest.mark.parametrize("change", [{}, {"sdpa_backend": "flash"}, {"attention": "flash"}])
def test_on_a_gpu_fused_attention_drops_weights_without_a_mask_of_them(
    change: dict[str, Any],
) -> None:
    scores = 4 * SEQ_LEN * SEQ_LEN  # of all heads
    assert not {scores, 4 * scores} & born_in_forward(**change)


def test_on_a_gpu_the_composed_attention_keeps_what_it_drops() -> None:
    scores = 4 * SEQ_LEN * SEQ_LEN
    assert {scores, 4 * scores} & born_in_forward(sdpa_backend="math")


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_on_a_gpu_dropout_keeps_one_byte_per_element(precision: torch.dtype) -> None:
    compute = Compute(device_type="cuda", params_dtype=precision)
    rows = 4 * SEQ_LEN
    # The embedding, and of 5 blocks both projections into the residual stream.
    mask = rows * 48 * (1 + 2 * 5)
    assert saved_bytes(compute, dropout=0.1) == saved_bytes(compute) + mask
    # Attention weights of all heads too, where they are composed.
    eager = saved_bytes(compute, attention="eager")
    # In fp32 softmax's own output is what is dropped, and backward needs both.
    weights = 5 if precision is torch.float32 else 1
    scores = 5 * 4 * 4 * SEQ_LEN * SEQ_LEN
    dropped = saved_bytes(compute, attention="eager", dropout=0.1)
    assert dropped == eager + mask + weights * scores


def test_a_loss_in_chunks_is_traced_at_the_batch_itself() -> None:
    model = model_of("none", loss_chunk=100)  # 5 x 64 tokens: three chunks and a shorter one
    assembled = trace_micro_batch(TraceRequest(model, Compute(), micro_batch=5, seq_len=SEQ_LEN))
    assert levels(assembled) == levels(whole_trace(model, Compute(), 5))
    plain = trace_micro_batch(
        TraceRequest(model_of("none"), Compute(), micro_batch=5, seq_len=SEQ_LEN)
    )
    assert levels(assembled) != levels(plain)


@pytest.mark.parametrize(
    ("compute", "mlp_tile", "checkpointing"),
    [
        *(("autocast", 100, "none"), ("stage3", 100, "selective"), ("gpu", 320, "full")),
        *(("gpu", 110, "selective"), ("gpu", 30, "none"), ("stage3", 30, "full")),
    ],
)
def test_few_tiles_are_traced_of_many(
    compute: str, mlp_tile: int, checkpointing: ActivationCheckpointing
) -> None:
    model = model_of(checkpointing, mlp_tile=mlp_tile, layers=4)
    assembled = trace_micro_batch(
        TraceRequest(model, COMPUTES[compute], micro_batch=5, seq_len=SEQ_LEN)
    )
    assert levels(assembled) == levels(whole_trace(model, COMPUTES[compute], 5))


@pytest.mark.parametrize("compute", COMPUTES)
def test_each_parameter_gets_one_gradient_of_its_size(compute: str) -> None:
    model = model_of("full", tied=False, loss_chunk=0)
    traced = trace_micro_batch(
        TraceRequest(model, COMPUTES[compute], micro_batch=4, seq_len=SEQ_LEN)
    )
    sizes, gradients = {}, {}
    for _, events in traced.backward:
        for event in events:
            if isinstance(event, Allocated):
                sizes[event.key] = event.size_bytes
            elif isinstance(event, Gradient):
                assert event.parameter not in gradients
                gradients[event.parameter] = sizes[event.key]
    with torch.device("meta"):
        element = COMPUTES[compute].params_dtype.itemsize
        expected = {n: element * p.numel() for n, p in GPT(model).named_parameters()}
    assert gradients == expected


class _FreshGradient(torch.autograd.Function):
    """Gives back a gradient of its own, which may be a view of a larger one."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: int, note: Callable[[Tensor], None]) -> Tensor:
        ctx.rows, ctx.note = rows, note
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gradient = torch.zeros(ctx.rows, 8)
        ctx.note(gradient)
        return (gradient if ctx.rows == 4 else gradient[:4]), None, None


@pytest.mark.parametrize(("rows", "in_place"), [(4, True), (5, False)])
def test_gradients_are_added_in_place_as_autograd_does(rows: int, in_place: bool) -> None:
    def used_twice(note: Callable[[Tensor], None]) -> Tensor:
        """[4, 8], the leaf; its two gradients have arrived."""
        weight = torch.ones(4, 8, requires_grad=True)
        terms = [_FreshGradient.apply(weight, rows, note) for _ in range(2)]
        (terms[0] + terms[1]).backward()
        return weight

    made: list[int] = []
    gradient = used_twice(lambda tensor: made.append(tensor.data_ptr())).grad
    assert gradient is not None
    assert (gradient.data_ptr() == made[0]) == in_place

    for compute in (COMPUTES["gpu"], Compute()):  # the mode that measures a CPU's forbids it
        recorder = Recorder(compute, lambda of, sizes: 0)
        recorder.place = Place("embed_backward")
        with FakeTensorMode(), recorder:
            weight = used_twice(lambda tensor: None)
        big = [life for life in recorder.lifetimes() if life.size_bytes >= 4 * 4 * 8]
        sums = 0 if in_place and compute.device_type == "cuda" else 1
        assert len(big) == 1 + 2 + sums  # the leaf and its gradients
        assert weight.grad is not None
        recorder.gradient("weight", weight)
        birth = recorder.gradients[0][1]
        kept = [life for life in big if life.allocation == birth]
        assert [life.end for life in kept] == [None]


@pytest.mark.parametrize(
    ("rows", "columns", "size_bytes"),
    [
        (1024, 192, 1_572_864),
        (1024, 768, 6_291_456),
        (217_600, 768, 138_412_032),
        (1000, 768, 0),  # a block for each column is enough
    ],
)
def test_partial_sums_take_what_the_real_allocator_gave_them(
    rows: int, columns: int, size_bytes: int
) -> None:
    """Sums of bf16 over an H200's 132 x 2048 threads, in torch's own record of a run's memory on a
    GPU that computes nothing (bench/allocator.py)."""
    assert partial_sums_bytes(rows, columns, 2, resident_threads=132 * 2048) == size_bytes


def test_sums_of_more_than_a_kernel_can_index_are_halved() -> None:
    halves = partial_sums_bytes(350_000, 3072, 2, resident_threads=132 * 2048)
    assert partial_sums_bytes(700_000, 3072, 2, resident_threads=132 * 2048) == halves


def test_on_a_known_gpu_partial_sums_are_born_in_backward() -> None:
    model = model_of("none")
    sizes: list[set[int]] = []
    for threads in (0, 132 * 2048):
        compute = replace(COMPUTES["gpu"], resident_threads=threads)
        traced = trace_micro_batch(TraceRequest(model, compute, micro_batch=64, seq_len=SEQ_LEN))
        born = [e for _, events in traced.backward for e in events if isinstance(e, Allocated)]
        sizes.append({event.size_bytes for event in born})
    partial = partial_sums_bytes(64 * SEQ_LEN, 3 * 48, 4, resident_threads=132 * 2048)
    assert partial not in sizes[0]
    assert partial in sizes[1]


def test_recomputing_saves_less() -> None:
    def saved(checkpointing: ActivationCheckpointing) -> int:
        traced = trace_micro_batch(
            TraceRequest(model_of(checkpointing), Compute(), micro_batch=4, seq_len=SEQ_LEN)
        )
        return levels(replace(traced, backward=[]))[-1][1]

    assert saved("full") < saved("selective") < saved("none")
