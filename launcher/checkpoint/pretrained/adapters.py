"""Adapters under PEFT's names: the projections of a family that have them, and writing a folder."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from launcher.checkpoint.pretrained.weight_files import write_json, write_safetensors
from launcher.config.families import Part, family_for
from launcher.config.init_from import ADAPTER_CONFIG
from launcher.model import parts
from launcher.model.config import ModelConfig
from launcher.model.foreign.config import ForeignConfig
from launcher.model.lora_config import Lora
from launcher.model.parts import is_projection, projection_of
from launcher.strategies.parameters import parameter_shapes
from launcher.util.hub_cache import name_in_cache

WEIGHTS_FILE: Final = "adapter_model.safetensors"
DIFFERS: Final = "same outputs, but training on differs from PEFT's"
BASE_FIELD: Final = "base_model_name_or_path"


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """A projection in a family of transformers that can have an adapter."""

    part: Part
    """Its rows in our matrix."""
    target: str
    sizes: tuple[int, ...]
    """Rows of our matrices that it consists of: three where query, key and value are one there."""
    number: int
    """Number of our matrices before them in the same parameter."""

    @property
    def module(self) -> str:
        """Its module's name there."""
        return self.part.theirs.removesuffix(".weight")

    @property
    def ours(self) -> str:
        """Name of our projection."""
        return self.part.ours.removesuffix(".weight")

    @property
    def inner(self) -> int:
        """Columns."""
        return self.part.shape[1]

    @property
    def first(self) -> int:
        """First row in our matrix."""
        return self.part.start // self.inner


def projections(config: ModelConfig) -> list[Projection]:
    """Return all projections of a model, in the order of our parameters.

    Raises:
        UserError: no family of transformers has this model.
    """
    if isinstance(config, ForeignConfig):
        return _foreign_projections(config)
    family, theirs = family_for(dataclasses.replace(config, lora=None))
    found: list[Projection] = []
    for part in family.parts(theirs, parameter_shapes(theirs)):
        name = projection_of(part.ours)
        if name is None or not is_projection(part.ours):
            continue
        rows, inner = part.shape
        target, sizes, _ = parts.projections(config)[name]
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        # GPT-2's c_attn is query, key and value in one matrix; Llama's are three parts of our qkv.
        whole = rows == sum(sizes)
        found.append(
            Projection(
                part=part,
                target=target,
                sizes=sizes if whole else (rows,),
                number=starts.index(part.start // inner),
            )
        )
    return found


def _foreign_projections(config: ForeignConfig) -> list[Projection]:
    """Return the linear layers of a decoder of transformers; those without adapters have no
    target, and in a model without adapters each has its own name as its target."""
    from launcher.model.foreign.adapters import adapted, linears
    from launcher.model.foreign.conversion import PREFIX
    from launcher.model.foreign.decoder import skeleton

    causal, lora = skeleton(config.document, config.attention), config.lora
    found, chosen = [], {} if lora is None else adapted(causal, lora)
    for name, _, linear in linears(causal):
        part = Part(
            theirs=f"{name}.weight",
            ours=f"{PREFIX}{name}.weight",
            shape=(linear.out_features, linear.in_features),
            start=0,
            transposed=False,
        )
        target = name.rpartition(".")[2]
        if lora is not None:
            target = lora.targets[0] if name in chosen else ""
        found.append(Projection(part=part, target=target, sizes=part.shape[:1], number=0))
    return found


def write_adapter(
    folder: Path,
    config: ModelConfig,
    read: Callable[[str], Tensor],
    *,
    base: str | None,
    dtype: torch.dtype,
) -> str:
    """Write adapters for PEFT; returns a description for the console.

    Where three matrices of ours are one of theirs, they become one adapter of three times the rank
    with a block-diagonal B. PEFT trains the zeros between the blocks, too.

    Args:
        read: returns a matrix by our name.
        base: path of the model beside which they were trained.

    Raises:
        UserError: no family of transformers has this model.
        OSError: no room, most often.
    """
    lora = config.lora
    assert lora is not None
    rank = lora.rank
    known = projections(config)
    chosen = [p for p in known if p.target in lora.targets]
    others = [f".{p.module}" for p in known if p.target not in lora.targets]
    tensors = {adapter_key(p, half): (p, half) for p in chosen for half in "AB"}

    def shape(projection: Projection, half: str) -> tuple[int, ...]:
        own_rank = rank * len(projection.sizes)
        return (own_rank, projection.inner) if half == "A" else (sum(projection.sizes), own_rank)

    def tensor(key: str) -> Tensor:
        projection, half = tensors[key]
        ours = read(f"{projection.ours}.lora_{half.lower()}")
        if half == "A":
            first, count = projection.number * rank, len(projection.sizes) * rank
            return ours[first : first + count]
        rows = ours[projection.first : projection.first + sum(projection.sizes)]
        blocks: Tensor = torch.block_diag(*rows.split(list(projection.sizes)))
        return blocks

    write_safetensors(
        folder / WEIGHTS_FILE,
        {key: shape(*which) for key, which in tensors.items()},
        tensor,
        dtype=dtype,
        metadata={"format": "pt"},
    )
    write_json(folder / ADAPTER_CONFIG, _settings_of(chosen, others, lora, base=base))
    joined = next((p for p in chosen if p.sizes[1:]), None)
    if joined is None:
        return "an adapter for PEFT"
    count = len(joined.sizes)
    return (
        f"an adapter for PEFT, of rank {count * rank} on {short_name(joined.module)} for {count} "
        f"of rank {rank} here: {DIFFERS}"
    )


def _settings_of(
    chosen: Sequence[Projection], others: Sequence[str], lora: Lora, *, base: str | None
) -> dict[str, Any]:
    """Return adapter_config.json; `others` are the modules without adapters, which a short name
    must not match."""
    names: dict[str, int] = {}
    for projection in chosen:
        short = short_name(projection.module)
        ambiguous = any(other.endswith(f".{short}") for other in others)
        names[projection.module if ambiguous else short] = len(projection.sizes)
    joined = {name: count for name, count in names.items() if count > 1}
    growth = math.sqrt if lora.rslora else float
    on_hub = None if base is None else name_in_cache(Path(base))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        # other machines have no such cache
        BASE_FIELD: on_hub or base,
        "revision": Path(base).name if base and on_hub else None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": list(names),
        "rank_pattern": {name: lora.rank * count for name, count in joined.items()},
        # alpha / growth(rank) is the scale: with count times the rank it needs as much more alpha.
        "alpha_pattern": {name: lora.alpha * growth(count) for name, count in joined.items()},
        "bias": "none",
        "fan_in_fan_out": chosen[0].part.transposed,
        "inference_mode": True,
    }


def short_name(module: str) -> str:
    """Return the end of a module's name that is unique to its kind: GPT-2 has two c_proj."""
    owner, name = module.split(".")[-2:]
    return f"{owner}.{name}" if name == "c_proj" else name


def adapter_key(projection: Projection, half: str) -> str:
    """Return the key of A or B in the file."""
    return f"base_model.model.{projection.module}.lora_{half}.weight"
