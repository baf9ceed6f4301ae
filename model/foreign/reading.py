"""A config.json of transformers, checked and measured on a model without memory."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from torch import nn

from launcher.model.config import AttentionKind, Quantization
from launcher.model.foreign.adapters import adapter_counts, quantized
from launcher.model.foreign.attention import key_heads
from launcher.model.foreign.config import ForeignConfig
from launcher.model.foreign.decoder import ROUTER, head_function, silence_imports, skeleton
from launcher.model.foreign.head import is_product
from launcher.model.lora_config import Lora
from launcher.model.parts import parts_of
from launcher.util.errors import UserError

_UNLIMITED: Final = 2**20
"""Context of a model without positions to run out of."""
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ATTENTION: Final = ("auto", "eager", "sdpa")


def foreign_config(
    document: Mapping[str, Any],
    *,
    attention: AttentionKind = "auto",
    activation_checkpointing: str = "none",
    loss_chunk: int | None = None,
    lora: Lora | None = None,
    quantize_base: Quantization = "none",
) -> ForeignConfig:
    """Return the sizes of a config.json's model.

    Raises:
        UserError: transformers has no such causal decoder, or one that cannot be trained here.
    """
    silence_imports()
    for reason in _obstacles(document):
        raise UserError(reason)
    if attention not in _ATTENTION:
        raise UserError(
            f"--attention {attention} is a kernel of shardscale's own decoder, and transformers "
            f"computes this model: use one of {', '.join(_ATTENTION)}"
        )
    text = _text(document)
    try:
        causal, blocks = _built(text, attention)
    except Exception as error:  # a config that its class does not take raises anything
        raise UserError(
            f"transformers cannot build this {document['model_type']}: {error}"
        ) from error
    for reason in _obstacles_of(causal):
        raise UserError(reason)
    config, head = causal.config, causal.get_output_embeddings()
    quantized(causal, quantize_base)  # which rejects rows that it does not divide
    attending = sum(any("Attention" in type(m).__name__ for m in b.modules()) for b in blocks)
    heads, d_model = getattr(config, "num_attention_heads", None) or 1, config.hidden_size
    return ForeignConfig(
        vocab_size=head.out_features,
        context=getattr(config, "max_position_embeddings", None) or _UNLIMITED,
        layers=len(blocks),
        heads=heads,
        kv_heads=key_heads(causal, heads),
        head_dim=_head_dim(config, d_model // heads),
        d_model=d_model,
        tied=head.weight is causal.get_input_embeddings().weight,
        attention=config._attn_implementation,
        activation_checkpointing=activation_checkpointing,
        loss_chunk=loss_chunk,
        quantize_base=quantize_base,
        document=text,
        architecture=type(causal).__name__,
        attending_blocks=attending,
        parameters=sum(p.numel() for p in causal.parameters()),
        block_parameters=max(sum(p.numel() for p in block.parameters()) for block in blocks),
        matmul_parameters=_matmul_parameters(causal),
        idle_parameters=sum(_idle(p, causal) for p in causal.parameters()),
        router_loss=config.router_aux_loss_coef if _routes(config) else 0.0,
        **({} if lora is None else _adapters(causal, lora)),
    )


def _head_dim(config: Any, usual: int) -> int:
    """Return the width of a head: of latent attention, whose `head_dim` is that of its rotary part,
    the mean of what scores and what is mixed, so that the FLOPs are those of both products."""
    keys, others = (getattr(config, name, None) for name in ("qk_head_dim", "head_dim"))
    of_keys: int = keys or others or usual
    return (of_keys + (getattr(config, "v_head_dim", None) or of_keys)) // 2


def _built(text: str, attention: AttentionKind) -> tuple[Any, nn.ModuleList]:
    """Return the model and its blocks; anything is raised where one of them is not there."""
    causal = skeleton(text, attention)
    head_function(text, attention)
    return causal, parts_of(causal).blocks


def _adapters(causal: Any, lora: Lora) -> dict[str, Any]:
    """Return the fields of adapters; ValueError where layers cannot have them."""
    of_blocks = adapter_counts(causal, lora)
    return {
        "lora": lora,
        "adapter_parameters": sum(of_blocks.values()),
        "block_adapters": max(of_blocks.values(), default=0),
    }


def with_adapters(config: ForeignConfig, lora: Lora) -> ForeignConfig:
    """Return a model with adapters.

    Raises:
        ValueError: layers that it does not have, or that cannot have them.
    """
    return replace(config, **_adapters(skeleton(config.document, config.attention), lora))


def separates_documents(config: ForeignConfig) -> bool:
    """Return whether positions that begin anew keep its attention inside of documents.

    That is so where transformers' own masks look at them, and nothing else goes from token to
    token: no state, no convolution.
    """
    causal = skeleton(config.document, config.attention)
    forward = type(causal.base_model).forward
    return (
        "position_ids" in inspect.signature(forward).parameters
        and _masks_take_positions(inspect.getsource(forward))
        and config.attending_blocks == config.layers
        and not getattr(causal, "_is_stateful", False)
    )


def _masks_take_positions(forward: str) -> bool:
    """Return whether a forward hands positions to each function that makes a mask."""
    nodes = [*ast.walk(ast.parse(textwrap.dedent(forward)))]
    named = {
        target.id: {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    given = []
    for node in nodes:
        name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and re.fullmatch("create_.*mask|mask_function", name):
            passed = [k.value.id for k in node.keywords if isinstance(k.value, ast.Name)]
            options = {k.arg for k in node.keywords}.union(*(named.get(n, ()) for n in passed))
            given.append("position_ids" in options)
    return bool(given) and all(given)


def _text(document: Mapping[str, Any]) -> str:
    """Return it as JSON with sorted keys, in which infinity is a number, not an object of
    save_pretrained."""
    text = json.dumps(document, sort_keys=True)
    return json.dumps(json.loads(text, object_hook=_number))


def _number(document: dict[str, Any]) -> Any:
    return float(document["__float__"]) if document.keys() == {"__float__"} else document


def _obstacles(document: Mapping[str, Any]) -> Iterator[str]:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = document.get("model_type")
    if document.get("auto_map") is not None and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        yield (
            f"auto_map is {document['auto_map']!r:.80}, code that comes with the model, which is "
            "never run: give a model that transformers itself computes"
        )
    if document.get("quantization_config") is not None:
        yield "quantization_config is of a quantised checkpoint: give the config of its base model"
    if document.get("is_encoder_decoder"):
        yield f"{kind} is an encoder and a decoder: give a decoder alone, a causal language model"
    if tower := next((n for n in document if n in ("vision_config", "audio_config")), None):
        yield (
            f"{tower} is of a model that also sees or hears: give its text_config as a config.json "
            "of its own"
        )
    if kind not in CONFIG_MAPPING:
        yield (
            f"model_type is {kind!r:.40}, which the installed transformers does not have: install "
            "a version that has it, or give another model"
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        yield f"{kind} is no causal decoder in transformers: give a causal language model"


def _obstacles_of(causal: Any) -> Iterator[str]:
    config, name = causal.config, type(causal).__name__
    if not hasattr(config, "hidden_size"):
        yield f"{name} has its sizes in a text_config: give that as a config.json of its own"
    if not is_product(head := causal.get_output_embeddings()):
        kind = type(head).__name__
        yield f"{name} has a head that computes more than a Linear ({kind}): give another model"
    for module in causal.modules():
        if kept := sorted(module._buffers.keys() - module._non_persistent_buffers_set):
            yield (
                f"{name} keeps {kept[0]} beside its parameters, which checkpoints do not hold: "
                "give another model"
            )
    if getattr(config, "layerdrop", 0.0):
        yield f"layerdrop is {config.layerdrop}, and each rank would drop other blocks: set it to 0"
    if _routes(config) and not all(hasattr(causal, attribute) for attribute in ROUTER):
        yield (
            f"output_router_logits asks for a router loss, and {name} has none that is known: set "
            "it to false"
        )


def _routes(config: Any) -> bool:
    return bool(getattr(config, "output_router_logits", False))


def _matmul_parameters(causal: Any) -> int:
    """Weights that a token is multiplied with: a head that is tied counts, an embedding does not,
    and of experts, which are one parameter together, those that a token is sent to."""
    head = causal.get_output_embeddings()
    found: int = head.weight.numel()
    for module in causal.modules():
        if isinstance(module, nn.Embedding) or module is head:
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.ndim >= 2:
                found += parameter.numel() - _idle(parameter, causal)
    return found


def _idle(parameter: nn.Parameter, causal: Any) -> int:
    """Elements that a token is not sent to, of the experts that are one parameter together."""
    config = causal.config
    experts = next((getattr(config, n) for n in _EXPERTS if getattr(config, n, None)), 1)
    if parameter.ndim != 3 or parameter.size(0) != experts:
        return 0
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_topk", None) or 1
    of_blocks = chosen if isinstance(chosen, list) else [chosen]
    every = experts * len(of_blocks)
    return parameter.numel() * (every - sum(of_blocks)) // every
