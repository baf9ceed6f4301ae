"""Which matrices can be cut over ranks: chosen, or refused in one sentence."""

from typing import Any

import pytest

from launcher.config.resolve import Resolved, resolve
from launcher.config.schema import AutoMicroBatch, RunConfig
from launcher.parallel.mesh import Mesh, across_nodes
from launcher.util.errors import UserError

SMALL = {"heads": 4, "d_model": 64, "seq_len": 64, "context": 64, "tensor_parallel": 2}


def resolved(ranks: int, **changes: Any) -> Resolved:
    config = RunConfig().replace(**{**SMALL, **changes})
    return resolve(config, world_size=ranks, device_type="cpu")


def test_ranks_that_share_matrices_read_the_same() -> None:
    found = resolved(8, context_parallel=2, micro_batch=2, strategy="fsdp")
    assert (found.global_batch, found.accumulation) == (4, 1)
    assert resolved(2).config.sharding.strategy == "single"
    assert resolved(4).config.sharding.strategy == "ddp"


def test_ranks_in_the_mesh() -> None:
    sharding = resolved(8, context_parallel=2).config.sharding
    places = [Mesh.at(rank, 8, sharding) for rank in range(8)]
    found = [
        (
            m.data_rank,
            m.model.context and m.model.context.index,
            m.model.tensor and m.model.tensor.index,
        )
        for m in places
    ]
    assert found == [(d, s, t) for d in range(2) for s in range(2) for t in range(2)]
    assert {m.shape for m in places} == {(2, 2, 2)}


def test_ulysses_divides_the_heads_that_a_rank_has_left() -> None:
    method = resolved(4, context_parallel=2).config.sharding.context_parallel_method
    assert method == "ulysses"
    method = resolved(8, context_parallel=4).config.sharding.context_parallel_method
    assert method == "ring"


def test_ranks_on_several_nodes_are_told() -> None:
    sharding = resolved(16, tensor_parallel=4, context_parallel=2).config.sharding
    assert across_nodes(sharding, 8) == []
    assert across_nodes(sharding, 4) == [
        "the 2 ranks of a context-parallel group are on 2 nodes, and communicate in every block: "
        "--context-parallel 1 stays within one"
    ]
    assert "--tensor-parallel 2 stays within one" in across_nodes(sharding, 2)[0]


@pytest.mark.parametrize(
    ("ranks", "changes", "said"),
    [
        (1, {}, "--tensor-parallel 2 needs 2 ranks or a multiple, and this is 1"),
        (3, {}, "does not divide 3 ranks: use --tensor-parallel 1 or 3"),
        (2, {"context_parallel": 2}, "with --context-parallel 2 needs 4 ranks or a multiple"),
        (6, {"context_parallel": 2}, "does not divide 6 ranks: use --tensor-parallel 1 or 3"),
        (8, {"tensor_parallel": 8}, "4 heads do not divide: use --tensor-parallel 4"),
        (4, {"tensor_parallel": 4, "kv_heads": 2}, "4 heads with 2 of keys .* use --.* 2"),
        (3, {"tensor_parallel": 3, "heads": 4}, "4 heads do not divide: use --tensor-parallel 1"),
        (2, {"d_ff": 65}, "the MLP's width of 65: use --d-ff 66"),
        (2, {"seq_len": 63, "micro_batch": 1}, "63 tokens .* use --micro-batch 2"),
        (2, {"optimizer": "adafactor"}, "--optimizer adafactor updates whole matrices"),
        (2, {"optimizer": "muon"}, "--optimizer muon updates whole matrices"),
        (2, {"optimizer": "apollo"}, "--optimizer apollo updates whole matrices"),
        (2, {"precision": "fp8"}, "use --precision bf16"),
        (2, {"sample_every": 5}, "--sample-every 5"),
        (2, {"micro_batch": AutoMicroBatch()}, "--micro-batch auto measures one rank alone"),
        (4, {"strategy": "single"}, "--strategy single runs in one process"),
        (
            *(4, {"strategy": "fsdp", "replicate": 4}),
            r"--replicate 4 does not divide 2 ranks \(4 with --tensor-parallel 2\): use one of",
        ),
        (
            *(4, {"strategy": "zero", "zero": 3, "offload_optimizer": "nvme", "nvme_path": "/tmp"}),
            "--offload-optimizer nvme is not proven with --tensor-parallel 2",
        ),
        (
            *(8, {"context_parallel": 4, "context_parallel_method": "ulysses"}),
            "2 heads with 2 of keys do not divide: use --context-parallel-method ring",
        ),
        (4, {"micro_batch": 2, "global_batch": 6}, "micro-batch 2 x 2 ranks = 4"),
        (2, {"tensor_parallel": 0}, "0"),
    ],
)
def test_one_sentence(ranks: int, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        resolved(ranks, **changes)
    assert "\n" not in str(refused.value)
