"""A user's own decoder: a function from a config to a module, behind transformers' interface.

What is asked of it is little: one `nn.ModuleList` of blocks, a forward from tokens to logits whose
last operation is a Linear, and modules that can draw their initial values. The rest is looked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import inspect
import json
import os
import random
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from launcher.model.foreign.config import USERS, ForeignConfig
from launcher.model.foreign.head import is_product
from launcher.model.foreign.users_values import RESETS, Undrawn
from launcher.model.parts import parts_of
from launcher.util.errors import UserError

_CONTEXT: Final = ("context", "block_size", "max_seq_len", "max_position_embeddings", "n_positions")
_HEADS: Final = ("heads", "n_head", "n_heads", "num_heads", "num_attention_heads")
_UNLIMITED: Final = 2**20


class UsersCausal(nn.Module):
    """A user's module with the parts that a causal model of transformers has.

    Its head is put behind it, so that the loss is computed by the module that owns the weight.
    """

    config = None

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        path, head = head_of(inner)
        owner, _, name = path.rpartition(".")
        setattr(inner.get_submodule(owner), name, nn.Identity())
        self.inner, self.head = inner, cast(nn.Module, head)

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.head

    def set_output_embeddings(self, head: nn.Module) -> None:
        """Replace the head."""
        self.head = head

    def base_model(self, input_ids: Tensor, use_cache: bool) -> Any:
        """Compute the hidden state that the head reads."""
        return SimpleNamespace(last_hidden_state=self.inner(input_ids))

    def _init_weights(self, module: nn.Module) -> None:
        if (own := getattr(self.inner, "init_weights", None)) is not None:
            own(module)
        elif module._parameters:  # what has none may have no such method
            next(getattr(module, n) for n in RESETS if hasattr(module, n))()


def head_of(inner: nn.Module) -> tuple[str, nn.Linear]:
    """Return the last Linear behind the blocks, and its name."""
    behind = parts_of(inner).head
    found = [(name, module) for name, module in behind.items() if isinstance(module, nn.Linear)]
    if not found:
        raise UserError(
            "has no nn.Linear after its blocks: register its output projection after them"
        )
    return found[-1]


def users_causal(document: Mapping[str, Any]) -> UsersCausal:
    """Build a user's decoder under the device and modes of the caller's context."""
    fields = dict(document)
    function, kind = _function(fields.pop(USERS))
    with Undrawn():
        return UsersCausal(function(_config(kind, fields)))


def users_config(reference: str, given: Mapping[str, Any], **options: Any) -> ForeignConfig:
    """Return the sizes of a user's decoder, checked on the meta device.

    Args:
        reference: `package.module:function`.
        given: fields of its config, by name.
        options: fields of ModelConfig.

    Raises:
        UserError: it cannot be imported or built, or is no decoder that can be trained.
    """
    function, kind = _function(reference)
    config = _config(kind, given)
    fields = config if kind is None else {n: getattr(config, n) for n in _field_names(kind)}
    try:
        document = json.dumps({USERS: reference, **fields}, sort_keys=True)
    except TypeError as error:
        raise UserError(f"its config is kept as JSON, and {error}: use numbers and text") from None
    with torch.device("meta"), Undrawn() as values:
        inner = _built(function, config)
    for reason in _obstacles(inner):
        raise UserError(reason)
    if not hasattr(inner, "init_weights") and (lost := values.noted(inner)) is not None:
        raise UserError(
            f"its constructor draws {lost}, and values are drawn later, shard by shard: give it "
            "init_weights(module), which draws those of one module"
        )
    blocks = parts_of(inner).blocks
    _, head = head_of(inner)
    heads = next((fields[name] for name in _HEADS if name in fields), 1)
    parameters = list(inner.parameters())
    embeddings = [m.weight for m in inner.modules() if isinstance(m, nn.Embedding)]
    tied = any(weight is head.weight for weight in embeddings)
    looked_up = sum(w.numel() for w in embeddings if w is not head.weight)
    _check_forward(inner)
    return ForeignConfig(
        vocab_size=head.out_features,
        context=next((fields[name] for name in _CONTEXT if name in fields), _UNLIMITED),
        layers=len(blocks),
        heads=heads,
        head_dim=max(1, head.in_features // heads),
        d_model=head.in_features,
        tied=tied,
        document=document,
        architecture=reference,
        attending_blocks=len(blocks),
        parameters=sum(p.numel() for p in parameters),
        block_parameters=max(sum(p.numel() for p in b.parameters()) for b in blocks),
        matmul_parameters=sum(p.numel() for p in parameters if p.ndim > 1) - looked_up,
        code=_code_of(reference),
        **options,
    )


def _code_of(reference: str) -> str:
    """Hash the source files of a function's package, as far as they are imported."""
    package = reference.partition(":")[0].partition(".")[0]
    own = (m for n, m in sys.modules.items() if n == package or n.startswith(f"{package}."))
    paths = sorted({Path(file) for module in own if (file := getattr(module, "__file__", None))})
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def _function(reference: str) -> tuple[Callable[[Any], nn.Module], Any]:
    """Return a function and the type of its config, None for a mapping."""
    module, _, name = reference.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        function = getattr(importlib.import_module(module), name)
        parameter = next(iter(inspect.signature(function).parameters.values()))
        hint = typing.get_type_hints(function).get(parameter.name)
    except Exception as error:  # the user's code raises anything
        raise UserError(
            f"{module}:{name} cannot be imported ({type(error).__name__}: {error}): give "
            "MODULE:FUNCTION, a function of one config, from a folder on PYTHONPATH"
        ) from None
    return function, hint if dataclasses.is_dataclass(hint) else None


