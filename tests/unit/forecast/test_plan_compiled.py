"""Compiled blocks in a plan: what they keep, hold and tune, without compiling a kernel."""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from test_plan_predict import predicted, resolved_of
from test_plan_trace import QWEN3, SEQ_LEN, model_of, whole_trace
from tiny_architectures import ARCHITECTURES
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves
from trace_levels import levels

from launcher.config.compile_choice import KEPT_SHARE
from launcher.forecast.followed import TUNING_BYTES
from launcher.forecast.predict import predict
from launcher.forecast.trace import compiled as compiled_trace
from launcher.forecast.trace.blocks import pass_work, trace_micro_batch
from launcher.forecast.trace.compiled import _Graph
from launcher.forecast.trace.counting import WorkCounter
from launcher.forecast.trace.events import Allocated, Compute, Gradient, TraceRequest, Tuned
from launcher.forecast.trace.work import SegmentWork
from launcher.measure.hardware import gpu_named
from launcher.measure.live_trace import LiveTrace
from launcher.model.build import initial_value, new_decoder
from launcher.model.config import ActivationCheckpointing, ModelConfig
from launcher.model.foreign.reading import foreign_config
from launcher.model.gpt import GPT, SharedInputs
from launcher.model.lora_config import Lora
from launcher.model.parts import parts_of
from launcher.parallel.mesh import ContextRank, ModelParallelRank, TensorRank
from launcher.strategies.build_inputs import materialize_whole
from launcher.strategies.compiled import compile_blocks
from launcher.util.sizes import MIB

CPU = Compute(compiled=True)
GPU = Compute(device_type="cuda", autocast=True, compiled=True)
MICRO_BATCH = 4


