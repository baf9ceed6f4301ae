"""What is put together from short traces is what a full trace of the same model says."""

from dataclasses import replace

import pytest
import torch

from launcher.memory.trace import _deepened, trace_micro_batch
from launcher.memory.trace_events import Born, Compute, Freed, Gradient, MicroBatch
from launcher.memory.trace_record import record_trace
from launcher.model.config import ActivationCheckpointing, ModelConfig, named
from launcher.model.gpt import GPT

COMPUTES = {
    "fp32": Compute(),
    "autocast": Compute(autocast=True),
    "bf16": Compute(params_dtype=torch.bfloat16),
    "stage3": Compute(stage3=True),
}
SEQ_LEN = 64


def model_of(checkpointing: ActivationCheckpointing, **changes: object) -> ModelConfig:
    small = named("nano", d_model=48, heads=4, vocab_size=300, context=SEQ_LEN, layers=5)
    return replace(small, activation_checkpointing=checkpointing, **changes)  # type: ignore[arg-type]


def whole_trace(model: ModelConfig, compute: Compute, micro_batch: int) -> MicroBatch:
    """Every block and the batch itself traced, nothing put together."""
    return _deepened(record_trace(model, compute, micro_batch, SEQ_LEN), model.layers)


def levels(micro_batch: MicroBatch) -> list[tuple[int, int]]:
    """Live bytes in each segment: the highest, and those at its end.

    Not after each event: autocast drops its casts in the order of a hash map.
    """
    sizes: dict[object, int] = {}
    level, found = 0, []
    for _, events in (*micro_batch.forward, *micro_batch.backward):
        highest = level
        for event in events:
            if isinstance(event, Born):
                sizes[event.key] = event.size_bytes
                level += event.size_bytes
            elif isinstance(event, Freed):
                level -= sizes.pop(event.key)
            highest = max(highest, level)
        found.append((highest, level))
    return found


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("compute", COMPUTES)
def test_put_together_as_traced_whole(compute: str, checkpointing: ActivationCheckpointing) -> None:
    model = model_of(checkpointing)
    assembled = trace_micro_batch(model, COMPUTES[compute], micro_batch=5, seq_len=SEQ_LEN)
    whole = whole_trace(model, COMPUTES[compute], 5)
    assert levels(assembled) == levels(whole)


@pytest.mark.parametrize("change", [{"tied": False}, {"attention": "eager"}, {"window": 8}])
@pytest.mark.parametrize("micro_batch", [1, 7])
def test_other_models_too(change: dict[str, object], micro_batch: int) -> None:
    model = model_of("none", **change)
    assembled = trace_micro_batch(model, Compute(), micro_batch=micro_batch, seq_len=SEQ_LEN)
    assert levels(assembled) == levels(whole_trace(model, Compute(), micro_batch))


def test_a_loss_in_chunks_is_traced_at_the_batch_itself() -> None:
    model = model_of("none", loss_chunk=100)  # 5 x 64 tokens: three chunks and a shorter one
    assembled = trace_micro_batch(model, Compute(), micro_batch=5, seq_len=SEQ_LEN)
    assert levels(assembled) == levels(whole_trace(model, Compute(), 5))
    plain = trace_micro_batch(model_of("none"), Compute(), micro_batch=5, seq_len=SEQ_LEN)
    assert levels(assembled) != levels(plain)


@pytest.mark.parametrize("compute", COMPUTES)
def test_each_parameter_gets_one_gradient_of_its_size(compute: str) -> None:
    model = model_of("full", tied=False)
    traced = trace_micro_batch(model, COMPUTES[compute], micro_batch=4, seq_len=SEQ_LEN)
    sizes, gradients = {}, {}
    for _, events in traced.backward:
        for event in events:
            if isinstance(event, Born):
                sizes[event.key] = event.size_bytes
            elif isinstance(event, Gradient):
                assert event.parameter not in gradients
                gradients[event.parameter] = sizes[event.key]
    with torch.device("meta"):
        element = COMPUTES[compute].params_dtype.itemsize
        expected = {n: element * p.numel() for n, p in GPT(model).named_parameters()}
    assert gradients == expected


def test_recomputing_saves_less() -> None:
    def saved(checkpointing: ActivationCheckpointing) -> int:
        traced = trace_micro_batch(
            model_of(checkpointing), Compute(), micro_batch=4, seq_len=SEQ_LEN
        )
        return levels(replace(traced, backward=[]))[-1][1]

    assert saved("full") < saved("selective") < saved("none")