def _field_names(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _config(kind: Any, given: Mapping[str, Any]) -> Any:
    if kind is None:
        return dict(given)
    if unknown := sorted(given.keys() - set(_field_names(kind))):
        raise UserError(
            f"{kind.__name__} has no field {unknown[0]}: it has {', '.join(_field_names(kind))}"
        )
    try:
        return kind(**given)
    except Exception as error:
        raise UserError(f"{kind.__name__} cannot be made of {dict(given)}: {error}") from None


def _built(function: Callable[[Any], nn.Module], config: Any) -> nn.Module:
    try:
        inner = function(config)
    except Exception as error:
        raise UserError(
            f"cannot be built without memory ({type(error).__name__}: {error}): its __init__ runs "
            'under torch.device("meta")'
        ) from None
    if not isinstance(inner, nn.Module):
        raise UserError(f"returned a {type(inner).__name__}: return an nn.Module")
    return inner


def _obstacles(inner: nn.Module) -> Iterator[str]:
    try:
        parts_of(inner)
    except TypeError as error:
        yield f"{error}: name its blocks in one list"
    for name, parameter in inner.named_parameters():
        if not parameter.is_meta:
            yield (
                f"{name} is made outside of the function, or on a device of its own: make every "
                "parameter in __init__, without a device, so that it can be sharded"
            )
    path, head = head_of(inner)
    if not is_product(head):
        yield (
            f"its head {path} computes more than nn.Linear ({type(head).__name__}): compute the "
            "rest before it, in the decoder's forward"
        )
    own = hasattr(inner, "init_weights")
    for name, module in inner.named_modules():
        if kept := sorted(module._buffers.keys() - module._non_persistent_buffers_set):
            yield (
                f"{'.'.join(filter(None, (name, kept[0])))} is a buffer whose values checkpoints "
                "do not hold: compute it in __init__ and register it with persistent=False"
            )
        if module._parameters and not own and not any(hasattr(module, n) for n in RESETS):
            yield (
                f"{name or type(inner).__name__} has parameters without initial values: give it "
                "reset_parameters(), or the decoder init_weights(module)"
            )


def _check_forward(inner: nn.Module) -> None:
    """Require the forward to return what the head has computed, of all that is trained."""
    path, head = head_of(inner)
    read: list[Tensor] = []
    unused: list[str] = []

    def record(hidden: Tensor) -> Tensor:
        read.append(hidden.new_empty(*hidden.shape[:-1], head.out_features))
        unused.extend(_unused(inner, head, hidden))
        return read[-1]

    cast(Any, head).forward = record
    before = random.getstate()
    try:
        with torch.device("meta"):
            found = inner(torch.zeros(2, 8, dtype=torch.int64))
    except Exception as error:
        raise UserError(
            f"its forward cannot run on [2, 8] tokens of the meta device "
            f"({type(error).__name__}: {error}): it takes tokens alone, and no tensor's values"
        ) from None
    finally:
        del head.forward
    if not isinstance(found, Tensor):
        raise UserError(f"its forward returns a {type(found).__name__}: return the logits alone")
    if len(read) != 1 or found is not read[0]:
        raise UserError(
            f"its forward does more than return what {path} computes, its last Linear by order of "
            "registration: return that, as [batch, tokens, vocabulary]"
        )
    if random.getstate() != before:  # ranks that skip different blocks wait for each other
        raise UserError(
            "its forward draws random numbers of Python: multiply by a random tensor instead of "
            "skipping blocks at random"
        )
    if unused:  # DDP waits for its gradient, and reduces none until then
        raise UserError(
            f"{unused[0]} has no effect on its logits: use it, leave it out, or freeze it with "
            "requires_grad_(False)"
        )


def _unused(inner: nn.Module, head: nn.Linear, hidden: Tensor) -> list[str]:
    """Name trained parameters that do not reach the head."""
    own, grad_of = {*head.parameters()}, cast(Any, torch.autograd.grad)
    trained = {n: p for n, p in inner.named_parameters() if p.requires_grad and p not in own}
    with contextlib.suppress(RuntimeError):  # no backward on the meta device
        grads = grad_of(hidden.sum(), [*trained.values()], allow_unused=True)
        return [name for name, grad in zip(trained, grads, strict=True) if grad is None]
    return []
