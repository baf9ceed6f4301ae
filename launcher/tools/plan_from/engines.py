"""Differences of each trainer's bytes: one row each, with the version and the source."""

from collections.abc import Mapping
from typing import Final, NamedTuple


class Engine(NamedTuple):
    """A trainer's behaviour where its config says nothing, for the version named."""

    version: str
    source: str
    whole_logits: bool
    """The loss holds the logits of all tokens in fp32; otherwise in chunks."""
    foreach: bool
    """AdamW's update holds a temporary of the weights' size: torch's foreach and not its fused
    implementation."""
    upcasts: bool = True
    """FSDP keeps shards in fp32 where bf16 is only computed in."""
    zero_gradients: str = "bf16"
    """Type in which DeepSpeed adds up gradients in bf16."""
    checkpoints_when_sharded: bool = False
    """Fine-tuning recomputes blocks wherever there are several GPUs."""
    compiled_loss_in_chunks: bool = False
    """A compiled loss holds no logits in fp32."""
    computes_transformers: bool = False
    """Blocks are those of transformers, and traced as such where it is installed."""
    gradients_beside_buckets: bool = False
    """DDP keeps gradients of their own beside its buckets, as torch does unless asked otherwise."""
    reduces_as_computed: bool = False
    """FSDP adds gradients up and sends them in the type that is computed in; otherwise in fp32."""
    expandable_segments: bool = False
    """It asks torch's allocator for them."""
    loss_in_tiles: bool = False
    """The loss takes tiles of logits and computes them again in the backward, as trl's."""
    ties_head: bool = True
    """The head has the embedding's weights, where the model's own config says so."""
    adapters_chunk_head: bool = False
    """Beside adapters the head is computed in chunks, whose gradients are not there at once."""
    adapters_in_bf16: bool = False
    """Adapters beside quantized weights are in bf16."""
    shifts_logits: bool = False
    """The loss makes another copy of the logits in fp32, without the last token's."""
    computes_less_alone: bool = True
    """bf16 is computed in where nothing is sharded, too."""
    norm_bytes: int = 0
    """Bytes per element that an RMSNorm composed of operators keeps beyond a fused one's."""


_HF: Final = Engine(
    version="transformers 5.24",
    source="training_args.py (optim), loss/loss_utils.py (logits.float()), "
    "integrations/deepspeed.py (auto buckets)",
    whole_logits=True,
    foreach=False,
    computes_transformers=True,
    gradients_beside_buckets=True,
    reduces_as_computed=True,
    norm_bytes=4,  # the input in fp32: models/llama/modeling_llama.py, LlamaRMSNorm
)
ENGINES: Final[Mapping[str, Engine]] = {
    "transformers": _HF,
    "accelerate": _HF._replace(
        version="accelerate 1.15",
        source="utils/fsdp_utils.py (trained shards in fp32), utils/dataclasses.py (FSDP's types), "
        "accelerator.py (autocast)",
    ),
    "deepspeed": _HF._replace(
        version="DeepSpeed 0.19",
        source="runtime/zero/config.py (buckets), runtime/engine.py (bf16 gradients)",
    ),
    "trl": _HF._replace(
        version="trl 1.16",
        source="trainer/sft_config.py, base_config.py (checkpointing, bf16), "
        "kernels/chunked_logprob.py (loss)",
        whole_logits=False,
        loss_in_tiles=True,
        adapters_in_bf16=True,
    ),
    "axolotl": _HF._replace(
        version="Axolotl 067b021 (2026-07)",
        source="utils/config (torch_dtype from bf16), utils/schemas/training.py (optimizer)",
    ),
    "llama-factory": _HF._replace(
        version="LLaMA-Factory ff6d4d1 (2026-08)",
        source="model/adapter.py (trained weights in fp32), hparams (checkpointing is on)",
    ),
    "llama-factory-v1": _HF._replace(
        version="LLaMA-Factory v1 ff6d4d1 (2026-08)",
        source="v1: core/base_trainer.py (AdamW, loss), core/model_engine.py (types), fsdp2.py "
        "(gradients in fp32)",
        foreach=True,
        reduces_as_computed=False,
        shifts_logits=True,
        computes_less_alone=False,
    ),
    "litgpt": Engine(
        version="LitGPT 2685705",
        source="finetune/full.py (FSDP with checkpointing, AdamW not fused), pretrain.py, "
        "model.py (lm_head), finetune/lora.py (lm_head_chunk_size)",
        whole_logits=True,
        ties_head=False,
        adapters_chunk_head=True,
        foreach=True,
        upcasts=False,
        checkpoints_when_sharded=True,
        norm_bytes=12,  # model.py: the input, its square and the result in fp32, and RoPE
    ),
    "torchtune": Engine(
        version="torchtune of 2025",
        source="training/_distributed.py (shard_model in the run's type), recipes/configs "
        "(fused AdamW), modules/loss/ce_chunked_output_loss.py, modules/rms_norm.py",
        whole_logits=True,
        foreach=False,
        upcasts=False,
        reduces_as_computed=True,
        norm_bytes=4,  # the input in fp32
    ),
    "torchtitan": Engine(
        version="torchtitan 0.2 (until 2026-02)",
        source="config/job_config.py, components/loss.py (pred.float()), fused AdamW",
        whole_logits=True,
        foreach=False,
        upcasts=False,
        compiled_loss_in_chunks=True,
        expandable_segments=True,  # run_train.sh
    ),
    "torchtitan-2026": Engine(
        version="torchtitan b5bcd76 (2026-08)",
        source="models/*/config_registry.py (ChunkedLossWrapper, SelectiveAC)",
        whole_logits=False,
        foreach=False,
        upcasts=False,
        expandable_segments=True,
    ),
}
