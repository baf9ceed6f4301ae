"""Decoders of transformers over shards of matrices compute what they do over whole ones, and what
cannot is refused by name."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_threads import require_matrix_parity
from tiny_architectures import ARCHITECTURES, MORE

from launcher.config.model import part_of
from launcher.config.resolve import resolve
from launcher.config.schema import RunConfig
from launcher.model.foreign import matrices, matrix_check
from launcher.model.foreign.config import ForeignConfig
from launcher.model.foreign.matrix_check import matrix_obstacle
from launcher.model.foreign.reading import foreign_config
from launcher.parallel.mesh import ModelParallelRank, TensorRank
from launcher.parallel.model_parallel import ModelParallel
from launcher.strategies.parameters import parameters_of
from launcher.util.errors import UserError

FIELDS = {**ARCHITECTURES, **MORE}
SHARDED = (
    *("cohere", "exaone4", "gemma2", "gemma3_text", "glm4", "gpt_neox", "granite", "llama"),
    *("mixtral", "nemotron", "olmo2", "phi", "phi3", "qwen2_moe", "qwen3", "smollm3"),
    "starcoder2",
)
"""Each kind of attention and MLP that a plan names is among them."""


def whole(name: str, **changes: Any) -> ForeignConfig:
    return foreign_config({**FIELDS[name], "attention_dropout": 0.0, **changes})


@pytest.mark.parametrize("name", SHARDED)
def test_shards_have_the_loss_and_gradients_of_the_whole(name: str) -> None:
    require_matrix_parity(whole(name))


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_blocks_that_are_recomputed_sum_once(checkpointing: str) -> None:
    """Products of gemma2 that are kept, before its second norms, are sums."""
    require_matrix_parity(replace(whole("gemma2"), activation_checkpointing=checkpointing))


@pytest.mark.parametrize("name", ["gemma2", "phi"])
def test_a_vocabulary_need_not_divide(name: str) -> None:
    """Nor have every token that pads: phi's head has a bias, gemma2's caps its logits."""
    require_matrix_parity(whole(name, vocab_size=263, pad_token_id=200))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["gemma2", "gpt_neox", "mixtral", "phi", "phi3"])
def test_shards_are_the_modules_own_shapes(name: str, ranks: int) -> None:
    model = whole(name, num_key_value_heads=4)
    for index in range(ranks):
        rank = ModelParallelRank(tensor=TensorRank(size=ranks, index=index))
        with torch.device("meta"):
            module = ModelParallel.predicted(rank, device_type="cuda").decoder(model)
        found = {name: tuple(p.shape) for name, p in module.named_parameters()}
        assert found == {p.name: p.shape for p in parameters_of(model, rank)}
        assert list(found) == [p.name for p in parameters_of(model)]  # in the same order
        part = part_of(model, ranks, index)
        assert found == {p.name: p.shape for p in parameters_of(part)}
        assert part.parameter_count == sum(p.elements for p in parameters_of(part))
        assert part.parameter_count < 0.7 * model.parameter_count
        multiplied = part.matmul_parameter_count * ranks  # routers are whole
        assert multiplied == pytest.approx(model.matmul_parameter_count, rel=0.03)


def resolved(folder: Path, name: str, **changes: Any) -> RunConfig:
    path = folder / "config.json"
    path.write_text(json.dumps(FIELDS[name]), encoding="utf-8")
    config = {"model": str(path), "decoder": "transformers", "seq_len": 16}
    run = RunConfig().replace(**{**config, "tensor_parallel": 2, **changes})
    ranks = run.sharding.tensor_parallel * run.sharding.context_parallel
    return resolve(run, world_size=ranks, device_type="cpu").config


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("opt", {}, "has no plan that names them: leave it out, and shard .* --strategy fsdp"),
        ("deepseek_v2", {}, "kv_a_proj_with_mqa as mla_kv_a_proj, which is not known"),
        ("llama", {"tensor_parallel": 4}, "has 4 heads with 2 of keys, which do not divide"),
        ("gemma2", {"context_parallel": 2}, "with --context-parallel 2 knows .* leave one out"),
        ("llama", {"sample_every": 5}, "--sample-every 5 writes on one rank alone"),
        ("llama", {"lora_rank": 4, "random_base": True}, "adapters are not sharded"),
        ("llama", {"optimizer": "muon"}, "--optimizer muon"),
        ("llama", {"precision": "fp8"}, "--precision fp8 scales whole matrices"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(
    name: str, changes: Mapping[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says) as refused:
        resolved(tmp_path, name, **changes)
    assert "\n" not in str(refused.value)


def test_tokens_need_not_divide(tmp_path: Path) -> None:
    """Each rank has all of them."""
    assert resolved(tmp_path, "gemma2", seq_len=15).sharding.strategy == "single"


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("llama", {"attention_dropout": 0.1}, "drops 0.1 in model.layers.0.self_attn"),
        ("gpt_neox", {"hidden_dropout": 0.1}, "drops 0.1 in gpt_neox.emb_dropout"),
        ("phi3", {"intermediate_size": 49}, "has 49 features in .*.mlp.down_proj"),
        ("phi", {"qk_layernorm": True}, "has .*k_layernorm.bias between shards of them"),
        ("qwen3_moe", {"moe_intermediate_size": 15}, "has 15 features in each expert of"),
        ("cohere", {"use_qk_norm": True}, "does not compute with shards of them .RuntimeError"),
    ],
)
def test_a_config_whose_shards_do_not_compute_the_same_is_refused(
    name: str, changes: Mapping[str, Any], says: str
) -> None:
    reason = matrix_obstacle(whole(name, **changes), 2)
    assert reason is not None
    assert re.match(says, reason)


def _without(style: str) -> Callable[[ForeignConfig], dict[str, str]]:
    return lambda config: {n: s for n, s in matrices.matrix_styles(config).items() if s != style}


@pytest.mark.parametrize(
    ("name", "style", "says"),
    [
        (
            "qwen3",
            matrices.SUMMED,
            "has model.layers.0.self_attn.k_norm.weight between shards of them",
        ),
        ("qwen3", matrices.ROW, "does not compute with shards of them"),
        ("qwen3", matrices.COLUMN, "does not compute with shards of them"),
        (
            "olmoe",
            matrices.PACKED,
            "has experts of a kind that is not known here in model.layers.0.mlp",
        ),
    ],
)
def test_a_plan_that_leaves_something_out_is_refused(
    name: str, style: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix_check, "matrix_styles", _without(style))
    reason = matrix_check._obstacle.__wrapped__(whole(name), 2)
    assert reason is not None
    assert reason.startswith(says)
