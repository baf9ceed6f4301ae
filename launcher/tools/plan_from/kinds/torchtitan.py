"""torchtitan: the TOML files of its versions until February 2026, and the flags of later ones."""

from typing import Any, Final

from launcher.tools.plan_from.keys import (
    Facts,
    Keys,
    Kind,
    Unknown,
    alike,
    is_on,
    no_effect,
    number_of,
    text,
    verbatim,
    when,
    whole,
    words,
)
from launcher.tools.plan_from.kinds.shared import LAUNCHER_KEYS, ring


def _selective(value: Any) -> Facts:
    """Read `selective_ac_option`: `op`, or every how many blocks."""
    if str(value) == "op":
        return {"selective": "op"}
    every = number_of(value)
    if every is None or every < 1:
        raise Unknown("is planned as op", selective="op")
    return {"selective": f"every={int(every)}"}


def _shard_degree(value: Any) -> Facts:
    # -1, torchtitan's default: all ranks that the other degrees leave
    return {"shard": int(number_of(value) or -1)}


def _components(value: Any) -> Facts:
    if value and "model" not in str(value):
        raise Unknown("blocks are planned as compiled, too, where compile.enable is on")
    return {}


def _pipeline(value: Any) -> Facts:
    found = whole("pipeline")(value)
    if found.get("pipeline", 1) > 1:
        raise Unknown("pipelines are not planned: every rank is planned with all blocks", **found)
    return {}


def _converters(value: Any) -> Facts:
    names = value if isinstance(value, list) else [value]
    if not [name for name in names if is_on(name)]:
        return {}
    if any(str(name).startswith(("float8", "quantize.linear.float8")) for name in names):
        return {"mixed": "fp8"}
    raise Unknown("is planned in bf16")


