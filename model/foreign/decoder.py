"""A decoder of transformers as a module of ours: tokens and targets in, the mean loss out."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import sys
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from launcher.model.derived import seen
from launcher.model.foreign.adapters import adapt
from launcher.model.foreign.attention_calls import calls_attention
from launcher.model.foreign.config import USERS, ForeignConfig
from launcher.model.foreign.head import ForeignHead, LogitFunction, logit_function
from launcher.model.foreign.norms import fuse_norms
from launcher.model.foreign.patches import patch_transformers, separated_at
from launcher.model.linears import PACKED, freeze, quantize, weight_of
from launcher.model.parts import parts_of
from launcher.model.recompute import recomputed
from launcher.model.selective import AllProducts
from launcher.util.errors import UserError
from launcher.util.sizes import GIB

ROUTER = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
"""Attributes that a mixture of experts has where transformers computes its router loss."""


class ForeignDecoder(nn.Module):
    """A causal language model of transformers, without values on the meta device.

    Buffers (rotary frequencies, scales of embeddings) have their values from the start and keep
    them, and their type: no move, cast or `to_empty` of the parameters touches them.
    """

    def __init__(self, config: ForeignConfig, causal: Any = None) -> None:
        super().__init__()
        self.config = config
        if causal is None:
            causal = new_causal(config.document, config.attention)
        self.causal = causal
        whole = skeleton(config.document, config.attention)
        for name, buffer in whole.named_buffers():
            owner, _, own_name = name.rpartition(".")
            self.causal.get_submodule(owner)._buffers[own_name] = buffer  # a constant
        linear, function = (
            self.causal.get_output_embeddings(),
            head_function(config.document, config.attention),
        )
        head = ForeignHead(linear, function, chunk_rows=config.loss_chunk)
        self.causal.set_output_embeddings(head)
        if config.lora is not None:
            adapt(self.causal, config.lora, config.quantize_base)
            freeze(self)
        words = config.checkpointing.blocks(config.layers)
        for block, word in zip(parts_of(self).blocks, words, strict=True):
            if word != "none":
                block.forward = _recomputing(block, word, config)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, starts: Tensor | None = None
    ) -> Tensor:
        """Mean loss over targets that are not -100, or the logits when there are no targets.

        tokens, targets and starts [B, T] int64 -> fp32 scalar, or [B, T, V]. Attention stays in
        the document that begins at `starts`, whose positions begin at 0. In training the
        router's auxiliary loss is added, as the model's config says.
        """
        routed = self.training and self.config.router_loss > 0.0
        asked: dict[str, Any] = {"output_router_logits": True} if routed else {}
        if (positions := self.positions(tokens, starts)) is not None:
            asked["position_ids"] = positions
        with separated_at(starts):
            output = self.causal.base_model(input_ids=tokens, use_cache=False, **asked)
        loss_or_logits: Tensor = self.causal.get_output_embeddings()(
            output.last_hidden_state, targets
        )
        if routed and targets is not None:
            loss_or_logits = loss_or_logits + self.config.router_loss * self._unbalance(output)
        return loss_or_logits

    def positions(self, tokens: Tensor, starts: Tensor | None) -> Tensor | None:
        """Return positions that are not counted from the first token: those that begin anew
        separate documents."""
        if starts is None:
            return None
        return torch.arange(tokens.size(1), device=tokens.device) - starts

    def _unbalance(self, output: Any) -> Tensor:
        """The router's auxiliary loss, by the function of the model's own file."""
        function = sys.modules[type(self.causal).__module__].load_balancing_loss_func
        experts, chosen = (getattr(self.causal, name) for name in ROUTER[:2])
        loss: Tensor = function(output.router_logits, experts, chosen, None)
        return loss

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        held = [(module, dict(module._buffers)) for module in self.modules()]
        super()._apply(fn, recurse)
        for module, buffers in held:
            for name, buffer in buffers.items():
                moved = module._buffers[name]
                if buffer is not None and moved is not None:
                    device = buffer.device if moved.is_meta else moved.device
                    module._buffers[name] = buffer.to(device)
        return self


def _recomputing(block: nn.Module, mode: str, config: ForeignConfig) -> Callable[..., Any]:
    """Have backward compute a block again; inside its forward, so that FSDP gathers it once."""
    forward = block.forward
    products = partial(AllProducts, None if config.lora is None else config.lora.rank)
    shows = cache(partial(_shows_products, block, config))

    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        eager = mode == "selective" and not torch.compiler.is_compiling()
        sees_all = not (eager and shows())
        return recomputed(mode, products, forward, *args, sees_all=sees_all, **kwargs)

    return recomputing


def _shows_products(block: nn.Module, config: ForeignConfig) -> bool:
    """Show selective checkpointing the modules with matrices, once all are what they will be, and
    return whether these and transformers' attention make all products of a block."""
    known = USERS not in config.fields and any(map(calls_attention, block.modules()))
    for module in block.modules() if known else ():
        shapes = [getattr(p, "ds_shape", p.shape) for p in module.parameters(recurse=False)]
        if any(len(shape) > 1 for shape in shapes):
            module.forward = seen(module.forward)
    return known


