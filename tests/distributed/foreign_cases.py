"""Pairs of decoders of transformers and strategies that train them, so that each
architecture is sharded once, and each strategy trains dense ones, mixtures and state spaces."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

STEPS: Final = 4
BASE: Mapping[str, Any] = {
    **{"decoder": "transformers", "seq_len": 24, "tokenizer": "byte", "device": "cpu", "seed": 7},
    **{"steps": STEPS, "lr": 1e-3, "schedule": "constant", "weight_decay": 0.1, "warmup_steps": 0},
    **{"clip": 0.5, "micro_batch": 2, "global_batch": 4, "data": "text.txt"},
}
USERS: Final = "examples.decoder:build"
"""A decoder that a user's own function builds."""
_FULL: Final = {"activation_checkpointing": "full"}
_SELECTIVE: Final = {"activation_checkpointing": "selective"}
_FP8: Final = {"precision": "fp8"}
_BY_TWO: Final = {"global_batch": 8}
_SEQUENCES: Final = {"context_parallel": 2}
_HALVES: Final = {"tensor_parallel": 2}
_MATRICES: Final = {"strategy": "single", **_HALVES}
_GRAD_OP: Final = {"strategy": "fsdp", "reshard_after_forward": False}
_FSDP: Final = {"strategy": "fsdp"}
_DDP: Final = {"strategy": "ddp"}
_OF_STRATEGY: Final = (
    *("strategy", "zero", "reshard_after_forward", "context_parallel", "tensor_parallel"),
)


def _zero(stage: int) -> dict[str, Any]:
    return {"strategy": "zero", "zero": stage}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One architecture under one strategy on two ranks; `changes` to BASE, by flat name."""

    architecture: str
    changes: Mapping[str, Any]

    @property
    def name(self) -> str:
        return " ".join([self.architecture, *(f"{n}={v}" for n, v in self.changes.items())])

    @property
    def accumulation(self) -> int:
        return int({**BASE, **self.changes}["global_batch"]) // 4

    @property
    def elsewhere(self) -> "Case":
        """Return the case under another strategy, which continues what this one has saved."""
        kept = {n: v for n, v in self.changes.items() if n not in _OF_STRATEGY}
        other = _DDP if self.changes["strategy"] == "fsdp" else _FSDP
        return _case(self.architecture, _ELSEWHERE.get(self.architecture, other), kept)

    @property
    def tolerance(self) -> float:
        """Largest relative difference of losses, by what rounds them."""
        if "precision" in self.changes:
            return 1e-2
        # Whose products are in bf16.
        return 1e-3 if self.changes.get("optimizer") == "muon" else 2e-5


def _case(architecture: str, *changes: Mapping[str, Any]) -> Case:
    return Case(
        architecture=architecture, changes={n: v for each in changes for n, v in each.items()}
    )


CASES: Final = (
    _case("gemma2", _FSDP),
    _case("gemma3_text", _zero(3), _SEQUENCES),
    _case("phi3", _MATRICES, _FULL),
    _case("olmo2", _zero(2), _BY_TWO, _SEQUENCES),
    _case("granite", _FSDP, _SELECTIVE, _SEQUENCES),
    _case("falcon_h1", _DDP),
    _case("gpt_neox", _MATRICES, _SELECTIVE),
    _case("opt", _zero(3), _SELECTIVE),
    _case("stablelm", _GRAD_OP),
    _case("cohere2", _zero(2), {"loss_chunk": 10}),
    _case("smollm3", _FSDP, _BY_TWO),
    _case("bloom", _GRAD_OP, _FULL),
    _case("mamba2", _zero(3)),
    _case("llama", _zero(0)),
    _case("qwen3", _DDP, _BY_TWO, _SEQUENCES),
    _case("mistral", _zero(3), _BY_TWO),
    _case("mixtral", _zero(3), _FULL),
    _case("qwen3_moe", _FSDP),
    _case("olmoe", _zero(1), _BY_TWO),
    _case("gpt_oss", _zero(2)),
    _case("olmo3", _FSDP, {"document_attention": True}),
    _case("phi", _MATRICES, {"loss_chunk": 10}),
    _case("gemma2", _zero(3), {"precision": "bf16"}),
    _case("mixtral", _FSDP, {"precision": "bf16"}),
    _case("mixtral-512", _zero(3), {"precision": "bf16"}),
    _case("falcon_h1", _zero(1), {"precision": "bf16"}),
    _case("phi3", _FSDP, _FP8),
    _case("qwen3_moe", _FSDP, _SELECTIVE, _FP8),
    _case("qwen2_moe", _FSDP, {"optimizer": "adafactor", "lr": 1e-2}),
    _case("ernie4_5", _FSDP, {"optimizer": "muon"}),
    *(_case(USERS, each) for each in (_DDP, _FSDP, _zero(2))),
    _case(USERS, _zero(3), _FULL),
)
MESHED: Final = (
    _case("gemma2", _FSDP, _HALVES),
    _case("qwen3_moe", _FSDP, _HALVES),
    _case("qwen3", _zero(3), _HALVES),
)
"""On four ranks, of which two share matrices."""
GIVEN: Final = (
    _case("mixtral", _zero(3)),
    _case("gemma2", _FSDP),
    _case("llama", _zero(2)),
    _case("qwen3", _DDP),
)
"""Trained from a folder of weights: experts that are stored one by one, a tied head in shards."""
ADAPTED: Final = (
    _case("gemma2", _FSDP, {"lora_rank": 4, "lora_targets": "all"}),
    _case("mixtral", _zero(3), {"lora_rank": 4, "lora_targets": "o_proj,k_proj"}),
    _case("gpt_neox", _DDP, {"lora_rank": 4}, _SELECTIVE),
    _case("olmo2-64", _zero(3), {"lora_rank": 4, "quantize_base": "nf4"}),
    _case("olmo2-64", _FSDP, {"lora_rank": 4, "quantize_base": "int8"}),
)
"""Adapters beside the weights of a folder."""
_ELSEWHERE: Final = {
    **{"gemma2": _MATRICES, "granite": _MATRICES, "qwen3": _MATRICES, "olmo2": _MATRICES},
    **{"mixtral": _MATRICES},
    **{"qwen3_moe": _zero(1), "gpt_neox": _zero(1)},
}
"""Strategies that continue checkpoints, where neither FSDP nor DDP does."""
RESUMED: Final = tuple(
    {case.architecture: case for case in CASES if case.tolerance == 2e-5}.values()
)
"""A case of each architecture: saved half-way, continued under another strategy, exported."""
MEASURED: Final = (
    *RESUMED,
    *MESHED,
    *(case for case in CASES if case.architecture == USERS and case not in RESUMED),
    *(case for case in CASES if case.changes.get("precision") == "fp8"),
    *(c for c in CASES if c.architecture in ("falcon_h1", "mixtral-512") and c not in RESUMED),
    *(case for case in CASES if "optimizer" in case.changes and case not in RESUMED),
    *ADAPTED,
)
"""Whose bytes are measured, too."""
TARGETS: Final = {
    "gemma2": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "mixtral": ["o_proj", "k_proj"],
    "olmo2-64": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "gpt_neox": ["query_key_value", "dense"],
}
"""The same layers, as PEFT is asked for them."""
BOTH: Final = ("llama", "qwen3")
"""Whose folders our own decoder computes, too."""
