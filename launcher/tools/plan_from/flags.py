"""Facts of a reading as flags of `launcher.train`, and what is still to be asked for."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from launcher.config.arguments import parse_run_config
from launcher.measure.hardware import GPUS_PER_NODE
from launcher.model.config import ModelConfig
from launcher.model.foreign.config import ForeignConfig
from launcher.model.sizes import known_name
from launcher.tools.plan_from.computing import checkpointing_of, loss_of, precision_of
from launcher.tools.plan_from.keys import Facts
from launcher.tools.plan_from.kinds.adapters import PEFT_LAYERS
from launcher.tools.plan_from.translate import Reading
from launcher.util.errors import UserError
from launcher.util.flags import as_words, fields_of

_AS_THEY_ARE: Final = (
    *("seq_len", "optimizer", "momentum", "attention", "compile", "optimizer_in_backward", "clip"),
)
_SHARDED_BY: Final = {"fsdp": "FSDP", "zero": "DeepSpeed", "ddp": "DDP"}


def gpus_of(reading: Reading, asked: int | None, per_node: int | None) -> tuple[int, int]:
    """Return the GPUs in all and the machines, as `--gpus` or the file says.

    Raises:
        UserError: neither does, and it shards over several.
    """
    facts = reading.facts
    machines = facts.get("machines", 1)
    degrees = _degrees(reading)
    found = asked or facts.get("gpus") or machines * facts.get("per_machine", 0) or degrees
    found = found or facts.get("gpus if unsaid", 0)
    if degrees and found != degrees:
        raise UserError(
            f"its degrees of parallelism are for {degrees} GPUs, not {found}: give --gpus "
            f"{degrees}, or correct them"
        )
    if not found and "shard ranks" in facts:
        names = ("shard ranks", "replicas", "tensor_parallel", "context_parallel")
        found = math.prod(int(facts.get(name, 1)) for name in names)
        reading.notes.append(f"{found} GPUs are assumed, by its degrees: --gpus N for more")
    if not found:
        strategy = "fsdp" if "shard" in facts else facts.get("strategy", "")
        if strategy in _SHARDED_BY or facts.get("tensor_parallel", 1) > 1:
            how = _SHARDED_BY.get(str(strategy), "tensor parallelism")
            raise UserError(f"asks for {how} and does not say on how many GPUs: give --gpus N")
        reading.notes.append("1 GPU is assumed: --gpus N for more")
        found = 1
    nodes = max(machines, -(-found // (per_node or GPUS_PER_NODE)))
    return found, nodes


def _model_of(facts: Mapping[str, Any]) -> str | None:
    """Return our name of the model, or None where it has none."""
    flavor, family = str(facts.get("flavor", "")).lower(), facts.get("family")
    if flavor and family is None:
        family, _, flavor = flavor.partition("_")
    if family is not None:
        names = {"llama3": "llama-3.1-{}", "qwen3": "qwen3-{}", "llama2": "llama-2-{}"}
        return known_name(names.get(str(family), "{}").format(flavor.partition("_")[0]))
    name = facts.get("model")
    if name is None:
        return None
    # A month of release, as in Qwen3-4B-Instruct-2507, leaves the shape as it was.
    return known_name(str(name)) or known_name(re.sub(r"-\d{4}$", "", str(name)))


def _sharding(facts: Mapping[str, Any], gpus: int, machines: int) -> Facts:
    """Return the fields of sharding on so many GPUs."""
    tensor, context = facts.get("tensor_parallel", 1), facts.get("context_parallel", 1)
    found: Facts = {"tensor_parallel": tensor, "context_parallel": context}
    if "context_parallel_method" in facts:
        found["context_parallel_method"] = facts["context_parallel_method"]
    names = ("zero", "reshard_after_forward", "offload_optimizer", "offload_param", "nvme_path")
    strategy, replicas = facts.get("strategy"), facts.get("replicas", 1)
    if gpus == 1:
        strategy = facts.get("alone", strategy)
    if replicas == "nodes":
        replicas = machines
    elif "shard ranks" in facts:
        replicas = max(1, gpus // (tensor * context * facts["shard ranks"]))
    if "shard" in facts:  # torchtitan: what is left is sharded over
        # -1: over all ranks that are left
        # and with its ranks of context parallelism
        shards = facts["shard"] * context
        if shards < 0:
            shards = gpus // (tensor * replicas)
        strategy = "fsdp" if shards > 1 else "ddp" if replicas > 1 else "single"
    if strategy is None or strategy == "ddp" or (strategy == "single" and gpus > 1):
        several = facts.get("sharding of several", "ddp")
        strategy = several if gpus > 1 else "single"
    found["strategy"] = strategy
    if strategy == "fsdp" and isinstance(replicas, int) and 1 < replicas < gpus:
        found["replicate"] = replicas
    offloads = strategy in ("fsdp", "zero")
    found |= {name: facts[name] for name in names if name in facts and offloads}
    if strategy == "fsdp":
        found.pop("zero", None)
    elif strategy == "zero":
        found.pop("reshard_after_forward", None)
        if found.get("zero") != 3:
            found.pop("offload_param", None)
    return found


def _degrees(reading: Reading) -> int:
    """Return the ranks that torchtitan's degrees come to; 0 where they take all that there are."""
    facts = reading.facts
    if facts.get("shard", -1) < 0:
        return 0
    names = ("shard", "replicas", "tensor_parallel", "context_parallel", "pipeline")
    return math.prod(int(facts.get(name, 1)) for name in names)