def kept_by_compiled_code(decoder: nn.Module, kept_share: float = 1.0) -> int:
    """Bytes that the blocks of a real model, really compiled, keep for backward: no parameters,
    and nothing that was there before the first block."""
    compile_blocks(decoder, kept_share=kept_share)
    before = {parameter.untyped_storage()._cdata for parameter in decoder.parameters()}

    def note(_: Any, inputs: Any, named: Any) -> None:
        shared = [i.rotation if isinstance(i, SharedInputs) else i for i in inputs]
        given = [t for t in tree_leaves((shared, named)) if isinstance(t, Tensor)]
        before.update(tensor.untyped_storage()._cdata for tensor in given)

    first = parts_of(decoder).blocks[0]
    handle = first.register_forward_pre_hook(note, with_kwargs=True)
    tokens = torch.zeros(MICRO_BATCH, SEQ_LEN, dtype=torch.int64)
    loss = decoder(tokens, tokens)
    handle.remove()
    found: dict[int, int] = {}
    nodes = [loss.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if type(node).__name__ == "CompiledFunctionBackward":
            for saved in (t for t in node.saved_tensors if isinstance(t, Tensor)):
                found[saved.untyped_storage()._cdata] = saved.untyped_storage().nbytes()
        nodes += [child for child, _ in node.next_functions if child is not None]
    return sum(size for key, size in found.items() if key not in before)


@pytest.mark.parametrize(
    ("checkpointing", "kept_share", "changes"),
    [("none", KEPT_SHARE, {}), ("none", KEPT_SHARE, QWEN3), ("selective", 1.0, QWEN3)],
    ids=["gpt2", "qwen3", "qwen3 selective"],
)
def test_what_is_kept_is_what_compiled_code_keeps(
    checkpointing: ActivationCheckpointing, kept_share: float, changes: dict[str, Any]
) -> None:
    model = model_of(checkpointing, **{**changes, "layers": 2})
    kept_bytes = kept_by_compiled_code(GPT(model), kept_share)
    assert planned_of_blocks(model, kept_share) == kept_bytes
    if kept_share < 1:
        assert kept_bytes < planned_of_blocks(model)


@pytest.mark.parametrize(("name", "checkpointing"), [("gemma2", "none"), ("phi3", "selective")])
def test_compiled_blocks_of_transformers_keep_what_is_planned_and_lose_nothing(
    name: str, checkpointing: str
) -> None:
    """One graph for both blocks."""
    model = foreign_config(ARCHITECTURES[name], activation_checkpointing=checkpointing)
    with torch.device("meta"):
        decoder = new_decoder(model)
    value = partial(initial_value, config=model, seed=0, device="cpu")
    materialize_whole(decoder, value, device=torch.device("cpu"), dtype=torch.float32)
    tokens = torch.zeros(MICRO_BATCH, SEQ_LEN, dtype=torch.int64)
    eager = decoder(tokens, tokens).item()
    planned = planned_of_blocks(model)
    counters.clear()
    assert planned == kept_by_compiled_code(decoder)
    assert decoder(tokens, tokens).item() == pytest.approx(eager, rel=1e-6)
    assert counters["stats"]["unique_graphs"] == 1


def planned_of_blocks(model: ModelConfig, kept_share: float = 1.0) -> int:
    """Bytes of activations of blocks in the trace, but for what the last norm keeps."""
    compute = replace(CPU, kept_share=kept_share)
    traced = trace_micro_batch(
        TraceRequest(model, compute, micro_batch=MICRO_BATCH, seq_len=SEQ_LEN)
    )
    kept = sum(
        event.size_bytes
        for place, events in traced.forward
        for event in events
        if place.part == "block"
        and isinstance(event, Allocated)
        and event.category == "activations"
    )
    return kept - 4 * MICRO_BATCH * SEQ_LEN * model.d_model


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_put_together_as_traced_whole(checkpointing: ActivationCheckpointing) -> None:
    model = model_of(checkpointing, layers=4)
    assembled = trace_micro_batch(TraceRequest(model, GPU, micro_batch=3, seq_len=SEQ_LEN))
    assert levels(assembled) == levels(whole_trace(model, GPU, 3))


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_in_fp8_the_compiler_keeps_smaller_inputs(checkpointing: ActivationCheckpointing) -> None:
    """None of them with checkpointing, where the same products are kept as in bf16."""
    model = model_of(checkpointing)
    kept = {
        fp8: sum(
            event.size_bytes
            for place, events in trace_micro_batch(
                TraceRequest(model, replace(GPU, fp8=fp8), micro_batch=16, seq_len=SEQ_LEN)
            ).forward
            for event in events
            if place.part == "block"
            and isinstance(event, Allocated)
            and event.category == "activations"
        )
        for fp8 in (False, True)
    }
    if checkpointing == "none":
        assert 0.4 * kept[False] < kept[True] < 0.8 * kept[False]
    else:
        assert kept[True] == pytest.approx(kept[False], rel=0.1)


def test_adapters_beside_full_checkpointing_are_traced() -> None:
    """Recomputed fused attention saves the state of a generator, whose size no graph knows."""
    model = model_of("full", layers=2, lora=Lora(rank=2, alpha=4, targets=("qkv", "proj")))
    assembled = trace_micro_batch(TraceRequest(model, GPU, micro_batch=3, seq_len=SEQ_LEN))
    assert levels(assembled) == levels(whole_trace(model, GPU, 3))


def test_recomputed_blocks_over_weights_in_4_bits_are_traced() -> None:
    """Their graphs hold a constant, the values of the codes."""
    sizes = {"d_model": 128, "heads": 4, "layers": 3}
    lora = Lora(rank=2, alpha=4, targets=("mlp",))
    model = model_of("full", **sizes, quantize_base="nf4", lora=lora)
    compute = replace(GPU, params_dtype=torch.bfloat16, frozen_dtype=torch.bfloat16)
    traced = trace_micro_batch(TraceRequest(model, compute, micro_batch=3, seq_len=SEQ_LEN))
    adapters = {"lora_a", "lora_b"}
    gradients = [
        event.parameter
        for _, events in traced.backward
        for event in events
        if isinstance(event, Gradient)
    ]
    assert len(gradients) == 2 * 2 * model.layers
    assert {name.rpartition(".")[2] for name in gradients} == adapters


def test_blocks_of_a_ring_are_traced() -> None:
    compute = replace(GPU, autocast=False, params_dtype=torch.bfloat16)
    rank = ModelParallelRank(context=ContextRank(size=2, index=1, method="ring"))
    model = model_of("full", **QWEN3, layers=80)
    traced = trace_micro_batch(
        TraceRequest(model, compute, micro_batch=1, seq_len=SEQ_LEN, rank=rank)
    )
    for events, part_of_it in ((traced.forward, "block"), (traced.backward, "block_backward")):
        layers = {place.layer for place, _ in events if place.part == part_of_it}
        assert layers == set(range(80))


def peak_of(function: Any, *inputs: Tensor) -> tuple[int, list[Any]]:
    """Highest bytes that a compiled function allocates, and what its kernels write over: bytes,
    or where they write over nothing, what they would if it were as large."""
    over: list[Any] = []
    recorder = mock.Mock(tuned=lambda wrote, unlike: over.append(wrote or unlike))
    graph = _Graph(make_fx(function)(*inputs), recorder)
    with LiveTrace() as trace:
        held = list(inputs)
        outputs = graph(held)
        assert not held
    expected = function(*inputs)
    assert [out.shape for out in outputs] == [out.shape for out in expected]
    return trace.peak_bytes(), over


def test_a_fused_kernel_writes_over_what_ends_there() -> None:
    x, size_bytes = torch.zeros(8, 8), 4 * 64

    def alone(x: Tensor) -> list[Tensor]:
        return [(x @ x).relu().add(1) @ x]

    def read_later(x: Tensor) -> list[Tensor]:
        product = x @ x
        return [product.relu().add(1) @ x, product]

    def smaller(x: Tensor) -> list[Tensor]:
        return [(x @ x).sum(1)]

    assert peak_of(smaller, x) == (size_bytes + 4 * 8, [[(4 * 8, size_bytes)]])
    assert peak_of(alone, x) == (2 * size_bytes, [size_bytes])
    assert peak_of(read_later, x) == (3 * size_bytes, [[]])


def test_a_kernel_takes_the_memory_of_what_ended_before_where_no_peak_is_higher() -> None:
    x, narrow, wide = torch.zeros(8, 8), torch.zeros(8, 1), torch.zeros(1, 64)

    def allocations(function: Any) -> int:
        graph = _Graph(make_fx(function)(x), mock.Mock())
        with mock.patch.object(compiled_trace, "_empty", side_effect=compiled_trace._empty) as made:
            graph([x])
        return made.call_count

    assert allocations(lambda x: [(((x @ x) @ x) @ x) @ x]) == 2
    # the first product's memory would be kept while the wide one is there
    assert allocations(lambda x: [((x @ x) @ narrow @ wide) @ wide.mT @ x[:1]]) == 4


def work_of_graph(function: Any, *inputs: Tensor) -> SegmentWork:
    """Work of a compiled function's kernels."""
    counter = WorkCounter()
    _Graph(make_fx(function)(*inputs), mock.Mock()).count(counter)
    return counter.here


def test_a_fused_kernel_moves_what_it_reads_and_writes() -> None:
    x, size_bytes = torch.zeros(8, 8), 4 * 64

    def chain(x: Tensor) -> list[Tensor]:
        return [(x @ x).relu().add(x).mul(x) @ x]

    work = work_of_graph(chain, x)
    assert work.products.total() == 2
    assert work.kernels == work.operators == 3
    assert sorted(work.fused_bytes.elements()) == 3 * [size_bytes]

    def two_results(x: Tensor) -> list[Tensor]:
        product = x @ x
        one, other = product.relu(), product.exp()
        return [one @ x, other @ x]

    # One kernel that reads the product once.
    assert sorted(work_of_graph(two_results, x).fused_bytes.elements()) == 3 * [size_bytes]

    def some_columns(x: Tensor) -> list[Tensor]:
        return [(x @ x)[:, :2].relu() @ x[:2]]

    assert sorted(work_of_graph(some_columns, x).fused_bytes.elements()) == 2 * [size_bytes // 4]


def test_a_kernel_that_is_no_operator_of_torch_moves_its_bytes() -> None:
    """As a kernel of Triton, which a graph calls by way of a function."""
    graph, value = torch.fx.Graph(), torch.zeros(8, 8)
    x = graph.placeholder("x")
    result = graph.call_function(torch.special.entr, (x,))
    graph.output((result,))
    for node in (x, result):
        node.meta["val"] = value
    counter = WorkCounter()
    _Graph(torch.fx.GraphModule(nn.Module(), graph), mock.Mock()).count(counter)
    assert counter.here.kernels == 1
    assert sorted(counter.here.fused_bytes.elements()) == 2 * [4 * 64]


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_blocks_multiply_and_send_what_others_do(
    checkpointing: ActivationCheckpointing, ranks: int
) -> None:
    """And move fewer bytes. Rows that both passes multiply are gathered once: torch keeps what a
    collective has brought, and finds that it would be brought again."""
    tensor = None if ranks == 1 else TensorRank(size=ranks, index=1)
    rank, model = ModelParallelRank(tensor=tensor), model_of(checkpointing, **QWEN3)
    totals = []
    for compute in (GPU, replace(GPU, compiled=False)):
        passes = pass_work(TraceRequest(model, compute, micro_batch=3, seq_len=SEQ_LEN, rank=rank))
        totals.append(passes[0].plus(passes[1]))
    compiled, eager = totals
    assert compiled.matmul_flops == eager.matmul_flops
    assert compiled.attention_flops == eager.attention_flops
    pieces: list[Counter[str]] = [Counter(), Counter()]
    for found, work in zip(pieces, totals, strict=True):
        for (kind, _), times in work.sent.items():
            found[kind] += int(times)
    kept = Counter({"all_gather": 2 * model.layers}) if ranks > 1 else Counter[str]()
    assert pieces[0] + kept == pieces[1]
    moved = eager.elementwise_bytes + eager.copied_bytes
    assert compiled.fused_bytes + compiled.elementwise_bytes + compiled.copied_bytes < 0.8 * moved
    assert compiled.kernels < eager.kernels
    assert eager.fused_bytes == 0


def test_what_is_between_two_kernels_is_not_in_memory() -> None:
    x, size_bytes = torch.zeros(8, 8), 4 * 64

    def chain(x: Tensor) -> list[Tensor]:
        return [x.exp().sin().cos().t().reshape(4, 16).sum(1).sigmoid(), x + 1]

    assert peak_of(chain, x) == (size_bytes + 4 * 4, [[], []])


def test_on_a_gpu_the_first_step_tunes() -> None:
    flags: dict[str, Any] = {"precision": "bf16", "micro_batch": 4, "optimizer": "sgd"}
    eager, compiled = (predicted(1, "cuda", **flags, compile=value) for value in (False, True))
    for phase in ("forward", "backward"):
        steady = compiled.peaks["steady", phase]
        assert steady < 2 * eager.peaks["steady", phase] < TUNING_BYTES
        assert 0 <= compiled.peaks["first_step", phase] - TUNING_BYTES < steady
    assert max(predicted(1, **flags, compile=True).peaks.values()) < TUNING_BYTES


def test_tuning_takes_the_l2_cache_of_the_gpu() -> None:
    flags: dict[str, Any] = {"precision": "bf16", "micro_batch": 4, "compile": True}
    resolved = resolved_of(1, device_type="cuda", **flags)
    small, large = (
        predict(
            resolved,
            gpu=replace(gpu_named("H100"), l2_mib=l2_mib),
        )
        for l2_mib in (40, 60)
    )
    for phase in ("forward", "backward"):
        more_bytes = large.peaks["first_step", phase] - small.peaks["first_step", phase]
        assert more_bytes == 20 * MIB
        assert large.peaks["steady", phase] == small.peaks["steady", phase]


def test_attention_takes_in_compiled_blocks_what_it_takes_in_others() -> None:
    model = model_of("none", layers=2)
    of_rows = 4 * MICRO_BATCH * SEQ_LEN * model.heads  # a number for each query, in fp32
    for compiled in (False, True):
        compute = replace(GPU, compiled=compiled)
        traced = trace_micro_batch(
            TraceRequest(model, compute, micro_batch=MICRO_BATCH, seq_len=SEQ_LEN)
        )
        taken = [
            event.size_bytes
            for place, events in traced.backward
            for event in events
            if place.part == "block_backward" and isinstance(event, Allocated)
        ]
        assert taken.count(of_rows) == model.layers


def test_only_the_first_block_of_each_pass_tunes() -> None:
    traced = trace_micro_batch(TraceRequest(model_of("none"), GPU, micro_batch=3, seq_len=SEQ_LEN))
    where = [
        (place.part, place.layer)
        for place, events in (*traced.forward, *traced.backward)
        if any(isinstance(event, Tuned) for event in events)
    ]
    assert where == [("block", 0), ("block_backward", 4)]