def silence_imports() -> None:
    """Silence libraries that warn, at their import by transformers, of what has nothing to do with
    a training."""
    for logger in ("torchao", "torch.utils._pytree"):
        logging.getLogger(logger).setLevel(logging.ERROR)


def new_causal(document: str, attention: str) -> Any:
    """Build the model of a config.json under the device and modes of the caller's context, without
    drawing values."""
    silence_imports()
    fields = json.loads(document)
    if USERS in fields:
        from launcher.model.foreign.users import users_causal

        return users_causal(fields)
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.initialization import no_init_weights

    patch_transformers()
    config = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    config.dtype = torch.float32  # master weights; strategies cast what they compute with
    config._attn_implementation = None if attention == "auto" else attention
    with no_init_weights():
        causal = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config)
    causal.tie_weights()
    fuse_norms(causal)
    return causal


class _LargeOnMeta(TorchFunctionMode):
    """Makes large tensors without values on the meta device: all experts of a block are one
    parameter, which a machine may not have the memory for before it is registered."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            without: Tensor = func(*args, **{**kwargs, "device": "meta"})
            if without.nbytes >= GIB:
                return without
        return func(*args, **kwargs)


@lru_cache(maxsize=4)
def skeleton(document: str, attention: str) -> Any:
    """The model with parameters on the meta device and buffers with their values; not to be
    changed."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        # The caller may build on the meta device, where buffers would have no values.
        with torch.device("cpu"):
            with _LargeOnMeta():
                causal = new_causal(document, attention)
            if any(buffer.is_meta for buffer in causal.buffers()):  # such as a mask that was filled
                causal = new_causal(document, attention)
        return causal
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


@lru_cache(maxsize=4)
def head_function(document: str, attention: str) -> LogitFunction:
    """Return what the model does to the products of its head."""
    causal = skeleton(document, attention)
    # A user's forward has been checked to return the products themselves.
    return LogitFunction() if causal.config is None else logit_function(causal)


_drawn: dict[tuple[str, int, str, str], dict[str, Tensor]] = {}
"""Initial values of modules that are drawn together, until each has been asked for."""


def initial_value(
    name: str,
    shape: Sequence[int],
    config: ForeignConfig,
    *,
    seed: int,
    device: torch.device | str,
) -> Tensor:
    """The whole starting value of the parameter `name` as transformers initialises it, in fp32.

    A pure function of seed, name and config on one type of device. A block's values are drawn
    together, since a block's module may initialise what is inside of it; other modules alone.

    Raises:
        ValueError: transformers leaves it uninitialised; UserError: a user's decoder does.
    """
    if name.endswith(PACKED):  # whose bytes say nothing of their width
        weight = weight_of(name)
        causal = skeleton(config.document, config.attention)
        whole = causal.get_parameter(weight.removeprefix("causal.")).shape
        value = initial_value(weight, whole, config, seed=seed, device=device)
        return quantize(value, config.quantize_base)
    inner = name.removeprefix("causal.")
    causal = skeleton(config.document, config.attention)
    unit = _unit_of(inner, causal)
    key = (config.document, seed, unit, str(device))
    if inner not in _drawn.get(key, {}):
        _drawn[key] = _draw(causal, unit, seed, torch.device(device))
    value = _drawn[key].pop(inner)
    if not _drawn[key]:
        del _drawn[key]
    if value.sum().isnan():  # which needs no mask of its size
        if USERS in config.fields:
            raise UserError(
                f"--decoder {config.architecture}: {inner.removeprefix('inner.')} has no initial "
                "values: set them in init_weights(module), or in its module's reset_parameters()"
            )
        raise ValueError(f"{config.computed_by} has no initial values for {inner}")
    assert tuple(value.shape) == tuple(shape)
    return value


def _unit_of(name: str, causal: Any) -> str:
    """Name of the block that a parameter is in, or of the module outside blocks that has it."""
    blocks = parts_of(causal).blocks
    path = next(path for path, module in causal.named_modules() if module is blocks)
    if name.startswith(f"{path}."):
        return f"{path}.{name[len(path) + 1 :].partition('.')[0]}"
    return name.rpartition(".")[0]


def _draw(causal: Any, unit: str, seed: int, device: torch.device) -> dict[str, Tensor]:
    module = causal.get_submodule(unit)
    in_block = module in set(parts_of(causal).blocks)
    module = copy.deepcopy(module) if in_block else copy.copy(module)
    modules = list(module.modules()) if in_block else [module]
    for owner in modules:
        owner._parameters = {
            # NaN shows what no initialiser has reached.
            name: None if p is None else nn.Parameter(torch.full_like(p, torch.nan, device=device))
            for name, p in owner._parameters.items()
        }
    digest = hashlib.blake2b(f"{seed}:{unit}".encode(), digest_size=8).digest()
    # transformers draws from the global generator, with which training goes on.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
        with torch.no_grad():
            for owner in reversed(modules):  # what is inside first
                causal._init_weights(owner)
    named = module.named_parameters(recurse=in_block)
    return {f"{unit}.{name}": value.detach() for name, value in named}
