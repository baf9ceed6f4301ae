"""Which sequences can be cut over ranks: chosen, or refused in one sentence."""

from pathlib import Path
from typing import Any

import pytest

from launcher.config.resolve import Resolved, resolve
from launcher.config.schema import AutoMicroBatch, RunConfig
from launcher.util.errors import UserError

SMALL = {"heads": 4, "d_model": 64, "seq_len": 64, "context": 64}


def resolved(ranks: int, **changes: Any) -> Resolved:
    config = RunConfig().replace(**{**SMALL, **changes})
    return resolve(config, world_size=ranks, device_type="cpu")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "method"),
    [
        (4, None, 2, "ulysses"),
        (4, None, 4, "ulysses"),
        (8, 2, 4, "ulysses"),  # each key head for two ranks
        (8, 4, 2, "ulysses"),
        (4, None, 8, "ring"),
        (4, None, 3, "ring"),
        (12, 3, 2, "ring"),  # key heads that neither divide nor are divided
    ],
)
def test_auto_is_ulysses_where_the_ranks_divide_the_heads(
    heads: int, kv_heads: int | None, ranks: int, method: str
) -> None:
    found = resolved(
        ranks, heads=heads, d_model=96, kv_heads=kv_heads, context_parallel=ranks, seq_len=48
    )
    assert found.config.sharding.context_parallel_method == method


def test_another_context_is_suggested_only_where_it_can_be_given() -> None:
    start, said = Path("start"), "than the model's context of 64: give --seq-len 64 or less"
    for model, longer in (
        ({}, ", or --context 65"),
        ({"init_from": start, "position": "rope"}, ", or --context 65"),
        ({"init_from": start}, ""),  # its positions are stored
    ):
        with pytest.raises(UserError, match=f"{said}{longer}$"):
            resolved(1, **model, seq_len=65)


def test_ranks_of_one_sequence_read_the_same() -> None:
    found = resolved(8, context_parallel=4, micro_batch=2, strategy="fsdp")
    assert (found.global_batch, found.accumulation) == (4, 1)
    assert (found.seq_len, found.local_seq_len) == (64, 16)
    assert resolved(8, context_parallel=4, micro_batch=1, global_batch=6).accumulation == 3


@pytest.mark.parametrize(
    ("ranks", "changes", "said"),
    [
        (4, {"context_parallel": 3}, "does not divide 4 ranks: use --context-parallel 1 or 2 or 4"),
        (2, {"context_parallel": 4}, "needs 4 ranks or a multiple, and this is 2"),
        (1, {"context_parallel": 2}, "needs 2 ranks or a multiple, and this is 1"),
        (2, {"context_parallel_method": "ring"}, "needs sharded sequences"),
        (
            *(8, {"context_parallel": 8, "context_parallel_method": "ulysses"}),
            "4 heads with 4 of keys do not divide: use --context-parallel-method ring",
        ),
        (2, {"context_parallel": 2, "seq_len": 63}, "use --seq-len 62"),
        (
            *(2, {"context_parallel": 2, "context_parallel_method": "ring", "seq_len": 62}),
            "cannot be divided into 4 equal shards .* use --seq-len 60",
        ),
        (2, {"context_parallel": 2, "context_parallel_method": "ring", "window": 8}, "--window 8"),
        (
            2,
            {"context_parallel": 2, "context_parallel_method": "ring", "dropout": 0.1},
            "--dropout 0.1",
        ),
        (
            *(
                2,
                {
                    "context_parallel": 2,
                    "context_parallel_method": "ring",
                    "document_attention": True,
                },
            ),
            "--document-attention does not go with ring",
        ),
        (
            *(2, {"context_parallel": 2, "context_parallel_method": "ring", "attention": "eager"}),
            "--attention eager",
        ),
        (8, {"context_parallel": 8, "window": 8}, "4 heads on 8 ranks.*divides the heads"),
        (2, {"context_parallel": 2, "sample_every": 5}, "--sample-every 5"),
        (2, {"context_parallel": 2, "micro_batch": AutoMicroBatch()}, "--micro-batch auto"),
        (
            *(4, {"context_parallel": 2, "micro_batch": 2, "global_batch": 6}),
            "micro-batch 2 x 2 ranks = 4: use --micro-batch 1, or --global-batch 4",
        ),
    ],
)
def test_refused_in_one_sentence(ranks: int, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        resolved(ranks, **changes)
    assert "\n" not in str(refused.value)


def test_a_ring_on_gpus_takes_some_sizes_of_heads() -> None:
    def on_gpus(head_dim: int, precision: str = "bf16") -> Resolved:
        cut = {"context_parallel": 2, "context_parallel_method": "ring"}
        changes = {**SMALL, **cut, "head_dim": head_dim, "precision": precision}
        return resolve(RunConfig().replace(**changes), world_size=2, device_type="cuda")

    assert on_gpus(64).model.head_size == 64
    assert on_gpus(20, "fp32").model.head_size == 20
    for size in (20, 264):
        with pytest.raises(UserError, match=f"in steps of 8 in bf16, not {size}: give another"):
            on_gpus(size)
