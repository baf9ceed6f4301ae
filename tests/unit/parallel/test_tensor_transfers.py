"""What the planner says that ranks of a matrix send, held against what their decoder sends."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from tiny_architectures import ARCHITECTURES

from launcher.config.resolve import Resolved, resolve
from launcher.config.schema import RunConfig
from launcher.forecast.dimensions import tensor_transfers
from launcher.parallel.groups import TensorGroup
from launcher.parallel.mesh import TensorRank
from launcher.parallel.model_parallel import ModelParallel
from launcher.strategies import strategy_of

SMALL: dict[str, Any] = {
    **{"heads": 4, "d_model": 64, "layers": 2, "context": 16, "seq_len": 16, "micro_batch": 3},
    **{"vocab_size": 300, "tensor_parallel": 2, "device": "cpu"},
}
LLAMA: dict[str, Any] = {
    **{"position": "rope", "norm": "rms", "activation": "swiglu", "kv_heads": 2, "qk_norm": True},
    **{"bias": "none"},
}
KINDS = {name: name for name in ("all_gather", "reduce_scatter", "all_reduce")}
KINDS["all_reduce_max"] = "all_reduce"
Sent = Counter[tuple[str, str, str]]


@contextmanager
def counted(found: Sent, part: str) -> Iterator[None]:
    """Bytes and number of collectives by kind, of what the ranks of a matrix call meanwhile."""

    def counting(name: str, kind: str) -> Any:
        original = getattr(TensorGroup, name)

        def call(tensor_group: TensorGroup, x: torch.Tensor) -> torch.Tensor:
            times = tensor_group.rank.size if kind == "all_gather" else 1
            found[part, kind, "bytes"] += times * x.nbytes
            found[part, kind, "pieces"] += 1
            return cast(torch.Tensor, original(tensor_group, x))

        return mock.patch.object(TensorGroup, name, call)

    with ExitStack() as stack:
        for name, kind in KINDS.items():
            stack.enter_context(counting(name, kind))
        yield


def sent_in_a_step(run: Resolved) -> Sent:
    """Forward and backward of a rank whose group is not there: values are anything."""
    types = strategy_of(run.config).dtypes(run.config)
    rank = TensorRank(size=run.config.sharding.tensor_parallel, index=0)
    model_parallel = ModelParallel(tensor=TensorGroup(rank=rank))
    model = model_parallel.decoder(run.model).to(types.parameters)
    tokens = torch.zeros(run.config.data.micro_batch, run.seq_len, dtype=torch.int64)
    found: Sent = Counter()
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=types.autocast is not None)
    with counted(found, "forward"), autocast:
        loss = model(tokens, tokens)
    with counted(found, "backward"):
        loss.backward()
    return found


def planned(run: Resolved) -> Sent:
    found: Sent = Counter()
    for part, transfers in tensor_transfers(run).items():
        for transfer in transfers:
            found[part, transfer.kind, "bytes"] += round(transfer.size_bytes)
            found[part, transfer.kind, "pieces"] += round(transfer.pieces)
    return found


@pytest.mark.parametrize(
    ("mlp_tile", "dropout", "checkpointing"),  # each two together
    [
        *((None, 0.0, "none"), (10, 0.1, "none"), (None, 0.1, "selective")),
        *((10, 0.0, "selective"), (None, 0.0, "full"), (10, 0.1, "full")),
    ],
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16"},
        {"precision": "bf16", "strategy": "fsdp"},
        {**LLAMA, "tensor_parallel": 2, "loss_chunk": 20},
        {"tensor_parallel": 4, "loss_chunk": 33},
    ],
    ids=["fp32", "autocast", "bf16", "llama", "4 ranks"],
)
def test_what_a_step_sends(
    changes: dict[str, Any], mlp_tile: int | None, dropout: float, checkpointing: str
) -> None:
    config = RunConfig().replace(
        **{**SMALL, **changes},
        mlp_tile=mlp_tile,
        dropout=dropout,
        activation_checkpointing=checkpointing,
    )
    ranks = config.sharding.tensor_parallel
    # Without other ranks of the same parts there is nothing to shard over.
    run = resolve(
        config, world_size=2 * ranks if "strategy" in changes else ranks, device_type="cpu"
    )
    assert sent_in_a_step(run) == planned(run)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kept", ["every=2", "keep=qkv", "keep=attention,proj", "keep=mlp-up"])
def test_what_is_not_kept_is_sent_again(kept: str, dropout: float) -> None:
    config = RunConfig().replace(**SMALL, attention="eager", dropout=dropout)
    config = config.replace(activation_checkpointing=kept)
    run = resolve(config, world_size=config.sharding.tensor_parallel, device_type="cpu")
    assert sent_in_a_step(run) == planned(run)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma2", {"precision": "bf16"}),
        ("qwen3", {"loss_chunk": 20}),
        ("phi3", {"precision": "bf16", "strategy": "fsdp"}),
        ("gpt_neox", {}),
    ],
)
def test_what_a_decoder_of_transformers_sends(
    name: str, changes: dict[str, Any], checkpointing: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ARCHITECTURES[name]))
    config = RunConfig().replace(
        model=str(tmp_path / "config.json"),
        **{"decoder": "transformers", "seq_len": 16, "micro_batch": 3, "tensor_parallel": 2},
        **{"device": "cpu", "activation_checkpointing": checkpointing, **changes},
    )
    run = resolve(config, world_size=4 if "strategy" in changes else 2, device_type="cpu")
    sent = sent_in_a_step(run)
    assert sent == planned(run)
    layers = run.model.layers
    assert sent["forward", "all_reduce", "pieces"] > 2 * layers


def test_selective_checkpointing_repeats_nothing() -> None:
    def total(checkpointing: str) -> int:
        config = RunConfig().replace(**SMALL, activation_checkpointing=checkpointing)
        sent = planned(resolve(config, world_size=2, device_type="cpu"))
        return sum(size for (_, _, what), size in sent.items() if what == "bytes")

    assert total("none") == total("selective") < total("full")