def training_flags(
    reading: Reading, user: Sequence[str], gpus: int, machines: int
) -> tuple[list[str], Facts]:
    """Return the flags of the run that the files describe, the user's last, and its fields.

    Raises:
        UserError: the model, the batch or the sharding is in no file and no flag.
    """
    facts, given = reading.facts, fields_of(user)
    if "absent" in facts:
        _without_companion(reading, given)
    if "batch of the shell" in facts and "micro_batch" not in given:
        raise UserError(f"{facts['batch of the shell']}: give --micro-batch N")
    own = parse_run_config(user)
    fields: Facts = {name: facts[name] for name in _AS_THEY_ARE if name in facts}
    if not given & {"model", "init_from"}:
        fields["model"] = _model(facts)
    if not reading.engine.ties_head and "tied" not in given:
        fields["tied"] = False
    if reading.kind.name.startswith(("accelerate", "DeepSpeed")):
        _ask(facts, given)
    if given & {"strategy", "zero", "deepspeed"}:
        facts["strategy"] = own.sharding.strategy if "strategy" in given else "zero"
        for name in ("shard", "sharding of several"):
            facts.pop(name, None)
    fields |= _sharding(facts, gpus, machines)
    # accelerate's default is 1, transformers' 2
    version = facts.get("fsdp_version", 1 if facts.get("engine") == "fsdp" else 2)
    if fields["strategy"] == "fsdp" and version == 1:
        reading.left_out.append("FSDP 1: its flat parameters are planned as the groups of FSDP 2")
    shape = ["--model", fields["model"], *user] if "model" in fields else user
    built = parse_run_config(shape).model.build()
    fields |= _adapters(reading, given, built)
    fields |= precision_of(reading, fields["strategy"], adapters="lora_rank" in fields)
    if fields["precision"] == "fp32" and "mixed" not in facts and "precision" not in given:
        reading.notes.append(
            "no key asks for bf16 or fp16: fp32 is planned, --precision for others"
        )
    fields |= loss_of(reading)
    fields["activation_checkpointing"] = checkpointing_of(reading, built.layers, gpus)
    said = own.data.seq_len if "seq_len" in given else None
    length = int(said or fields.get("seq_len", 1))
    micro = own.data.micro_batch if "micro_batch" in given else _micro_batch(facts, length)
    ranks = max(1, gpus // (fields["tensor_parallel"] * fields["context_parallel"]))
    whole = facts.get("global_batch") or micro * ranks * facts.get("accumulation", 1)
    if "global_batch_tokens" in facts:
        whole = facts["global_batch_tokens"] // length
    # whole micro-batches on every rank, at least one
    whole = max(whole - whole % (micro * ranks), micro * ranks)
    fields |= {"micro_batch": micro, "global_batch": whole}
    # --zero implies it
    if fields["strategy"] == "zero" and not given & {"strategy", "deepspeed"}:
        fields.pop("strategy")
    words = as_words(fields)
    if "compile" not in fields:  # which no other trainer does by itself
        words.append("--no-compile")
    return [*words, *user], fields


def _without_companion(reading: Reading, given: set[str]) -> None:
    """Reject a config whose sharding is in a file that is not here, unless a flag gives it: DDP
    would be planned, and not fit where the run does."""
    absent = str(reading.facts["absent"])
    if not given & {"strategy", "zero", "deepspeed"}:
        raise UserError(f"{absent}: give the file to --from, too, or give --strategy or --zero")
    if absent not in reading.left_out:
        reading.left_out.append(absent)


def _ask(facts: Facts, given: set[str]) -> None:
    """Reject a config that holds no batch where no flag does."""
    missing = []
    if "micro_batch" not in facts and "micro_batch" not in given:
        missing.append("the micro-batch: give --micro-batch N")
    if "seq_len" not in facts and "seq_len" not in given:
        missing.append("the length of sequences: give --seq-len N")
    if missing:
        raise UserError(f"does not say {' and '.join(missing)}")


def _model(facts: Facts) -> str:
    if (model := _model_of(facts)) is not None:
        return model
    said = facts.get("model") or " ".join(
        str(facts[name]) for name in ("family", "flavor") if name in facts
    )
    if not said:
        raise UserError("does not say which model: give --model NAME or --hf-config FILE")
    raise UserError(
        f"its model {said:.80} has no name here: give --hf-config FILE with its config.json, or "
        "--model hf:ORG/NAME"
    )


def _adapters(reading: Reading, given: set[str], model: ModelConfig) -> Facts:
    facts = reading.facts
    said = [name for name in ("q", "k", "v", "proj", "mlp") if facts.get(f"target {name}")]
    targets = dict.fromkeys("qkv" if name in "qkv" else name for name in said)
    ranked = "lora_rank" in facts and facts.get("lora if ranked", False)
    is_lora = facts.get("lora", ranked) or any(name.startswith("target ") for name in facts)
    if not is_lora:
        if rank := facts.pop("lora_rank", None):
            reading.left_out.append(f"a rank of {rank}: nothing asks for adapters beside it")
        return {}
    rank = facts.get("lora_rank") or facts.get("lora_rank if lora") or 8
    found: Facts = {"lora_rank": rank, "random_base": True}
    named, layers = facts.get("lora_targets") or ",".join(targets), facts.pop("layers", None)
    if facts.get("every layer"):
        named, layers = "all", None
    elif not named:
        named, layers = facts.get("lora_targets if lora"), facts.get("layers if lora")
        if layers and isinstance(model, ForeignConfig):
            layers = PEFT_LAYERS.get(str(model.fields.get("model_type")), layers)
    if layers and isinstance(model, ForeignConfig):
        named = layers  # which our words for a decoder's own matrices are not
    if named:
        found["lora_targets"] = named
    if layers and "lora_targets" not in given:
        facts["layers"] = layers
    dropout = facts.get("lora_dropout", facts.get("lora_dropout if lora", 0.0))
    if dropout:
        found["lora_dropout"] = dropout
    if "quantize_base" in facts:
        found["quantize_base"] = facts["quantize_base"]
    return found


def _micro_batch(facts: Mapping[str, Any], length: int) -> int:
    if "micro_batch_tokens" in facts:
        return max(1, int(facts["micro_batch_tokens"]) // length)
    return int(facts.get("micro_batch", 1))