_DTYPE: Final = words({"bfloat16": {"mixed": "bf16"}, "float32": {"mixed": None}})
_KEYS: Final[Keys] = {
    **LAUNCHER_KEYS,
    "model.name": text("family"),
    "model.flavor": text("flavor"),
    "model.converters": _converters,
    "training.local_batch_size": whole("micro_batch"),
    # Until 2025, with a torch whose RMSNorm was composed and a loss that held whole logits.
    "training.batch_size": lambda value: whole("micro_batch")(value) | {"norm_bytes": 8},
    "training.global_batch_size": whole("global_batch", unset=-1),
    "training.seq_len": whole("seq_len"),
    "training.enable_cpu_offload": when(offload_optimizer="cpu", offload_param="cpu"),
    "training.dtype": words({"bfloat16": {"weights": "bf16"}, "float32": {}}),
    "training.mixed_precision_param": _DTYPE,
    "training.compile": when(compile=True, loss="whole"),
    "compile.enable": when(compile=True),
    "compile.components": _components,
    "training.mixed_precision_reduce": words(
        {"float32": {}}, otherwise="gradients are planned as reduced in fp32"
    ),
    "activation_checkpoint.mode": words(
        verbatim("none full selective", "activation_checkpointing"),
        otherwise="is planned as selective",
    ),
    "activation_checkpoint.selective_ac_option": _selective,
    "optimizer.name": words(
        {**alike("AdamW Adam", optimizer="adamw"), "Muon": {"optimizer": "muon"}},
        otherwise="is planned as AdamW",
    ),
    "optimizer.implementation": words(
        {"fused": {}, "foreach": {"foreach": True}, "for-loop": {}, "fused_opt_states_bf16": {}}
    ),
    "optimizer.fused": when(),
    "optimizer.early_step_in_backward": when(optimizer_in_backward=True, clip=0.0),
    "parallelism.data_parallel_replicate_degree": whole("replicas"),
    "parallelism.data_parallel_shard_degree": _shard_degree,
    "training.data_parallel_replicate_degree": whole("replicas"),
    "training.data_parallel_shard_degree": _shard_degree,
    "parallelism.tensor_parallel_degree": whole("tensor_parallel"),
    "training.tensor_parallel_degree": whole("tensor_parallel"),
    "parallelism.context_parallel_degree": ring,
    "experimental.context_parallel_degree": ring,
    "parallelism.fsdp_reshard_after_forward": words(
        {
            "default": {},
            "always": {"reshard_after_forward": True},
            "never": {"reshard_after_forward": False},
        }
    ),
    "parallelism.pipeline_parallel_degree": _pipeline,
    "experimental.pipeline_parallel_degree": _pipeline,
    "job.config_file": text("companion config_file"),
    "parallelism.expert_parallel_degree": "experts are planned on every rank",
    "parallelism.expert_tensor_parallel_degree": "experts are planned on every rank",
    "parallelism.enable_async_tensor_parallel": "tensor parallelism is planned as synchronous",
    "parallelism.disable_loss_parallel": "the loss is planned as sharded",
    "activation_checkpoint.memory_budget": "selective checkpointing is planned",
    "quantize.grouped_mm": "experts are planned in bf16",
    **no_effect(
        """
        job.* profiling.* lr_scheduler.* checkpoint.* comm.* fault_tolerance.* debug.*
        experimental.custom* validation.* memory_estimation.* model.hf_assets_path
        model.tokenizer_path model.print_after_conversion model.norm_type optimizer.lr
        optimizer.beta* optimizer.eps optimizer.weight_decay training.dataset* training.max_norm
        training.steps training.gc_* training.seed training.deterministic training.warmup_steps
        training.dataloader* compile.backend activation_checkpoint.* quantize.* float8.* mx.*
        parallelism.pipeline_parallel_* experimental.pipeline_parallel_*
        parallelism.module_fqns_per_model_part parallelism.context_parallel_*
        experimental.context_parallel_rotate_method parallelism.enable_compiled_autograd
        parallelism.expert_parallel_comm_backend hf_assets_path dataloader.* metrics profiler.*
        validator.*
        """
    ),
}
_MARKS: Final = (
    "training.seq_len training.local_batch_size model.flavor job.dump_folder "
    "activation_checkpoint.mode parallelism.data_parallel_shard_degree model.name "
    "lr_scheduler.warmup_steps training.steps training.batch_size"
)
_CHANGES: Final = (
    ("recomputes whole blocks", {"activation_checkpoint.mode": "full"}),
    ("compiles blocks and the loss", {"compile.enable": True}),
    ("shards matrices over 2 ranks, too", {"parallelism.tensor_parallel_degree": 2}),
    ("shards matrices over 8 ranks, too", {"parallelism.tensor_parallel_degree": 8}),
    ("moves states to the host", {"training.enable_cpu_offload": True}),
)
_DEFAULTS: Final = {
    "mixed": "bf16",
    "activation_checkpointing": "selective",
    "replicas": 1,
    "shard": -1,
}
TORCHTITAN = Kind(
    name="torchtitan TOML",
    engine="torchtitan",
    marks=_MARKS,
    keys=_KEYS,
    defaults={**_DEFAULTS, "micro_batch": 8, "seq_len": 2048, "selective": "every=2"},
    micro_batch="training.local_batch_size",
    changes=_CHANGES,
)
TORCHTITAN_FLAGS = Kind(
    name="torchtitan flags",
    engine="torchtitan-2026",
    marks=(
        "module config training.max_context_length hf_assets_path "
        "training.num_tokens_per_microbatch_per_dp_rank training.steps"
    ),
    keys={
        **_KEYS,
        "config": text("flavor"),
        "training.max_context_length": whole("seq_len"),
        "training.num_tokens_per_microbatch_per_dp_rank": whole("micro_batch_tokens"),
        "training.num_tokens_per_train_step": whole("global_batch_tokens", unset=-1),
    },
    defaults={**_DEFAULTS, "micro_batch": 1, "seq_len": 8192, "selective": "op"},
    changes=_CHANGES,
)
