"""`--cuda-graphs`: only what was tested is recorded, and by itself only small micro-batches."""

from typing import Any

import pytest

from launcher.config.resolve import Resolved, resolve
from launcher.config.schema import RunConfig
from launcher.util.errors import UserError

SMALL: dict[str, Any] = {"model": "seed-134m", "micro_batch": 8, "strategy": "single"}


def resolved(device: str = "cuda", **changes: Any) -> Resolved:
    config = RunConfig().replace(**SMALL | changes)
    # Its libraries may be missing here.
    return resolve(config, world_size=1, device_type=device, elsewhere=True)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "bf16-pure"])
def test_a_small_micro_batch_is_recorded_on_a_gpu(precision: str) -> None:
    run = resolved(precision=precision, betas=(0.9, 0.99))
    assert run.config.loop.cuda_graphs is True
    assert run.compile_lines()[-1].startswith("CUDA graphs: on (auto: ")


UNTESTED: list[tuple[dict[str, Any], str]] = [
    ({"strategy": "ddp"}, "--strategy ddp"),
    ({"strategy": "zero", "zero": 1}, "--strategy zero"),
    ({"precision": "fp16"}, "--precision fp16"),
    ({"precision": "fp8"}, "--precision fp8"),
    ({"activation_checkpointing": "full"}, "--activation-checkpointing full"),
    ({"attention": "flex"}, "--attention flex"),
    ({"dropout": 0.1}, "--dropout 0.1"),
    ({"lora_rank": 8, "random_base": True}, "--lora-rank 8"),
    ({"document_attention": True}, "--document-attention"),
    ({"optimizer_in_backward": True, "clip": 0}, "--optimizer-in-backward"),
    ({"compile": True}, "--compile"),
    ({"memory_trace": True}, "--memory-trace"),
    ({"mlp_tile": 64}, "--mlp-tile 64"),
]


@pytest.mark.parametrize(("changes", "flags"), UNTESTED)
def test_what_was_not_tested_is_not_recorded(changes: dict[str, Any], flags: str) -> None:
    assert resolved(**changes).config.loop.cuda_graphs is False
    with pytest.raises(UserError) as refused:
        resolved(**changes, cuda_graphs=True)
    assert str(refused.value) == (
        f"--cuda-graphs on was not tested with {flags}: leave one of them out"
    )


@pytest.mark.parametrize(
    "changes", [{"micro_batch": 125}, {"model": "gpt2-large", "micro_batch": 1, "seq_len": 32}]
)
def test_a_large_one_is_recorded_where_it_is_asked_for(changes: dict[str, Any]) -> None:
    assert resolved(**changes).config.loop.cuda_graphs is False
    run = resolved(**changes, cuda_graphs=True)
    assert run.config.loop.cuda_graphs is True
    assert run.graphs_reason == ""


def test_a_cpu_records_nothing() -> None:
    run = resolved("cpu")
    assert run.config.loop.cuda_graphs is False
    assert run.compile_lines() == []
    with pytest.raises(UserError, match="needs a GPU"):
        resolved("cpu", cuda_graphs=True)
