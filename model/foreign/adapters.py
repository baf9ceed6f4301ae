"""Low-rank adapters (LoRA) on the linear layers of a decoder of transformers, and these layers in 4
or 8 bits."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from launcher.model.config import Quantization
from launcher.model.linears import Adapter, QuantizedLinear, QuantizedLoRALinear
from launcher.model.lora_config import BLOCK, Lora
from launcher.model.parts import block_of, parts_of


class _LinearOf(nn.Module):
    """A Linear whose weight, with its name, is that of one which exists."""

    def __init__(self, inner: int, outer: int, *, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = inner, outer
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.linear(x, self.weight, self.bias)
        return y


class AdaptedLinear(Adapter, _LinearOf):
    """A linear layer of transformers with an adapter beside it: [*, in] -> [*, out]."""


def linears(causal: Any) -> Iterator[tuple[str, str, nn.Linear]]:
    """Yield the linear layers of the blocks: name, the target that they belong to, module.

    `attention` is what is inside of a module of that name, `mlp` all others.
    """
    blocks = parts_of(causal).blocks
    path = next(path for path, module in causal.named_modules() if module is blocks)
    for name, child in blocks.named_modules(prefix=path):
        if type(child) is nn.Linear:
            owners = [causal.get_submodule(name[:end]) for end, c in enumerate(name) if c == "."]
            inside = any("Attention" in type(owner).__name__ for owner in owners)
            yield name, "attention" if inside else "mlp", child


def adapted(causal: Any, lora: Lora) -> dict[str, nn.Linear]:
    """Return the linear layers that get adapters, by name.

    Raises:
        ValueError: a target names none of them, the model computes with the weight of one itself,
            or the rank is more than one of them has.
    """
    known = [*linears(causal)]
    if not known:
        raise ValueError(
            f"--lora-rank {lora.rank}: the blocks of {type(causal).__name__} have no nn.Linear "
            "that an adapter could be beside: leave it out"
        )
    wanted = {*lora.targets}
    if {"qkv", "proj"} <= wanted:
        wanted = wanted - {"qkv", "proj"} | {"attention"}
    found = {n: m for n, kind, m in known if wanted & {kind, _last(n)}}
    names = {word for n, kind, _ in known for word in (kind, _last(n))}
    unknown = sorted(wanted - names)
    if not found or (unknown and wanted != {"attention", "mlp"}):
        own = ", ".join(dict.fromkeys(_last(n) for n, _, _ in known))
        raise ValueError(
            f"--lora-targets {','.join(lora.targets)}: this model has no {unknown[0]}: give all, "
            f"qkv,proj for attention, mlp for all others, or names of {own}"
        )
    for name in found:
        if (owner := _reads_weight(causal, name)) is not None:
            raise ValueError(
                f"--lora-targets {','.join(lora.targets)}: {owner} computes with "
                f"the weight of {_last(name)} itself, past an adapter: name other layers"
            )
    most = min(min(m.in_features, m.out_features) for m in found.values())
    if lora.rank > most:
        raise ValueError(
            f"--lora-rank {lora.rank} is more than the {most} rows or columns of the narrowest "
            f"matrix that gets an adapter: use at most {most}, 8 is usual"
        )
    return found


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _reads_weight(causal: Any, name: str) -> str | None:
    """Return the class that computes with the weight of a linear layer itself, if one does."""
    owner: Any = type(causal.get_submodule(name.rpartition(".")[0]))
    return owner.__name__ if f".{_last(name)}.weight" in _source(owner) else None


@cache
def _source(module_class: Any) -> str:
    return inspect.getsource(module_class)  # which parses the class's whole file


def quantized(causal: Any, kind: Quantization) -> dict[str, nn.Linear]:
    """Return the linear layers whose weights are quantised, by name: those of the blocks, but for
    those whose weight another module computes with.

    Raises:
        ValueError: the rows of one cannot be divided into blocks of one scale.
    """
    if kind == "none":
        return {}
    found = {n: m for n, _, m in linears(causal) if _reads_weight(causal, n) is None}
    for name, linear in found.items():
        if linear.in_features % BLOCK:
            raise ValueError(
                f"--quantize-base {kind} has one scale for each {BLOCK} elements of a row, and the "
                f"rows of {_last(name)} have {linear.in_features}: leave it out for this model"
            )
    return found


def adapt(causal: Any, lora: Lora, kind: Quantization) -> None:
    """Put adapters beside the linear layers of the blocks, and quantise what is frozen of them."""
    chosen, packed = adapted(causal, lora), quantized(causal, kind)
    for name, linear in (chosen | packed).items():
        owner, _, own_name = name.rpartition(".")
        sizes = linear.in_features, linear.out_features
        options: dict[str, Any] = {"bias": linear.bias is not None, "kind": kind}
        module: nn.Module
        if name not in packed:
            module = AdaptedLinear(sizes[0], [sizes[1]], lora=lora, linear=linear)
        elif name in chosen:
            module = QuantizedLoRALinear(sizes[0], [sizes[1]], lora=lora, **options)
        else:
            module = QuantizedLinear(*sizes, **options)
        setattr(causal.get_submodule(owner), own_name, module)


def adapter_counts(causal: Any, lora: Lora) -> Counter[int | None]:
    """Return the parameters of the adapters of each block, by its number; ValueError as of
    `adapted`."""
    found: Counter[int | None] = Counter()
    for name, linear in adapted(causal, lora).items():
        found[block_of(name)] += lora.rank * (linear.in_features + linear.out_features)
    return found
