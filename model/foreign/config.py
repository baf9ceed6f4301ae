"""Sizes of a decoder of transformers, in the words of our own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from launcher.model.config import ModelConfig
from launcher.model.config_checks import check_loss_chunk

USERS: Final = "--decoder"
"""Field of a document that a user's own function builds: its name, as package.module:function."""
# Fields of a document whose model another trainer computes, for a plan of it: with Liger's kernels,
# with trl's loss, with frozen weights in fp32 where it computes in less.
LIGER: Final = "--liger"
TRL_LOSS: Final = "--trl-loss"
FROZEN_FP32: Final = "--frozen-fp32"
_UNIMPORTANT = frozenset(
    {"architectures", "_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
)
"""Fields of a config.json that change nothing of what is computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignConfig(ModelConfig):
    """A decoder that transformers or a user's own code computes; its document says all of it.

    Fields of our own decoder's block (norm, activation, biases) keep their defaults and mean
    nothing here: strategies ask the module, or the counts below.
    """

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}  # noqa: RUF012

    document: str
    """The config.json, as JSON with sorted keys."""
    architecture: str
    """Class of transformers."""
    parameters: int
    """All of them, a tied head counted once."""
    block_parameters: int
    """Those of the largest block."""
    matmul_parameters: int
    """Weights that a token is multiplied with: of experts, those that it is sent to."""
    attending_blocks: int
    """Blocks with attention; others have a state instead."""
    adapter_parameters: int = 0
    """Those of all adapters, beside the others."""
    block_adapters: int = 0
    """Those of the adapters of the largest block."""
    router_loss: float = 0.0
    """Factor of the router's auxiliary loss; 0 where the config asks for none."""
    idle_parameters: int = 0
    """Those of experts that a token is not sent to."""
    part: tuple[int, int] | None = None
    """Index of a shard of its matrices and how many there are; None for the whole of them."""
    code: str = ""
    """Hash of a user's source files, so that no prediction of older ones is taken for its own."""

    def __post_init__(self) -> None:
        check_loss_chunk(self.loss_chunk)
        if self.checkpointing.budget_bytes is None:
            self.checkpointing.blocks(self.layers)

    def computes(self) -> dict[str, Any]:
        """Return the fields that give weights their meaning; its document says what heads it has,
        of which older checkpoints record less."""
        found = super(ForeignConfig, self).computes()  # slots make a new class
        return {**found, "kv_heads": None, "head_dim": None}

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of its config.json that change what it computes."""
        document: dict[str, Any] = json.loads(self.document)
        return {name: value for name, value in document.items() if name not in _UNIMPORTANT}

    @property
    def block_parameter_count(self) -> int:
        """Parameters of the largest block."""
        return self.block_parameters + self.block_adapter_count

    @property
    def block_adapter_count(self) -> int:
        """Parameters of the adapters of the largest block."""
        return 0 if self.lora is None else self.block_adapters

    @property
    def trained_parameter_count(self) -> int:
        """Parameters that have gradients: all, or those of adapters."""
        return self.parameters if self.lora is None else self.adapter_parameters

    @property
    def parameter_count(self) -> int:
        """All parameters, a tied head counted once."""
        return self.parameters + (0 if self.lora is None else self.adapter_parameters)

    @property
    def attention_dim(self) -> int:
        """Width of all heads together, on average over blocks."""
        return self.heads * self.head_size * self.attending_blocks // self.layers

    @property
    def matmul_parameter_count(self) -> int:
        """Weights that a token is multiplied with."""
        return self.matmul_parameters

    @property
    def computed_by(self) -> str:
        """Whose code it is, as the beginning of a sentence."""
        mine = USERS in self.fields
        return self.architecture if mine else f"{self.architecture} of transformers"

    @property
    def attention_reason(self) -> str:
        """Why its attention is what the config says."""
        if USERS in self.fields:
            return f"for the plan, since {self.architecture} computes what it likes"
        return f"of transformers' {self.architecture}"

    def lines(self) -> list[str]:
        """Describe, for the console, what is trained."""
        if USERS in self.fields:
            return [f"decoder: {self.architecture}"]
        router = ""
        if "router_aux_loss_coef" in self.fields or self.router_loss:
            router = (
                f"; router loss x {self.router_loss:g}"
                if self.router_loss
                else "; no router loss, as output_router_logits is false in its config"
            )
        active = f"{self.parameters - self.idle_parameters:,} parameters active per token"
        experts = f"; {active}" if self.idle_parameters else ""
        return [f"decoder: transformers' {self.architecture}{experts}{router}"]
