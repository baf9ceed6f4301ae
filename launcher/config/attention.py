"""Which attention a run computes with, settled before anything starts."""

import torch

from launcher.config.schema import RunConfig
from launcher.errors import NotInstalled, UserError
from launcher.model import attention
from launcher.model.attention import Choice, choose
from launcher.model.config import AttentionKind, ModelConfig
from launcher.optim.dtypes import dtypes


def choose_attention(config: RunConfig, model: ModelConfig, *, device_type: str) -> Choice:
    """The kernel that `--attention` and `--sdpa-backend` come to; allocates nothing on a GPU.

    Where no GPU is visible (a login node), its compute capability is not held against a kernel.

    Raises:
        UserError: one that is asked for cannot run, with the reason; NotInstalled where only its
            package is missing.
    """
    choice = _choose(config, model, model.attention, device_type)
    recomputes = config.model.activation_checkpointing == "selective" and not config.loop.compile
    if choice.kind == "flex" and recomputes:
        # It is compiled on its own, and compiling stands aside for the modes that keep outputs.
        if model.attention == "flex":
            raise UserError(
                "--attention flex with --activation-checkpointing selective needs --compile: "
                "give it, or full checkpointing, or --attention sdpa"
            )
        choice = _choose(config, model, "sdpa", device_type)
    return choice


def _choose(config: RunConfig, model: ModelConfig, kind: AttentionKind, device_type: str) -> Choice:
    visible = device_type == "cuda" and torch.cuda.is_available()
    try:
        return choose(
            kind,
            device_type=device_type,
            dtype=dtypes(config.optim).computed,
            head_size=model.head_dim,
            window=model.window,
            dropout=model.dropout,
            sdpa_backend=model.sdpa_backend,
            capability=torch.cuda.get_device_capability() if visible else None,
        )
    except attention.NotInstalled as error:
        raise NotInstalled(str(error)) from None
    except ValueError as error:
        raise UserError(str(error)) from None
