"""Precision, loss and recomputation of a reading's run, as fields."""

from typing import Final

from launcher.tools.plan_from.keys import Facts
from launcher.tools.plan_from.translate import Reading

_KEPT_IN_FP8: Final = 0.4
"""Share of blocks kept whole: about the bytes of torchtitan's choice of operators in fp8."""


def precision_of(reading: Reading, strategy: str, *, adapters: bool) -> Facts:
    """Return the fields of precision: whether weights in fp32 are kept, and of what type gradients
    are."""
    facts, engine = reading.facts, reading.engine
    mixed, weights = facts.get("mixed"), facts.get("weights")
    if not engine.computes_less_alone and strategy in ("single", "ddp") and not adapters:
        mixed = None
    if mixed is None and weights in (None, "fp32"):
        return {"precision": "tf32" if facts.get("tf32") else "fp32"}
    if mixed == "fp8":
        return {"precision": "fp8"}
    if "fp16" in (mixed, weights):
        return {"precision": "fp16"}
    kept_fp32 = weights != "bf16" or adapters
    if strategy == "zero":
        # DeepSpeed keeps fp32 master weights, of whatever type the model was loaded
        kept_fp32 = kept_fp32 or mixed == "bf16"
    elif strategy == "fsdp" and engine.upcasts:
        kept_fp32 = kept_fp32 or mixed is not None
    if not kept_fp32 and facts.get("optimizer", "adamw") not in ("adamw", "adamw8bit"):
        reading.left_out.append(
            f"weights in bf16 beside {facts['optimizer']}: planned with weights in fp32"
        )
        kept_fp32 = True
    if not kept_fp32:
        return {"precision": "bf16-pure", "compensation": False}
    found: Facts = {"precision": "bf16"}
    if strategy == "zero":
        found["grad_accum_dtype"] = facts.get("grad_accum_dtype", engine.zero_gradients)
    return found


def holds_logits(reading: Reading) -> bool:
    """Return whether the loss holds the logits of all tokens."""
    facts, engine = reading.facts, reading.engine
    if "loss" in facts:
        return bool(facts["loss"] == "whole")
    return engine.whole_logits and not (engine.compiled_loss_in_chunks and facts.get("compile"))


def loss_of(reading: Reading) -> Facts:
    """Return the field of the loss; that of sharded matrices has chunks here."""
    sharded = reading.facts.get("tensor_parallel", 1) > 1
    return {"loss_chunk": 0} if holds_logits(reading) and not sharded else {}


def checkpointing_of(reading: Reading, layers: int, gpus: int) -> str:
    """Return what is recomputed, as `--activation-checkpointing` has it."""
    facts, engine = reading.facts, reading.engine
    mode = str(facts.get("activation_checkpointing", "none"))
    if engine.checkpoints_when_sharded and gpus > 1 and facts.get("fine-tunes"):
        return "full"
    if mode != "selective":
        return mode
    if facts.get("selective") != "op":
        return str(facts["selective"])
    if facts.get("mixed") == "fp8":
        kept = round(_KEPT_IN_FP8 * layers)
        return f"none:{kept}/full:{layers - kept}"
    # Every second product is kept: of half of the blocks all four, of the others two.
    half = layers // 2
    if not half:
        return "keep=attention,qkv"
    return f"keep=attention,qkv,proj,mlp-up:{layers - half}/keep=attention,qkv:{half}"
